"""Cutoffs that lie deep in a row: borders drawn closer by passes over its slices, until few logits are between them.

For the rows that `settle` has left in its queue: a flat row's nucleus, a k of many thousands.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.cutoff import Place, line_of_work, list_slices, masked_sums, mass_of, read_four
from draftproof.kernels.layout import FEW, QUEUE, QUEUED, SLICE
from draftproof.kernels.orders import key, value
from draftproof.kernels.request import request
from draftproof.kernels.settle import bounds_of, filters_of, floor_of, summary_of, write_settled
from draftproof.kernels.shortlist import cut, gather

PIVOTS = tl.constexpr(8)
INFINITY = tl.constexpr(0x7F800000)  # the key of +inf
FAR = tl.constexpr(60.0)  # exponents under the peak: what lies further down is rarely looked for


class Span(NamedTuple):
    """Two borders, as keys, between which the cutoff lies; number and mass of the logits that reach each of them."""

    first: Any
    last: Any
    first_count: Any
    first_mass: Any
    last_count: Any
    last_mass: Any


@triton.jit
@no_type_check
def settle_deep(batch, LINES: tl.constexpr):
    """Twin: `filters._cut`. Grid: any; the programs share the queue. LINES: slices read at a time."""
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    n, count = tl.program_id(0), tl.load(line_of_work(batch, 0) + QUEUED).to(tl.int32)
    while n < count:
        line = tl.load(line_of_work(batch, n.to(tl.int64)) + QUEUE).to(tl.int64)
        rows = batch.sizes.J + batch.sizes.K
        req = request(batch, line // rows)
        _settle_row(batch, req, (line % rows).to(tl.int32), LINES)
        n += tl.num_programs(0)


@triton.jit
@no_type_check
def _settle_row(batch, req, row, LINES: tl.constexpr):
    filters = filters_of(batch, req, row)
    scale = 1.0 / filters.temperature
    summary = summary_of(batch, req, row, scale)
    floor = floor_of(filters, summary.peak, scale)
    low, high = bounds_of(filters, summary, floor, scale)
    count = list_slices(batch, req, row, summary.m, low)
    place = Place(row=row, count=count, peak=summary.peak, scale=scale)
    edge = _search(batch, req, place, low, high, filters.k, filters.top_p, summary.total, LINES)
    cutoff = tl.maximum(floor, edge)
    kept = masked_sums(batch, req, place, cutoff, LINES)
    write_settled(batch, req, row, cutoff, scale * summary.peak.to(tl.float64), kept)


@triton.jit
@no_type_check
def _search(batch, req, place, low, high, k, top_p, total, LINES: tl.constexpr):
    """Twin: the cutoffs of `filters._cut_sorted` and `filters._nucleus`. The row's cutoff by top-k, then top-p on that.

    It lies in [low, high). `k` of 0 and `top_p` of 1 are off; `total` is the row's mass.
    """
    by_mass, goal = k == 0, tl.where(k == 0, top_p * total, k.to(tl.float64))
    cutoff = low
    first, last = key(low).to(tl.int64), key(high).to(tl.int64)
    searching = (k > 0) | (top_p < 1)
    while searching:
        span = _span(batch, req, place, first, last, LINES)
        while _many(span):
            span = _narrow(batch, req, place, span, goal, by_mass, LINES)
        cutoff, mass = _finish(batch, req, place, span, tl.where(by_mass, 0, k), top_p, goal, LINES)
        few = span.first_count - span.last_count <= FEW
        searching = (not by_mass) & (top_p < 1) & (not (few & (span.last_count == 0)))
        first, last = key(cutoff).to(tl.int64), tl.zeros((), tl.int64) + INFINITY
        by_mass, goal = by_mass | True, top_p * mass
    return cutoff


@triton.jit
@no_type_check
def _many(span):
    """Whether there are too many logits between the borders, and not because they are all equal."""
    return (span.first_count - span.last_count > FEW) & (span.last - span.first > 1)


@triton.jit
@no_type_check
def _measure(batch, req, place, borders, LINES: tl.constexpr):
    """Number and mass, float64, of the logits that reach each of `borders` [P]. One pass over the listed slices.

    Each thread adds up its own logits, one in 32 of a slice's, and only the last sums cross from thread to thread.
    """
    SEGMENT: tl.constexpr = SLICE if batch.traits.EDITED or batch.traits.MASKED else batch.traits.SEGMENT
    count = tl.zeros([borders.shape[0], LINES, SEGMENT], tl.int32)
    mass = tl.zeros([borders.shape[0], LINES, SEGMENT], tl.float32)
    for n in range(0, place.count, 4 * LINES):
        _, x = read_four(batch, req, place, n, LINES)
        for i in tl.static_range(4):
            reach = (x[i][None] >= borders[:, None, None, None]) & (x[i] > float("-inf"))[None]
            count += tl.sum(reach.to(tl.int32), 3)
            mass += tl.sum(tl.where(reach, mass_of(x[i], place)[None], 0.0), 3)
    return tl.sum(tl.sum(count, 2), 1), tl.sum(tl.sum(mass.to(tl.float64), 2), 1)


@triton.jit
@no_type_check
def _span(batch, req, place, first, last, LINES: tl.constexpr):
    """Number and mass of the logits that reach each of two borders."""
    lower = tl.arange(0, 2) == 0
    counts, masses = _measure(batch, req, place, tl.where(lower, value(first), value(last)), LINES)
    return Span(
        first=first,
        last=last,
        first_count=tl.sum(tl.where(lower, counts, 0), 0),
        first_mass=tl.sum(tl.where(lower, masses, 0.0), 0),
        last_count=tl.sum(tl.where(lower, 0, counts), 0),
        last_mass=tl.sum(tl.where(lower, 0.0, masses), 0),
    )


@triton.jit
@no_type_check
def _narrow(batch, req, place, span, goal, by_mass, LINES: tl.constexpr):
    """Borders closer to each other, by one pass."""
    last = tl.minimum(span.last, key(place.peak).to(tl.int64) + 1)
    first = span.first
    if by_mass:  # what lies lower has no mass in float64
        first = tl.maximum(first, key(place.peak - 800.0 / place.scale.to(tl.float32)).to(tl.int64))
    pivots = _pivots(place, first, last, span, goal, by_mass)
    counts, masses = _measure(batch, req, place, value(pivots), LINES)
    enough = tl.where(by_mass, masses, counts.to(tl.float64)) >= goal  # the cutoff does not lie under these
    lower, upper = tl.max(tl.where(enough, pivots, first), 0), tl.min(tl.where(enough, last, pivots), 0)
    at_lower, at_upper = enough & (pivots == lower), (pivots == upper) & ~enough
    none_lower, none_upper = lower == first, upper == last
    return Span(
        first=lower,
        last=upper,
        first_count=tl.where(none_lower, span.first_count, tl.max(tl.where(at_lower, counts, 0), 0)),
        first_mass=tl.where(none_lower, span.first_mass, tl.max(tl.where(at_lower, masses, 0.0), 0)),
        last_count=tl.where(none_upper, span.last_count, tl.max(tl.where(at_upper, counts, 0), 0)),
        last_mass=tl.where(none_upper, span.last_mass, tl.max(tl.where(at_upper, masses, 0.0), 0)),
    )


@triton.jit
@no_type_check
def _pivots(place, first, last, span, goal, by_mass):
    """Where to look, as keys: pairs ever wider around the place where the goal would be if logits were evenly spread
    between the borders, and the middle of the keys on either side of it, so that at most half of them remain."""
    p = tl.arange(0, PIVOTS)
    top = tl.where(by_mass, span.last_mass, span.last_count.to(tl.float64))
    width = tl.where(by_mass, span.first_mass - span.last_mass, (span.first_count - span.last_count).to(tl.float64))
    share = tl.minimum(tl.maximum((goal - top) / width, 0.0), 1.0).to(tl.float32)
    high = tl.minimum(value(last), place.peak)
    low = tl.maximum(value(first), place.peak - FAR / place.scale.to(tl.float32))
    extent = tl.maximum(high - low, 0.0)
    near = extent / tl.where(p < 2, 64.0, tl.where(p < 4, 16.0, 4.0))
    guess = high - share * extent
    inner = key(tl.where(p % 2 == 0, guess - near, guess + near)).to(tl.int64)
    middle = tl.minimum(tl.maximum(key(guess).to(tl.int64), first), last)
    outer = tl.where(p % 2 == 0, first + (middle - first) // 2, last - (last - middle) // 2)
    return tl.minimum(tl.maximum(tl.where(p < PIVOTS - 2, inner, outer), first + 1), last - 1)


@triton.jit
@no_type_check
def _finish(batch, req, place, span, k, top_p, goal, LINES: tl.constexpr):
    """The cutoff between borders that have few logits between them, and the mass of all that is at least the k-th."""
    found = span.first_count - span.last_count
    if found > FEW:  # they are all equal
        cutoff, mass = value(span.first), span.first_mass
    else:
        gather(batch, req, place, value(span.first), value(span.last), LINES)
        none = tl.zeros((), tl.float32) + float("-inf")
        edge, mass, _ = cut(batch, req, place, found, span.last_count, span.last_mass, k, top_p, goal, none)
        cutoff = tl.where(edge < float("inf"), edge, value(span.first))
    return cutoff, mass
