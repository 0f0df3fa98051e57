"""The search for a cutoff among the slices that may hold it, and the row's sums above it."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import PER_CHUNK, SLICE
from draftproof.kernels.layout import WORK as FEW
from draftproof.kernels.orders import key, value
from draftproof.kernels.request import law_row
from draftproof.kernels.rows import draft_row, take_draft, take_target, target_row

LINES = tl.constexpr(32)  # slices read at a time
PIVOTS = tl.constexpr(8)
INFINITY = tl.constexpr(0x7F800000)  # the key of +inf


class Place(NamedTuple):
    """A law row: its number among the request's, how many of its slices are listed, its largest logit, its scale."""

    row: Any
    count: Any
    peak: Any
    scale: Any


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
def _work(batch, req, row):
    """A row's own memory: FEW places for logits, then its list of slices."""
    return batch.work + law_row(batch, req, row) * (batch.sizes.C * PER_CHUNK + FEW)


@triton.jit
@no_type_check
def list_slices(batch, req, row, m, low):
    """Write down the slices that reach `low`, in order. Returns how many."""
    reach = (m >= low) & (m > float("-inf"))
    n = tl.cumsum(reach.to(tl.int32), 0) - 1
    tl.store(_work(batch, req, row) + FEW + n, tl.arange(0, batch.traits.NS).to(tl.float32), mask=reach)
    tl.debug_barrier()
    return tl.sum(reach.to(tl.int32), 0)


