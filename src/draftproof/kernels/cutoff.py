"""What a search for a cutoff reads: the slices of a row that may hold it, in a list; and the row's sums above it."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import PER_CHUNK, SLICE, WORK
from draftproof.kernels.request import law_row
from draftproof.kernels.rows import draft_row, take_draft, take_target, target_row, whole_slices

NOWHERE = tl.constexpr(2**30)  # a slice that begins here is behind the end of any row


class Place(NamedTuple):
    """A law row: its number among the request's, how many of its slices are listed, its largest logit, its scale."""

    row: Any
    count: Any
    peak: Any
    scale: Any


@triton.jit
@no_type_check
def line_of_work(batch, line):
    """A law row's own memory (`draftproof.kernels.layout`)."""
    return batch.work + line * (batch.sizes.C * PER_CHUNK + WORK)


@triton.jit
@no_type_check
def list_slices(batch, req, row, m, low):
    """Write down the slices whose largest logit reaches `low`, in order. Returns how many."""
    reach = (m >= low) & (m > float("-inf"))
    n = tl.cumsum(reach.to(tl.int32), 0) - 1
    names = tl.arange(0, batch.traits.NS).to(tl.float32)
    tl.store(line_of_work(batch, law_row(batch, req, row)) + WORK + n, names, mask=reach)
    tl.debug_barrier()
    return tl.sum(reach.to(tl.int32), 0)


@triton.jit
@no_type_check
def read_listed(batch, req, place, n, LINES: tl.constexpr):
    """LINES of the listed slices from the n-th on: their numbers, and their logits [LINES, SEGMENT, parts].

    −inf behind the list's end.
    """
    n = n + tl.arange(0, LINES)
    listed = line_of_work(batch, law_row(batch, req, place.row)) + WORK
    which = tl.load(listed + n, mask=n < place.count, other=-1.0).to(tl.int32)
    SEGMENT: tl.constexpr = batch.traits.SEGMENT
    if batch.traits.EDITED or batch.traits.MASKED:
        o = tl.where(which >= 0, which * SLICE, -SLICE)[:, None] + tl.arange(0, SLICE)[None, :]
        rows = place.row + tl.zeros([LINES], tl.int32)
        if place.row < batch.sizes.J:
            x = take_target(batch, req, rows, o)
        else:
            x = take_draft(batch, req, rows - batch.sizes.J, o)
        x = tl.reshape(x, (LINES, SLICE, 1))
    else:
        begin = tl.where(which >= 0, which * SLICE, NOWHERE)
        if place.row < batch.sizes.J:
            x = whole_slices(target_row(batch, req, place.row), begin, batch.sizes.V, SEGMENT).to(tl.float32)
        else:
            at = draft_row(batch, req, place.row - batch.sizes.J)
            x = whole_slices(at, begin, batch.sizes.R, SEGMENT).to(tl.float32)
    return which, x


@triton.jit
@no_type_check
def read_four(batch, req, place, n, LINES: tl.constexpr):
    """Four times `read_listed`, all on their way before the first is worked on: a search waits for little else."""
    which_a, a = read_listed(batch, req, place, n, LINES)
    which_b, b = read_listed(batch, req, place, n + LINES, LINES)
    which_c, c = read_listed(batch, req, place, n + 2 * LINES, LINES)
    which_d, d = read_listed(batch, req, place, n + 3 * LINES, LINES)
    return (which_a, which_b, which_c, which_d), (a, b, c, d)


@triton.jit
@no_type_check
def by_slice(x):
    """Sums by slice: [LINES, SEGMENT, parts] to [LINES]."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
@no_type_check
def mass_of(x, place):
    """Mass relative to the peak's, float32."""
    return power(x - place.peak, slope_of(place.scale))


@triton.jit
@no_type_check
def masked_sums(batch, req, place, cutoff, LINES: tl.constexpr):
    """Put the sums of slices and chunks right: only what reaches the cutoff counts, relative to the peak.

    Returns their total.
    """
    C = batch.sizes.C
    line = law_row(batch, req, place.row) * 2 * C
    sums = batch.slices + line * PER_CHUNK
    n = tl.arange(0, batch.traits.NS)
    tl.debug_barrier()  # the scan's may still be read
    tl.store(sums + n, place.peak + tl.zeros([batch.traits.NS], tl.float32), mask=n < C * PER_CHUNK)
    sums += C * PER_CHUNK
    tl.store(sums + n, tl.zeros([batch.traits.NS], tl.float32), mask=n < C * PER_CHUNK)
    tl.debug_barrier()
    for first in range(0, place.count, 4 * LINES):
        which, x = read_four(batch, req, place, first, LINES)
        for i in tl.static_range(4):
            each = by_slice(tl.where(x[i] >= cutoff, mass_of(x[i], place), 0.0))
            tl.store(sums + which[i], each, mask=which[i] >= 0)
    tl.debug_barrier()
    c = tl.arange(0, batch.traits.NP)
    part = c[:, None] * PER_CHUNK + tl.arange(0, PER_CHUNK)[None, :]
    s = tl.sum(tl.load(sums + part, mask=part < C * PER_CHUNK, other=0.0), 1)
    tl.store(batch.stats + line + c, place.peak + tl.zeros([batch.traits.NP], tl.float32), mask=c < C)
    tl.store(batch.stats + line + C + c, s, mask=c < C)
    return tl.sum(s.to(tl.float64), 0)
