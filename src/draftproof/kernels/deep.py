"""Cutoffs that lie deep in a row: borders drawn closer by passes over its slices, until few logits are between them.

For the rows that `settle` has left in its queue: a k of many hundreds, and what is too strange for
`draftproof.kernels.sift`. A sample of the row tells where to look, and mostly one pass is enough to know that it told
the truth.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.cutoff import LINES, Place, line_of_work, masked_sums, queued_row
from draftproof.kernels.layout import FEW, PER_CHUNK, QUEUED
from draftproof.kernels.measure import bottom_of, measured, sampled
from draftproof.kernels.orders import key, value
from draftproof.kernels.request import law_row
from draftproof.kernels.settle import filters_of, write_row
from draftproof.kernels.shortlist import cut, gather, listed
from draftproof.kernels.summary import bound_of, floor_of, masses_of, summary_of
from draftproof.kernels.sums import grain_of

PIVOTS = tl.constexpr(8)
MOST_LOGITS = tl.constexpr(2.0**20)  # of a row, by far
NEAR = tl.constexpr(0.01)  # exponents between what a sample tells and the innermost pivots


class Span(NamedTuple):
    """Two borders, as keys, between which the cutoff lies, and how much reaches each of them.

    How much: the number of logits where the k-th is looked for, else their mass; of the lower border `upto`, of the
    upper one `above`.
    """

    first: Any
    last: Any
    upto: Any
    above: Any


@triton.jit
@no_type_check
def settle_deep(batch):
    """Twin: `filters._cut`. Grid: any; the programs share the queue."""
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    n, count = tl.program_id(0), tl.load(line_of_work(batch, 0) + QUEUED).to(tl.int32)
    while n < count:
        req, row = queued_row(batch, n)
        settle_row(batch, req, row)
        n += tl.num_programs(0)


@triton.jit
@no_type_check
def settle_row(batch, req, row):
    filters = filters_of(batch, req, row)
    scale = 1.0 / filters.temperature
    summary = summary_of(batch, req, row)
    masses = masses_of(summary, scale)
    floor = floor_of(filters, summary.peak, scale)
    low = bound_of(filters, summary, masses, floor, scale)
    count = req.C * PER_CHUNK  # nearly all may hold it: a list would only have to be waited for
    place = Place(row=row, first=0, count=count, listed=0, peak=summary.peak, scale=scale)
    edge = low
    if (filters.k > 0) | (filters.top_p < 1):
        edge = _search(batch, req, place, low, filters.k, filters.top_p, masses.total)
    cutoff = tl.maximum(floor, edge)
    kept = masked_sums(batch, req, place, 0, count, cutoff, LINES)
    write_row(batch, req, row, cutoff, scale * summary.peak.to(tl.float64), kept)


@triton.jit
@no_type_check
def _search(batch, req, place, low, k, top_p, total):
    """Twin: the cutoffs of `filters._cut_sorted` and `filters._nucleus`. The row's cutoff by top-k, then top-p on that.

    It is not under `low`. `k` of 0 and `top_p` of 1 are off; `total` is the row's mass.
    """
    by_mass, goal = k == 0, tl.where(k == 0, top_p * total, k.to(tl.float64))
    end = key(place.peak).to(tl.int64) + 1
    none = tl.zeros((), tl.float64)
    span = Span(first=key(low).to(tl.int64), last=end, upto=tl.where(by_mass, total, 0.0), above=none)
    guess = sampled(batch, req, place, low, goal, by_mass, total)
    near = NEAR / place.scale.to(tl.float32)
    cutoff, searching = low, place.count > 0
    places = line_of_work(batch, law_row(req, place.row))
    while searching:
        most = tl.where(by_mass, total, MOST_LOGITS)
        span, goal = _narrow(batch, req, place, span, guess, near, goal, top_p, by_mass, most)
        guess, near = _between(place, span, goal)
        closed = span.last - span.first <= 1
        if closed | (_number(place, span, by_mass) <= FEW):
            found = gather(batch, req, place, value(span.first), value(span.last), places, FEW, False)
            if closed | (found <= FEW):
                rank = tl.where(by_mass, 0, k - span.above.to(tl.int32))
                cutoff = value(span.first)  # where there are more than few, they are all equal
                if found <= FEW:
                    edge, _ = cut(listed(places, found, FEW), place, found, rank, 1.0, goal, span.above, low)
                    cutoff = tl.where(edge < float("inf"), edge, cutoff)
                # what the k largest have of mass is not known yet: a goal below 0
                searching = (not by_mass) & (top_p < 1)
                by_mass, goal = by_mass | True, none - 1.0
                span = Span(first=key(cutoff).to(tl.int64), last=end, upto=none, above=none)
                guess = cutoff
    return cutoff


@triton.jit
@no_type_check
def _number(place, span, by_mass):
    """How many logits are between the borders, at most: where masses are known, all have at least the lower one's."""
    least = tl.exp((value(span.first) - place.peak).to(tl.float64) * place.scale)
    return (span.upto - span.above) / tl.where(by_mass, least, 1.0)


@triton.jit
@no_type_check
def _narrow(batch, req, place, span, guess, near, goal, top_p, by_mass, most):
    """Borders closer to each other, by one pass over the row, in which nothing measures more than `most`; and the goal,
    if that was not known."""
    first = span.first
    if by_mass:  # what lies lower has no mass in float64
        first = tl.maximum(first, key(place.peak - 800.0 / place.scale.to(tl.float32)).to(tl.int64))
    pivots = _pivots(first, span.last, guess, near)
    upto = measured(batch, req, place, value(pivots), by_mass, most).to(tl.float64) * grain_of(most)
    lowest = tl.max(tl.where(pivots == first, upto, 0.0), 0)
    goal = tl.where(goal < 0, top_p * lowest, goal)
    enough = (upto >= goal) | (pivots == first)  # the cutoff does not lie under these
    lower, upper = tl.max(tl.where(enough, pivots, first), 0), tl.min(tl.where(enough, span.last, pivots), 0)
    return Span(
        first=lower,
        last=upper,
        upto=tl.max(tl.where(pivots == lower, upto, 0.0), 0),
        above=tl.where(upper == span.last, span.above, tl.max(tl.where(pivots == upper, upto, 0.0), 0)),
    ), goal


@triton.jit
@no_type_check
def _pivots(first, last, guess, near):
    """Where to look, as keys: the lower border, the middle of the keys, and pairs ever wider around a guess."""
    p = tl.arange(0, PIVOTS)
    apart = tl.where(p < 4, near, tl.where(p < 6, 4 * near, 16 * near))
    around = key(guess + tl.where(p % 2 == 0, -apart, apart)).to(tl.int64)
    inside = tl.minimum(tl.maximum(tl.where(p == 1, first + (last - first) // 2, around), first), last - 1)
    return tl.where(p == 0, first, inside)


@triton.jit
@no_type_check
def _between(place, span, goal):
    """Where the goal is if logits are evenly spread between the borders, and how far from there to look."""
    share = tl.minimum(tl.maximum((goal - span.above) / (span.upto - span.above), 0.0), 1.0).to(tl.float32)
    high = tl.minimum(value(span.last), place.peak)
    low = bottom_of(place, value(span.first))
    extent = tl.maximum(high - low, 0.0)
    return high - share * extent, extent / 64
