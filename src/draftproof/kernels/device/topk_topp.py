"""Find the cutoff of top-k, top-p and min-p without sorting the row, one program per distribution row.

The scan has left the largest logit and the mass of every slice. They give a lower bound of the cutoff; only slices that
reach the bound are read again, about one in twenty for a small k, and the few logits in them that reach it are ranked.
Rows with too many such logits are queued for `sift` (`draftproof.kernels.device.nucleus_search`) or `settle_deep`
below, because they would slow down all others.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.layout import (
    BASE,
    COUNTS,
    CUTOFF,
    DRAFT_SIDE,
    FLOAT_COLUMNS,
    GUESS,
    INT_COLUMNS,
    LOW,
    MASS,
    MIN_P,
    PEAK,
    PER_CHUNK,
    QUEUE_ENTRY,
    QUEUE_LENGTH,
    SHORTLIST,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOTAL,
)
from draftproof.kernels.device.load_stats import (
    SliceMasses,
    cutoff_bound,
    load_slice_stats,
    load_tile_stats,
    min_p_floor,
    row_stats_at,
    save_stats,
    slice_masses,
    unfiltered_stats,
)
from draftproof.kernels.device.math import force_eval, grain_of, key, value
from draftproof.kernels.device.rows import dist_row, divisor, needed, request
from draftproof.kernels.device.shortlist import find_cutoff, gather, load_gathered, load_gathered_slices
from draftproof.kernels.device.slice_lists import (
    LINES,
    SliceView,
    clear_sums,
    filter_sums,
    list_slices,
    measure,
    parts_at,
    queued_row,
    sampled_cutoff,
    search_bottom,
    work_at,
    write_sums,
)

FAST_SLICES = tl.constexpr(256)  # slices of a row that `settle` reads at most
FAST_SHORTLIST = tl.constexpr(256)  # logits of a row that `settle` ranks at most


class Filters(NamedTuple):
    """Sampling filters of one distribution row; `k` of 0 is off."""

    temperature: Any
    k: Any
    top_p: Any
    min_p: Any


@triton.jit
@no_type_check
def settle(batch):
    """Find cutoff and mass of one distribution row, and correct its sums. Grid: (J + K, B).

    Reference: core.filters.filter_stats.
    """
    row = tl.program_id(0)
    req = request(batch, tl.program_id(1).to(tl.int64))
    filters = filters_of(batch, req, row)
    scale = force_eval(1.0 / divisor(filters.temperature))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # the next kernel starts early and waits for this one to end
        cuda.gdc_wait()
    if needed(req, row):
        off = (filters.k == 0) & (filters.top_p == 1) & (filters.min_p == 0)
        if off | (filters.temperature == 0):
            rows = row + tl.zeros([1], tl.int32)
            tiles = load_tile_stats(batch, req, rows, rows >= 0)
            settled = unfiltered_stats(tiles, rows >= 0, filters.temperature, scale, True)
            save_stats(row_stats_at(batch, req, rows), rows >= 0, settled)
        else:
            _settle_row(batch, req, row, filters, scale)


@triton.jit
@no_type_check
def filters_of(batch, req, row):
    """Load the filters of a distribution row; a k that keeps the whole row is off."""
    side = tl.where(row < req.J, 0, 1)
    floats = batch.floats + req.b * FLOAT_COLUMNS + side * DRAFT_SIDE
    k = tl.load(batch.ints + req.b * INT_COLUMNS + TOP_K + side).to(tl.int32)
    k = tl.where(k < tl.where(row < req.J, batch.sizes.V, batch.sizes.R), k, 0)
    return Filters(
        temperature=tl.load(floats + TEMPERATURE), k=k, top_p=tl.load(floats + TOP_P), min_p=tl.load(floats + MIN_P)
    )


@triton.jit
@no_type_check
def write_row(batch, req, row, cutoff, base, mass):
    """Store the statistics of one row."""
    line = row_stats_at(batch, req, row)
    tl.store(line + CUTOFF, cutoff.to(tl.float64))
    tl.store(line + BASE, base)
    tl.store(line + MASS, mass)


@triton.jit
@no_type_check
def _settle_row(batch, req, row, filters, scale):
    """Settle a filtered row whose cutoff lies among few logits; queue any other. Reference: core.filters._cut."""
    summary = load_slice_stats(batch, req, row)
    if (summary.peak > float("-inf")) & (summary.peak < float("inf")):
        floor = min_p_floor(filters, summary.peak, scale)
        masses = SliceMasses(mass=summary.s, total=tl.zeros((), tl.float64))
        if (filters.k == 0) & (filters.top_p < 1):
            masses = slice_masses(summary, scale)
        low = cutoff_bound(filters, summary, masses, floor, scale)
        count = list_slices(batch, req, row, summary.m, low)
        view = SliceView(row=row, first=0, count=count, listed=1, peak=summary.peak, scale=scale)
        left = count > FAST_SLICES
        if not left:
            if (filters.k > 0) | (filters.top_p < 1):
                left = _search(batch, req, view, filters, low, floor, masses.total)
            else:
                kept = filter_sums(batch, req, view, 0, req.C * PER_CHUNK, floor, LINES)
                write_row(batch, req, row, floor, scale * summary.peak.to(tl.float64), kept)
        if left:
            _enqueue(batch, req, row, filters, summary.peak, scale, masses.total, low)
    else:
        nothing = tl.zeros((), tl.float64)
        write_row(batch, req, row, nothing, nothing, nothing + float("nan"))


@triton.jit
@no_type_check
def _search(batch, req, view, filters, low, floor, total):
    """Search the cutoff among the logits of the listed slices that reach `low`; return whether there are too many."""
    buffer = work_at(batch, dist_row(req, view.row))
    found = gather(batch, req, view, low, None, buffer, FAST_SHORTLIST, True)
    if found <= FAST_SHORTLIST:
        _cut_row(batch, req, view, filters, floor, total, buffer, found)
    return found > FAST_SHORTLIST


@triton.jit
@no_type_check
def _cut_row(batch, req, view, filters, floor, total, buffer, found):
    """Store the statistics and sums of a row whose cutoff lies among `found` gathered logits."""
    x = load_gathered(buffer, found, FAST_SHORTLIST)
    which = load_gathered_slices(buffer + FAST_SHORTLIST, found, FAST_SHORTLIST)
    next_which = load_gathered_slices(buffer + FAST_SHORTLIST + 1, found - 1, FAST_SHORTLIST)
    if view.row < req.J:
        clear_sums(batch, req, view.row)
    goal, none = filters.top_p * total, tl.zeros((), tl.float64)
    cutoff, kept = find_cutoff(x, view, found, filters.k, filters.top_p, goal, none, floor)
    write_row(batch, req, view.row, cutoff, view.scale * view.peak.to(tl.float64), kept)
    if view.row < req.J:
        write_sums(batch, req, view, x, which, next_which, cutoff)


@triton.jit
@no_type_check
def _enqueue(batch, req, row, filters, peak, scale, total, low):
    """Queue a row, and store what is known of it; for top-p without top-k also an estimate of its cutoff.

    The order in the queue does not matter: rows are independent.
    """
    line = dist_row(req, row)
    if (filters.k == 0) & (filters.top_p < 1):
        count = req.C * PER_CHUNK
        view = SliceView(row=row, first=0, count=count, listed=0, peak=peak, scale=scale)
        guess = sampled_cutoff(batch, req, view, low, filters.top_p * total, filters.k == 0, total)
        known = row_stats_at(batch, req, row)
        tl.store(known + LOW, low.to(tl.float64))
        tl.store(known + GUESS, guess.to(tl.float64))
        tl.store(known + TOTAL, total)
        tl.store(known + PEAK, peak.to(tl.float64))
        tl.store(parts_at(batch, line) + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.float64))
    n = tl.atomic_add(work_at(batch, 0) + QUEUE_LENGTH, 1.0)
    tl.store(work_at(batch, n.to(tl.int64)) + QUEUE_ENTRY, line.to(tl.float32))


DEEP_PIVOTS = tl.constexpr(8)
MOST_LOGITS = tl.constexpr(2.0**20)  # above the number of logits in any row
NEAR = tl.constexpr(0.01)  # exponents between the sampled estimate and the innermost pivots


class KeySpan(NamedTuple):
    """Two borders, as keys, between which the cutoff lies, and how much reaches each of them.

    How much: the number of logits in a search by count, else their mass; `upto` at the lower border, `above` at the
    upper one.
    """

    first: Any
    last: Any
    upto: Any
    above: Any


@triton.jit
@no_type_check
def settle_deep(batch):
    """Settle the queued rows, one row per program at a time. Reference: core.filters._cut. Grid: any size."""
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # the next kernel starts early and waits for this one to end
        cuda.gdc_wait()
    n, count = tl.program_id(0), tl.load(work_at(batch, 0) + QUEUE_LENGTH).to(tl.int32)
    while n < count:
        req, row = queued_row(batch, n)
        settle_row_deep(batch, req, row)
        n += tl.num_programs(0)


@triton.jit
@no_type_check
def settle_row_deep(batch, req, row):
    """Settle one queued row by passes over the whole row."""
    filters = filters_of(batch, req, row)
    scale = 1.0 / filters.temperature
    summary = load_slice_stats(batch, req, row)
    masses = slice_masses(summary, scale)
    floor = min_p_floor(filters, summary.peak, scale)
    low = cutoff_bound(filters, summary, masses, floor, scale)
    count = req.C * PER_CHUNK  # all slices: nearly all may hold the cutoff, and a list would add latency
    view = SliceView(row=row, first=0, count=count, listed=0, peak=summary.peak, scale=scale)
    edge = low
    if (filters.k > 0) | (filters.top_p < 1):
        edge = _search_deep(batch, req, view, low, filters.k, filters.top_p, masses.total)
    cutoff = tl.maximum(floor, edge)
    kept = filter_sums(batch, req, view, 0, count, cutoff, LINES)
    write_row(batch, req, row, cutoff, scale * summary.peak.to(tl.float64), kept)


@triton.jit
@no_type_check
def _search_deep(batch, req, view, low, k, top_p, total):
    """Return the row's cutoff by top-k, then by top-p on what that keeps; at least `low`.

    Reference: core.filters._cut_sorted and core.filters._nucleus. `k` of 0 and `top_p` of 1 are off; `total` is the
    row's mass.
    """
    by_mass, goal = k == 0, tl.where(k == 0, top_p * total, k.to(tl.float64))
    end = key(view.peak).to(tl.int64) + 1
    none = tl.zeros((), tl.float64)
    span = KeySpan(first=key(low).to(tl.int64), last=end, upto=tl.where(by_mass, total, 0.0), above=none)
    guess = sampled_cutoff(batch, req, view, low, goal, by_mass, total)
    near = NEAR / view.scale.to(tl.float32)
    cutoff, searching = low, view.count > 0
    buffer = work_at(batch, dist_row(req, view.row))
    while searching:
        most = tl.where(by_mass, total, MOST_LOGITS)
        span, goal = _narrow(batch, req, view, span, guess, near, goal, top_p, by_mass, most)
        guess, near = _interpolate(view, span, goal)
        closed = span.last - span.first <= 1
        if closed | (_count_bound(view, span, by_mass) <= SHORTLIST):
            found = gather(batch, req, view, value(span.first), value(span.last), buffer, SHORTLIST, False)
            if closed | (found <= SHORTLIST):
                rank = tl.where(by_mass, 0, k - span.above.to(tl.int32))
                cutoff = value(span.first)  # if there are more than SHORTLIST, they are all equal
                if found <= SHORTLIST:
                    edge, _ = find_cutoff(
                        load_gathered(buffer, found, SHORTLIST), view, found, rank, 1.0, goal, span.above, low
                    )
                    cutoff = tl.where(edge < float("inf"), edge, cutoff)
                # the mass of the k largest is not known yet: marked by a goal below 0
                searching = (not by_mass) & (top_p < 1)
                by_mass, goal = by_mass | True, none - 1.0
                span = KeySpan(first=key(cutoff).to(tl.int64), last=end, upto=none, above=none)
                guess = cutoff
    return cutoff


@triton.jit
@no_type_check
def _count_bound(view, span, by_mass):
    """Return an upper bound of the number of logits between the borders.

    In a search by mass: each has at least the mass of the lower border.
    """
    least = tl.exp((value(span.first) - view.peak).to(tl.float64) * view.scale)
    return (span.upto - span.above) / tl.where(by_mass, least, 1.0)


@triton.jit
@no_type_check
def _narrow(batch, req, view, span, guess, near, goal, top_p, by_mass, most):
    """Narrow the span by one pass over the row, and compute the goal if it was not known.

    `most`: upper bound of everything measured.
    """
    first = span.first
    if by_mass:  # logits below this have no mass in float64
        first = tl.maximum(first, key(view.peak - 800.0 / view.scale.to(tl.float32)).to(tl.int64))
    pivots = _pivots(first, span.last, guess, near)
    upto = measure(batch, req, view, value(pivots), by_mass, most).to(tl.float64) * grain_of(most)
    lowest = tl.max(tl.where(pivots == first, upto, 0.0), 0)
    goal = tl.where(goal < 0, top_p * lowest, goal)
    enough = (upto >= goal) | (pivots == first)  # lower bounds of the cutoff
    lower, upper = tl.max(tl.where(enough, pivots, first), 0), tl.min(tl.where(enough, span.last, pivots), 0)
    return KeySpan(
        first=lower,
        last=upper,
        upto=tl.max(tl.where(pivots == lower, upto, 0.0), 0),
        above=tl.where(upper == span.last, span.above, tl.max(tl.where(pivots == upper, upto, 0.0), 0)),
    ), goal


@triton.jit
@no_type_check
def _pivots(first, last, guess, near):
    """Return pivots as keys: the lower border, the middle of the keys, and ever wider pairs around the guess."""
    p = tl.arange(0, DEEP_PIVOTS)
    apart = tl.where(p < 4, near, tl.where(p < 6, 4 * near, 16 * near))
    around = key(guess + tl.where(p % 2 == 0, -apart, apart)).to(tl.int64)
    inside = tl.minimum(tl.maximum(tl.where(p == 1, first + (last - first) // 2, around), first), last - 1)
    return tl.where(p == 0, first, inside)


@triton.jit
@no_type_check
def _interpolate(view, span, goal):
    """Return the goal's position if logits were evenly spread in the span, and a distance for the next pivots."""
    share = tl.minimum(tl.maximum((goal - span.above) / (span.upto - span.above), 0.0), 1.0).to(tl.float32)
    high = tl.minimum(value(span.last), view.peak)
    low = search_bottom(view, value(span.first))
    extent = tl.maximum(high - low, 0.0)
    return high - share * extent, extent / 64
