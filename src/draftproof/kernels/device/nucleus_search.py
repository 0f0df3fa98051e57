"""Find the cutoff of large nuclei (top-p without top-k), with all programs working on parts of a row side by side.

For the rows that `settle` has queued. Each launch is a round: two measure the mass above some pivots, the third gathers
the few logits that are left between two of them, the fourth ranks these and corrects the sums. No program waits for
another inside a launch: each recomputes the result of earlier rounds from their sums, in the same order. Rows with too
many logits left, and rows with a k, are settled as in `draftproof.kernels.device.topk_topp` within the last round: a
launch of their own would nearly always find nothing to do and cost more.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.layout import (
    COUNTS,
    GUESS,
    LARGEST,
    LOW,
    PARTS,
    PEAK,
    PER_CHUNK,
    PIVOTS,
    QUEUE_LENGTH,
    SHORTLIST,
    SMALLEST,
    TOTAL,
)
from draftproof.kernels.device.load_stats import row_stats_at
from draftproof.kernels.device.math import grain_of
from draftproof.kernels.device.rows import chunks_of, dist_row
from draftproof.kernels.device.shortlist import find_cutoff, gather
from draftproof.kernels.device.slice_lists import (
    LINES,
    SliceView,
    edited_slices,
    filter_sums,
    load_slices,
    measure,
    parts_at,
    queued_row,
    search_bottom,
    work_at,
)
from draftproof.kernels.device.topk_topp import filters_of, settle_row_deep, write_row

LAST_ROUND = tl.constexpr(3)
PER_PART = tl.constexpr(SHORTLIST.value // PARTS.value)  # logits that a part may have left to rank
EVEN_PIVOTS = tl.constexpr(4)  # pivots spread over the row, in case the guess is wrong
NEAR = 0.01  # exponents between the guess and the innermost pivots
SPACING = tl.constexpr(0.85)  # log2 of the ratio between the distances of successive pairs of pivots
UNIT = tl.constexpr(NEAR / (2**SPACING.value - 1))


class SearchState(NamedTuple):
    """Statistics that `settle` stored of a row: bound and estimate of the cutoff, total mass, and the mass to reach."""

    low: Any
    guess: Any
    total: Any
    goal: Any


class Span(NamedTuple):
    """Bounds of the cutoff, low <= cutoff < high; what reaches `high` has the mass `above`."""

    low: Any
    high: Any
    above: Any


@triton.jit
@no_type_check
def sift(batch, ROUND: tl.constexpr):
    """Run one of the four rounds on the queued rows. Reference: core.filters._nucleus. Grid: any size.

    The programs share the parts of the queued rows.
    """
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # the next kernel starts early and waits for this one to end
        cuda.gdc_wait()
    parts = _parts_of(batch)
    count = tl.load(work_at(batch, 0) + QUEUE_LENGTH).to(tl.int32) * parts
    each = tl.cdiv(count, tl.num_programs(0))  # consecutive: what the parts of a row share is computed once
    n = tl.program_id(0) * each
    end = tl.minimum(n + each, count)
    while n < end:
        queued = n // parts
        req, row = queued_row(batch, queued)
        filters = filters_of(batch, req, row)
        first, stop = n % parts, tl.minimum(end - queued * parts, parts)
        nucleus = (filters.k == 0) & (filters.top_p < 1)
        left = not nucleus
        if nucleus:
            left = _sift_parts(batch, req, row, first, stop, filters, ROUND)
        if ROUND == LAST_ROUND and left & (first == 0):
            settle_row_deep(batch, req, row)
        n = queued * parts + stop


@triton.jit
@no_type_check
def _sift_parts(batch, req, row, first, stop, filters, ROUND: tl.constexpr):
    """Process the parts of a row from `first` to `stop`; in the last round, return whether the row is unsettled."""
    known = row_stats_at(batch, req, row)
    view = _view(batch, req, row, first, stop, tl.load(known + PEAK).to(tl.float32), 1.0 / filters.temperature)
    total = tl.load(known + TOTAL)
    state = SearchState(
        low=tl.load(known + LOW).to(tl.float32),
        guess=tl.load(known + GUESS).to(tl.float32),
        total=total,
        goal=filters.top_p * total,
    )
    span = Span(low=state.low, high=float("inf") + tl.zeros((), tl.float32), above=tl.zeros((), tl.float64))
    pivots = _first_pivots(view, state)
    if ROUND > 0:
        span = _narrowed(batch, req, row, span, pivots, state, 0)
        pivots = _even_pivots(view, span)
    if ROUND > 1:
        span = _narrowed(batch, req, row, span, pivots, state, 1)
    left = first < 0
    if ROUND < 2:
        upto = measure(batch, req, view, pivots, row >= 0, state.total)
        tl.atomic_add(_pivot_sums(batch, req, row, ROUND), upto, sem="relaxed")
    elif ROUND == 2:
        for part in range(first, stop):
            _gather_part(batch, req, _view(batch, req, row, part, part + 1, view.peak, view.scale), part, span)
    else:
        left = not _finish(batch, req, view, first, span, state)
    return left


@triton.jit
@no_type_check
def _parts_of(batch):
    """Return the number of parts in a row, at most PARTS."""
    return tl.cdiv(chunks_of(batch) * PER_CHUNK, _slices_per_part(batch))


@triton.jit
@no_type_check
def _slices_per_part(batch):
    """Return the number of slices in a part: a multiple of those measured at a time."""
    return tl.cdiv(chunks_of(batch) * PER_CHUNK, PARTS * LINES) * LINES


@triton.jit
@no_type_check
def _view(batch, req, row, first, stop, peak, scale):
    """Return the view of consecutive parts of a row."""
    each = _slices_per_part(batch)
    begin, end = first * each, tl.minimum(stop * each, req.C * PER_CHUNK)
    return SliceView(row=row, first=begin, count=tl.maximum(end - begin, 0), listed=0, peak=peak, scale=scale)


@triton.jit
@no_type_check
def _row_parts_at(batch, req, row):
    """Return the pointer to a row's part sums."""
    return parts_at(batch, dist_row(req, row))