@triton.jit
@no_type_check
def _read(batch, req, place, n):
    """LINES of the listed slices from the n-th on: their numbers, and their logits [LINES, parts, SEGMENT].

    −inf behind the list's end. In this shape, as in the scan, sums over slices stay within few threads.
    """
    n = n + tl.arange(0, LINES)
    which = tl.load(_work(batch, req, place.row) + FEW + n, mask=n < place.count, other=-1.0).to(tl.int32)
    begin = tl.where(which >= 0, which * SLICE, -SLICE)
    if batch.traits.EDITED or batch.traits.MASKED:
        o = begin[:, None] + tl.arange(0, SLICE)[None, :]
        rows = place.row + tl.zeros([LINES], tl.int32)
        if place.row < batch.sizes.J:
            x = take_target(batch, req, rows, o)
        else:
            x = take_draft(batch, req, rows - batch.sizes.J, o)
        x = tl.reshape(x, (LINES, 1, SLICE))
    else:
        SEGMENT: tl.constexpr = batch.traits.SEGMENT
        part = tl.arange(0, SLICE // SEGMENT)[None, :, None] * SEGMENT
        o = begin[:, None, None] + part + tl.arange(0, SEGMENT)[None, None, :]
        if place.row < batch.sizes.J:
            there = (o >= 0) & (o < batch.sizes.V)
            x = tl.load(target_row(batch, req, place.row) + o, mask=there, other=float("-inf")).to(tl.float32)
        else:
            there = (o >= 0) & (o < batch.sizes.R)
            at = draft_row(batch, req, place.row - batch.sizes.J)
            x = tl.load(at + o, mask=there, other=float("-inf")).to(tl.float32)
    return which, x


@triton.jit
@no_type_check
def _each(x):
    """Sums by slice: [LINES, parts, SEGMENT] to [LINES]."""
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
@no_type_check
def _mass(x, place):
    """Mass relative to the peak's, float32."""
    return power(x - place.peak, slope_of(place.scale))


@triton.jit
@no_type_check
def search(batch, req, place, low, high, k, top_p, total):
    """Twin: the cutoffs of `filters._cut_sorted` and `filters._nucleus`. The row's cutoff by top-k, then top-p on that.

    It lies in [low, high). `k` of 0 and `top_p` of 1 are off; `total` is the row's mass. Borders are drawn closer
    until few logits lie between them; those are sorted.
    """
    by_mass, goal = k == 0, tl.where(k == 0, top_p * total, k.to(tl.float64))
    cutoff = low
    first, last = key(low).to(tl.int64), key(high).to(tl.int64)
    searching = (k > 0) | (top_p < 1)
    while searching:
        span = _collect(batch, req, place, first, last)
        if _many(span):
            while _many(span):
                span = _narrow(batch, req, place, span, goal, by_mass)
            first, last = span.first, span.last
        else:
            cutoff, mass = _finish(batch, req, place, span, k, top_p, goal, by_mass)
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
def _collect(batch, req, place, first, last):
    """Gather the logits in [first, last), up to FEW of them."""
    low, high = value(first), value(last)
    found = tl.zeros((), tl.int32)
    above = tl.zeros([LINES], tl.int32)
    mass, mass_above = tl.zeros([LINES], tl.float64), tl.zeros([LINES], tl.float64)
    tl.debug_barrier()  # the places may still be read
    _, x = _read(batch, req, place, 0)
    for n in range(0, place.count, LINES):
        _, ahead = _read(batch, req, place, n + LINES)  # on its way while this one is worked on
        reach = (x >= low) & (x > float("-inf"))
        here = reach & (x < high)
        columns = tl.sum(here.to(tl.int32), 1)  # [LINES, SEGMENT]
        each = tl.sum(columns, 1)
        before = found + tl.cumsum(each, 0) - each
        before = before[:, None] + tl.cumsum(columns, 1) - columns
        at = before[:, None, :] + tl.cumsum(here.to(tl.int32), 1) - 1
        tl.store(_work(batch, req, place.row) + at, x, mask=here & (at < FEW))
        found += tl.sum(each, 0)
        w = tl.where(reach, _mass(x, place), 0.0)
        mass += _each(w).to(tl.float64)
        if last < INFINITY:
            above += _each((x >= high).to(tl.int32))
            mass_above += _each(tl.where(x >= high, w, 0.0)).to(tl.float64)
        x = ahead
    tl.debug_barrier()
    last_count = tl.sum(above, 0)
    return Span(
        first=first,
        last=last,
        first_count=found + last_count,
        first_mass=tl.sum(mass, 0),
        last_count=last_count,
        last_mass=tl.sum(mass_above, 0),
    )


@triton.jit
@no_type_check
def _finish(batch, req, place, span, k, top_p, goal, by_mass):
    """The smallest gathered logit that belongs to the kept ones, and the mass of all that is at least the k-th.

    By number, and where nothing lies above what was gathered, top-p is settled at once.
    """
    found = span.first_count - span.last_count
    if found > FEW:  # they are all equal
        cutoff, mass = value(span.first), span.first_mass
    else:
        i = tl.arange(0, FEW)
        x = tl.load(_work(batch, req, place.row) + i, mask=i < found, other=float("-inf"))
        x = tl.sort(x, descending=True)
        w = tl.where(i < found, tl.exp((x - place.peak).to(tl.float64) * place.scale), 0.0)
        nth = tl.where(by_mass, -1, k - 1 - span.last_count)
        kth = tl.max(tl.where(i == nth, x, float("-inf")), 0)
        mass = span.last_mass + tl.sum(tl.where(x >= kth, w, 0.0), 0)
        whole = (top_p < 1) & (span.last_count == 0)
        limit = tl.where(by_mass, goal, tl.where(whole, top_p * mass, float("inf")))
        before = span.last_mass + tl.cumsum(w, 0) - w
        kept = (i < found) & (x >= kth) & (before < limit)
        cutoff = tl.min(tl.where(kept, x, float("inf")), 0)
        cutoff = tl.where(cutoff < float("inf"), cutoff, value(span.first))
    return cutoff, mass


@triton.jit
@no_type_check
def _narrow(batch, req, place, span, goal, by_mass):
    """Borders closer to each other, by one pass."""
    last = tl.minimum(span.last, key(place.peak).to(tl.int64) + 1)
    first = span.first
    if by_mass:  # what lies lower has no mass in float64
        first = tl.maximum(first, key(place.peak - 800.0 / place.scale.to(tl.float32)).to(tl.int64))
    p = tl.arange(0, PIVOTS)
    pivots = _pivots(first, last, span, goal, by_mass, p)
    count = tl.zeros([PIVOTS, LINES], tl.int32)
    mass = tl.zeros([PIVOTS, LINES], tl.float64)
    _, x = _read(batch, req, place, 0)
    for n in range(0, place.count, LINES):
        _, ahead = _read(batch, req, place, n + LINES)
        w = _mass(x, place)
        for q in tl.static_range(PIVOTS):
            reach = x >= value(tl.sum(tl.where(p == q, pivots, 0), 0))
            count += tl.where(p[:, None] == q, _each(reach.to(tl.int32))[None, :], 0)
            mass += tl.where(p[:, None] == q, _each(tl.where(reach, w, 0.0)).to(tl.float64)[None, :], 0.0)
        x = ahead
    counts, masses = tl.sum(count, 1), tl.sum(mass, 1)
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
def _pivots(first, last, span, goal, by_mass, p):
    """Where to look: pairs ever wider around the place where the goal would be if logits were evenly spread between
    the borders, the widest in the middle of what is left on either side: at most half remains, and mostly a 64th."""
    top = tl.where(by_mass, span.last_mass, span.last_count.to(tl.float64))
    width = tl.where(by_mass, span.first_mass - span.last_mass, (span.first_count - span.last_count).to(tl.float64))
    share = tl.minimum(tl.maximum((goal - top) / width, 0.0), 1.0)
    guess = last - (share * (last - first).to(tl.float64)).to(tl.int64)
    near = (last - first) // tl.where(p < 2, 128, tl.where(p < 4, 32, 8))
    inner = tl.where(p % 2 == 0, guess - near, guess + near)
    outer = tl.where(p % 2 == 0, first + (guess - first) // 2, last - (last - guess) // 2)
    return tl.minimum(tl.maximum(tl.where(p < PIVOTS - 2, inner, outer), first + 1), last - 1)


@triton.jit
@no_type_check
def masked_sums(batch, req, place, cutoff):
    """Put the sums of slices and chunks right: only what reaches the cutoff counts, relative to the peak.

    Returns their total.
    """
    C = batch.sizes.C
    line = law_row(batch, req, place.row) * 2 * C
    sums = batch.slices + line * PER_CHUNK
    n = tl.arange(0, batch.traits.NS)
    tl.debug_barrier()
    tl.store(sums + n, place.peak + tl.zeros([batch.traits.NS], tl.float32), mask=n < C * PER_CHUNK)
    sums += C * PER_CHUNK
    tl.store(sums + n, tl.zeros([batch.traits.NS], tl.float32), mask=n < C * PER_CHUNK)
    tl.debug_barrier()
    for first in range(0, place.count, LINES):
        which, x = _read(batch, req, place, first)
        tl.store(sums + which, _each(tl.where(x >= cutoff, _mass(x, place), 0.0)), mask=which >= 0)
    tl.debug_barrier()
    c = tl.arange(0, batch.traits.NP)
    part = c[:, None] * PER_CHUNK + tl.arange(0, PER_CHUNK)[None, :]
    s = tl.sum(tl.load(sums + part, mask=part < C * PER_CHUNK, other=0.0), 1)
    tl.store(batch.stats + line + c, place.peak + tl.zeros([batch.traits.NP], tl.float32), mask=c < C)
    tl.store(batch.stats + line + C + c, s, mask=c < C)
    return tl.sum(s.to(tl.float64), 0)
