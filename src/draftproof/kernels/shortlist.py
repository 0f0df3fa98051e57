"""The logits among which a cutoff must lie, where they are few: gathered, sorted, and cut."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.cutoff import line_of_work, read_four
from draftproof.kernels.layout import FEW
from draftproof.kernels.request import law_row


@triton.jit
@no_type_check
def gather(batch, req, place, low, high, LINES: tl.constexpr):
    """Write down the logits in [low, high) of the listed slices, FEW of them at most. Returns how many there are."""
    places = line_of_work(batch, law_row(batch, req, place.row))
    found = tl.zeros((), tl.int32)
    tl.debug_barrier()  # the places may still be read
    for n in range(0, place.count, 4 * LINES):
        _, x = read_four(batch, req, place, n, LINES)
        for i in tl.static_range(4):
            found = _append(places, found, x[i], low, high)
    tl.debug_barrier()
    return found


@triton.jit
@no_type_check
def _append(places, found, x, low, high):
    here = (x >= low) & (x < high) & (x > float("-inf"))
    columns = tl.sum(here.to(tl.int32), 2)  # [LINES, SEGMENT]
    each = tl.sum(columns, 1)
    before = found + tl.cumsum(each, 0) - each
    before = before[:, None] + tl.cumsum(columns, 1) - columns
    at = before[:, :, None] + tl.cumsum(here.to(tl.int32), 2) - 1
    tl.store(places + at, x, mask=here & (at < FEW))
    return found + tl.sum(each, 0)


@triton.jit
@no_type_check
def cut(batch, req, place, found, above, mass_above, k, top_p, goal, floor):
    """Twin: `filters._cut_sorted` and `filters._edge`. The cutoff among the `found` logits that were gathered.

    `above` logits of mass `mass_above` lie higher than all of them. Where k is not 0 the k-th largest ends the kept
    ones and top-p is of their mass, if all of them were gathered; otherwise `goal` is the mass to reach. Returns the
    cutoff, the mass of what reaches the k-th, and the mass of what reaches the cutoff and `floor`.
    """
    i = tl.arange(0, FEW)
    x = tl.load(line_of_work(batch, law_row(batch, req, place.row)) + i, mask=i < found, other=float("-inf"))
    x = tl.sort(x, descending=True)
    w = tl.where(i < found, tl.exp((x - place.peak).to(tl.float64) * place.scale), 0.0)
    kth = tl.max(tl.where(i == tl.where(k == 0, -1, k - 1 - above), x, float("-inf")), 0)
    mass = mass_above + tl.sum(tl.where(x >= kth, w, 0.0), 0)
    limit = tl.where(k == 0, goal, tl.where((top_p < 1) & (above == 0), top_p * mass, float("inf")))
    before = mass_above + tl.cumsum(w, 0) - w
    kept = (i < found) & (x >= kth) & (before < limit)
    cutoff = tl.min(tl.where(kept, x, float("inf")), 0)
    return cutoff, mass, mass_above + tl.sum(tl.where(x >= tl.maximum(cutoff, floor), w, 0.0), 0)
