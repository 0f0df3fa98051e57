"""The logits among which a cutoff must lie, where they are few: gathered, ranked, and cut."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.cutoff import answer, ask

SOME = tl.constexpr(32)  # logits that all others are compared with at a time


@triton.jit
@no_type_check
def gather(batch, req, place, low, high, places, MOST: tl.constexpr, LINES: tl.constexpr):
    """Write down the logits in [low, high) of a place's slices at `places`, MOST of them at most. Returns how many
    there are."""
    found = tl.zeros((), tl.int32)
    tl.debug_barrier()  # the places may still be read
    lines = tl.arange(0, LINES)
    which, raw = ask(batch, req, place, lines)
    for n in range(0, place.count, LINES):
        ahead = ask(batch, req, place, n + LINES + lines)  # on its way while this is worked on
        x = answer(batch, req, place, which, raw)
        here = (x >= low) & (x < high) & (x > float("-inf"))
        columns = tl.sum(here.to(tl.int32), 2)  # [LINES, SEGMENT]
        each = tl.sum(columns, 1)
        before = found + tl.cumsum(each, 0) - each
        before = before[:, None] + tl.cumsum(columns, 1) - columns
        at = before[:, :, None] + tl.cumsum(here.to(tl.int32), 2) - 1
        tl.store(places + at, x, mask=here & (at < MOST))
        found += tl.sum(each, 0)
        which, raw = ahead
    tl.debug_barrier()
    return found


@triton.jit
@no_type_check
def cut(x, place, found, k, top_p, goal, mass_above, floor):
    """Twin: `filters._cut_sorted` and `filters._edge`. The cutoff among the first `found` of x [N]; −inf behind them.

    Where k is not 0 the k-th largest of them ends the kept ones and top-p is of their mass; otherwise `goal` is the
    mass to reach, of which logits that lie higher than all of these have `mass_above`. Nothing is sorted: a logit is
    kept as long as those above it, whose number and mass are its rank, are too few. Not under `floor`. Returns the
    mass, float64, of what is kept of them as well.
    """
    N: tl.constexpr = x.shape[0]
    there = x > float("-inf")
    w = tl.where(there, tl.exp((x - place.peak).to(tl.float64) * place.scale), 0.0)
    number, mass = tl.zeros([N], tl.int32), mass_above + tl.zeros([N], tl.float64)
    for n in range(0, found, SOME):
        some = n + tl.arange(0, SOME)
        y, v = tl.gather(x, some, 0), tl.gather(w, some, 0)
        above = y[:, None] > x[None, :]  # the short axis first: a thread compares its own with all of them
        number += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, v[:, None], 0.0), 0)
    kept = there & ((number < k) | (k == 0))
    limit = tl.where(k == 0, goal, tl.where(top_p < 1, top_p * tl.sum(tl.where(kept, w, 0.0), 0), float("inf")))
    cutoff = tl.maximum(tl.min(tl.where(kept & (mass < limit), x, float("inf")), 0), floor)
    return cutoff, tl.sum(tl.where(x >= cutoff, w, 0.0), 0)


@triton.jit
@no_type_check
def listed(places, found, MOST: tl.constexpr):
    """The gathered logits, [MOST]; −inf behind the last."""
    n = tl.arange(0, MOST)
    return tl.load(places + n, mask=n < found, other=float("-inf"))