@triton.jit
@no_type_check
def _pivot_sums(batch, req, row, ROUND: tl.constexpr):
    """Return the pointers to the integer sums of a round's pivots."""
    sums = _row_parts_at(batch, req, row) + ROUND * PIVOTS + tl.arange(0, PIVOTS)
    return sums.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
@no_type_check
def _first_pivots(view, state):
    """Return the first pivots: the lower bound, some evenly over the row, and ever wider pairs around the guess."""
    p = tl.arange(0, PIVOTS)
    bottom = search_bottom(view, state.low)
    even = bottom + (view.peak - bottom) * (p.to(tl.float32) / EVEN_PIVOTS)
    pair = ((p - EVEN_PIVOTS + 1) // 2).to(tl.float32)  # 0 is the guess itself
    apart = (tl.exp2(pair * SPACING) - 1.0) * (UNIT / view.scale.to(tl.float32))
    near = state.guess + tl.where(p % 2 == 0, -apart, apart)
    inside = tl.minimum(tl.maximum(tl.where(p < EVEN_PIVOTS, even, near), bottom), view.peak)
    return tl.where(p == 0, state.low, inside)


@triton.jit
@no_type_check
def _even_pivots(view, span):
    """Return the second round's pivots: evenly spaced in the remaining span."""
    p = tl.arange(0, PIVOTS)
    bottom = search_bottom(view, span.low)
    even = bottom + (tl.minimum(span.high, view.peak) - bottom) * (p.to(tl.float32) / PIVOTS)
    return tl.where(p == 0, span.low, even)


@triton.jit
@no_type_check
def _narrowed(batch, req, row, span, pivots, state, ROUND: tl.constexpr):
    """Narrow the span by the sums of a round.

    Sums of the same logits are monotone: if the sum of a lower pivot does not reach the goal, no higher one does.
    """
    upto = tl.load(_pivot_sums(batch, req, row, ROUND)).to(tl.float64) * grain_of(state.total)
    enough = (upto >= state.goal) | (pivots <= span.low)
    low, high = tl.max(tl.where(enough, pivots, span.low), 0), tl.min(tl.where(enough, span.high, pivots), 0)
    above = tl.where(high == span.high, span.above, tl.max(tl.where(pivots == high, upto, 0.0), 0))
    return Span(low=low, high=high, above=above)


@triton.jit
@no_type_check
def _gather_part(batch, req, view, part, span):
    """Write a part's logits inside the span, at most PER_PART, their number, the smallest and the largest."""
    buffer = work_at(batch, dist_row(req, view.row)) + part * PER_PART
    found = gather(batch, req, view, span.low, span.high, buffer, PER_PART, False)
    n = tl.arange(0, PER_PART)
    least = tl.min(tl.load(buffer + n, mask=n < found, other=float("inf")), 0)
    most = tl.max(tl.load(buffer + n, mask=n < found, other=float("-inf")), 0)
    if found > PER_PART:
        least, most = _extremes(batch, req, view, span)
    known = _row_parts_at(batch, req, view.row) + part
    tl.store(known + COUNTS, found.to(tl.float64))
    tl.store(known + SMALLEST, least.to(tl.float64))
    tl.store(known + LARGEST, most.to(tl.float64))


@triton.jit
@no_type_check
def _extremes(batch, req, view, span):
    """Return the smallest and the largest logit of a view inside the span."""
    least, most = tl.full((), float("inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    for n in range(0, view.count, LINES):
        which, raw = load_slices(batch, req, view, n + tl.arange(0, LINES))
        x = edited_slices(batch, req, view, which, raw)
        here = (x >= span.low) & (x < span.high) & (x > float("-inf"))
        least = tl.minimum(least, tl.min(tl.min(tl.min(tl.where(here, x, float("inf")), 2), 1), 0))
        most = tl.maximum(most, tl.max(tl.max(tl.max(tl.where(here, x, float("-inf")), 2), 1), 0))
    return least, most


@triton.jit
@no_type_check
def _finish(batch, req, view, first, span, state):
    """Find the cutoff among what is left of all parts, and correct the sums of these parts.

    If too many logits are left they must all be equal, as half-precision logits often are; otherwise nothing is done.
    Returns whether the row was settled.
    """
    part = tl.arange(0, PARTS)
    known, there = _row_parts_at(batch, req, view.row) + part, part < _parts_of(batch)
    counts = tl.load(known + COUNTS, mask=there, other=0.0).to(tl.int32)
    few = tl.max(counts, 0) <= PER_PART
    least = tl.min(tl.load(known + SMALLEST, mask=there, other=float("inf")), 0).to(tl.float32)
    most = tl.max(tl.load(known + LARGEST, mask=there, other=float("-inf")), 0).to(tl.float32)
    cutoff, kept = span.low, tl.zeros((), tl.float64)
    if few:
        x = _gathered(work_at(batch, dist_row(req, view.row)), counts)
        edge, kept = find_cutoff(x, view, tl.sum(counts, 0), 0, 1.0, state.goal, span.above, span.low)
        cutoff = tl.where(edge < float("inf"), edge, cutoff)
    equal = (~few) & (least == most)
    if equal:
        cutoff = least
        kept = tl.sum(counts, 0) * tl.exp((least - view.peak).to(tl.float64) * view.scale)
    if few | equal:
        if view.row < req.J:
            filter_sums(batch, req, view, view.first, view.first + view.count, cutoff, LINES)
        if first == 0:
            write_row(batch, req, view.row, cutoff, view.scale * view.peak.to(tl.float64), span.above + kept)
    return few | equal


@triton.jit
@no_type_check
def _gathered(buffer, counts):
    """Load the logits left of all parts [SHORTLIST], consecutive; −inf after the last."""
    n, part = tl.arange(0, SHORTLIST)[:, None], tl.arange(0, PARTS)[None, :]
    in_part = tl.sum((tl.cumsum(counts, 0)[None, :] <= n).to(tl.int32), 1)
    before = tl.sum(tl.where(part < in_part[:, None], counts[None, :], 0), 1)
    n = tl.arange(0, SHORTLIST)
    return tl.load(buffer + in_part * PER_PART + n - before, mask=in_part < PARTS, other=float("-inf"))
