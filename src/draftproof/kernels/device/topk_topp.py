"""Filters without a sort of the row: one program finds a distribution row's cutoff and puts its sums right.

The scan has left the largest logit and the mass of every slice. They bound where the cutoff can be; only slices that
reach the lower bound are read again, about one in twenty for a small k, and the few logits in them that reach it are
ranked. A row in which they are many is put into a queue, for `draftproof.kernels.device.nucleus_search` and `draftproof.kernels.device.topk_topp`:
what it takes would slow all others down.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.cutoff import (
    LINES,
    Place,
    bottom_of,
    clear_sums,
    line_of_parts,
    line_of_work,
    list_slices,
    masked_sums,
    measured,
    queued_row,
    sampled,
    write_sums,
)
from draftproof.kernels.device.layout import (
    BASE,
    COUNTS,
    CUTOFF,
    DRAFT_SIDE,
    FEW,
    FLOAT_COLUMNS,
    GUESS,
    INT_COLUMNS,
    LOW,
    MASS,
    MIN_P,
    PEAK,
    PER_CHUNK,
    QUEUE,
    QUEUED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOTAL,
)
from draftproof.kernels.device.math import at_once, grain_of, key, value
from draftproof.kernels.device.rows import dist_row, request, wanted, warm
from draftproof.kernels.device.shortlist import cut, gather, listed, listed_slices
from draftproof.kernels.device.stats import (
    Masses,
    bound_of,
    floor_of,
    line_of,
    masses_of,
    plain_numbers,
    summary_of,
    tiles_of,
    write_settled,
)

LISTED = tl.constexpr(256)  # slices that one program reads for one row
SHORT = tl.constexpr(256)  # logits that it ranks


class Filters(NamedTuple):
    """Of one distribution row. `k` of 0 is off."""

    temperature: Any
    k: Any
    top_p: Any
    min_p: Any


@triton.jit
@no_type_check
def settle(batch):
    """Twin: `filters.settle`. Grid: (J + K, B)."""
    row = tl.program_id(0)
    req = request(batch, tl.program_id(1).to(tl.int64))
    filters = filters_of(batch, req, row)
    scale = at_once(1.0 / warm(filters.temperature))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    if wanted(req, row):
        off = (filters.k == 0) & (filters.top_p == 1) & (filters.min_p == 0)
        if off | (filters.temperature == 0):
            rows = row + tl.zeros([1], tl.int32)
            tiles = tiles_of(batch, req, rows, rows >= 0)
            settled = plain_numbers(tiles, rows >= 0, filters.temperature, scale, True)
            write_settled(line_of(batch, req, rows), rows >= 0, settled)
        else:
            _settle_row(batch, req, row, filters, scale)


@triton.jit
@no_type_check
def filters_of(batch, req, row):
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
    line = line_of(batch, req, row)
    tl.store(line + CUTOFF, cutoff.to(tl.float64))
    tl.store(line + BASE, base)
    tl.store(line + MASS, mass)


@triton.jit
@no_type_check
def _settle_row(batch, req, row, filters, scale):
    """Twin: `filters._cut`, where few logits can be the cutoff."""
    summary = summary_of(batch, req, row)
    if (summary.peak > float("-inf")) & (summary.peak < float("inf")):
        floor = floor_of(filters, summary.peak, scale)
        masses = Masses(mass=summary.s, total=tl.zeros((), tl.float64))
        if (filters.k == 0) & (filters.top_p < 1):
            masses = masses_of(summary, scale)
        low = bound_of(filters, summary, masses, floor, scale)
        count = list_slices(batch, req, row, summary.m, low)
        place = Place(row=row, first=0, count=count, listed=1, peak=summary.peak, scale=scale)
        left = count > LISTED
        if not left:
            if (filters.k > 0) | (filters.top_p < 1):
                left = _search(batch, req, place, filters, low, floor, masses.total)
            else:
                kept = masked_sums(batch, req, place, 0, req.C * PER_CHUNK, floor, LINES)
                write_row(batch, req, row, floor, scale * summary.peak.to(tl.float64), kept)
        if left:
            _leave(batch, req, row, filters, summary.peak, scale, masses.total, low)
    else:
        nothing = tl.zeros((), tl.float64)
        write_row(batch, req, row, nothing, nothing, nothing + float("nan"))


@triton.jit
@no_type_check
def _search(batch, req, place, filters, low, floor, total):
    """The cutoff among the logits of the listed slices that reach `low`. Returns whether they are too many."""
    places = line_of_work(batch, dist_row(req, place.row))
    found = gather(batch, req, place, low, None, places, SHORT, True)
    if found <= SHORT:
        _cut_row(batch, req, place, filters, floor, total, places, found)
    return found > SHORT


@triton.jit
@no_type_check
def _cut_row(batch, req, place, filters, floor, total, places, found):
    """Write down the numbers of a row whose cutoff lies among `found` gathered logits."""
    x = listed(places, found, SHORT)
    which, behind = listed_slices(places + SHORT, found, SHORT), listed_slices(places + SHORT + 1, found - 1, SHORT)
    if place.row < req.J:
        clear_sums(batch, req, place.row)
    goal, none = filters.top_p * total, tl.zeros((), tl.float64)
    cutoff, kept = cut(x, place, found, filters.k, filters.top_p, goal, none, floor)
    write_row(batch, req, place.row, cutoff, place.scale * place.peak.to(tl.float64), kept)
    if place.row < req.J:
        write_sums(batch, req, place, x, which, behind, cutoff)


@triton.jit
@no_type_check
def _leave(batch, req, row, filters, peak, scale, total, low):
    """Put a row into the queue, and write down what is known of it: of a nucleus, where a sample says that it ends.

    In which place of the queue does not matter: rows know nothing of each other.
    """
    line = dist_row(req, row)
    if (filters.k == 0) & (filters.top_p < 1):
        count = req.C * PER_CHUNK
        place = Place(row=row, first=0, count=count, listed=0, peak=peak, scale=scale)
        guess = sampled(batch, req, place, low, filters.top_p * total, filters.k == 0, total)
        known = line_of(batch, req, row)
        tl.store(known + LOW, low.to(tl.float64))
        tl.store(known + GUESS, guess.to(tl.float64))
        tl.store(known + TOTAL, total)
        tl.store(known + PEAK, peak.to(tl.float64))
        tl.store(line_of_parts(batch, line) + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.float64))
    n = tl.atomic_add(line_of_work(batch, 0) + QUEUED, 1.0)
    tl.store(line_of_work(batch, n.to(tl.int64)) + QUEUE, line.to(tl.float32))


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
        edge = _search_deep(batch, req, place, low, filters.k, filters.top_p, masses.total)
    cutoff = tl.maximum(floor, edge)
    kept = masked_sums(batch, req, place, 0, count, cutoff, LINES)
    write_row(batch, req, row, cutoff, scale * summary.peak.to(tl.float64), kept)


@triton.jit
@no_type_check
def _search_deep(batch, req, place, low, k, top_p, total):
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
    places = line_of_work(batch, dist_row(req, place.row))
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
