"""Nuclei that lie deep, by all programs together: a row's parts are measured side by side, in rounds.

For the rows that `settle` has left in its queue. Each launch is a round: two measure the mass above some numbers, the
third writes down the few logits that are left between two of them, the fourth ranks these and puts the sums right. No
program waits for another inside a launch: what the rounds before have found, each works out again from their sums, in
the same order. A row in which too many are left is then settled as in `draftproof.kernels.device.topk_topp`, and so is one with a
k: a launch for those, nearly always for nothing, would take longer.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.cutoff import (
    LINES,
    Place,
    answer,
    ask,
    bottom_of,
    line_of_parts,
    line_of_work,
    masked_sums,
    measured,
    queued_row,
)
from draftproof.kernels.device.layout import (
    COUNTS,
    FEW,
    GUESS,
    LEAST,
    LOW,
    MOST,
    PARTS,
    PEAK,
    PER_CHUNK,
    PIVOTS,
    QUEUED,
    TOTAL,
)
from draftproof.kernels.device.math import grain_of
from draftproof.kernels.device.rows import chunks_of, dist_row
from draftproof.kernels.device.shortlist import cut, gather
from draftproof.kernels.device.stats import line_of
from draftproof.kernels.device.topk_topp import filters_of, settle_row, write_row

LAST = tl.constexpr(3)  # round
EACH = tl.constexpr(FEW.value // PARTS.value)  # logits that a part may have left
EVEN = tl.constexpr(4)  # pivots all over the row, should the guess be wrong
NEAR = 0.01  # exponents between the guess and the innermost pivots
WIDER = tl.constexpr(0.85)  # log2 of how much further apart each pair is from the next than from the one before
UNIT = tl.constexpr(NEAR / (2**WIDER.value - 1))


class Note(NamedTuple):
    """What `settle` knew: the cutoff is not under `low` and may be near `guess`; the mass of all, and what has to be
    reached of it."""

    low: Any
    guess: Any
    total: Any
    goal: Any


class Span(NamedTuple):
    """The cutoff is at least `low` and less than `high`, and what reaches `high` has the mass `above`."""

    low: Any
    high: Any
    above: Any


@triton.jit
@no_type_check
def sift(batch, ROUND: tl.constexpr):
    """Twin: `filters._nucleus`, one of four rounds. Grid: any; the programs share the parts of the queued rows."""
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    parts = _parts_of(batch)
    count = tl.load(line_of_work(batch, 0) + QUEUED).to(tl.int32) * parts
    each = tl.cdiv(count, tl.num_programs(0))  # one behind the other: what parts of a row share is worked out once
    n = tl.program_id(0) * each
    end = tl.minimum(n + each, count)
    while n < end:
        queued = n // parts
        req, row = queued_row(batch, queued)
        filters = filters_of(batch, req, row)
        first, behind = n % parts, tl.minimum(end - queued * parts, parts)
        nucleus = (filters.k == 0) & (filters.top_p < 1)
        left = not nucleus
        if nucleus:
            left = _sift_parts(batch, req, row, first, behind, filters, ROUND)
        if ROUND == LAST and left & (first == 0):
            settle_row(batch, req, row)
        n = queued * parts + behind


@triton.jit
@no_type_check
def _sift_parts(batch, req, row, first, behind, filters, ROUND: tl.constexpr):
    """The parts of a row from `first` to `behind`. Returns, in the last round, whether the row is left unsettled."""
    known = line_of(batch, req, row)
    place = _place(batch, req, row, first, behind, tl.load(known + PEAK).to(tl.float32), 1.0 / filters.temperature)
    total = tl.load(known + TOTAL)
    note = Note(
        low=tl.load(known + LOW).to(tl.float32),
        guess=tl.load(known + GUESS).to(tl.float32),
        total=total,
        goal=filters.top_p * total,
    )
    span = Span(low=note.low, high=float("inf") + tl.zeros((), tl.float32), above=tl.zeros((), tl.float64))
    pivots = _around(place, note)
    if ROUND > 0:
        span = _narrowed(batch, req, row, span, pivots, note, 0)
        pivots = _between(place, span)
    if ROUND > 1:
        span = _narrowed(batch, req, row, span, pivots, note, 1)
    left = first < 0
    if ROUND < 2:
        upto = measured(batch, req, place, pivots, row >= 0, note.total)
        tl.atomic_add(_sums(batch, req, row, ROUND), upto, sem="relaxed")
    elif ROUND == 2:
        for part in range(first, behind):
            _list(batch, req, _place(batch, req, row, part, part + 1, place.peak, place.scale), part, span)
    else:
        left = not _close(batch, req, place, first, span, note)
    return left


@triton.jit
@no_type_check
def _parts_of(batch):
    """How many parts a row has, PARTS at most."""
    return tl.cdiv(chunks_of(batch) * PER_CHUNK, _each(batch))


@triton.jit
@no_type_check
def _each(batch):
    """Slices in a part: a multiple of those that are measured at a time."""
    return tl.cdiv(chunks_of(batch) * PER_CHUNK, PARTS * LINES) * LINES


@triton.jit
@no_type_check
def _place(batch, req, row, first, behind, peak, scale):
    """Parts of a row, one behind the other."""
    each = _each(batch)
    begin, end = first * each, tl.minimum(behind * each, req.C * PER_CHUNK)
    return Place(row=row, first=begin, count=tl.maximum(end - begin, 0), listed=0, peak=peak, scale=scale)


@triton.jit
@no_type_check
def _line(batch, req, row):
    return line_of_parts(batch, dist_row(req, row))


@triton.jit
@no_type_check
def _sums(batch, req, row, ROUND: tl.constexpr):
    """Where what reaches the pivots of a round is added up, whole numbers."""
    sums = _line(batch, req, row) + ROUND * PIVOTS + tl.arange(0, PIVOTS)
    return sums.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
@no_type_check
def _around(place, note):
    """The first pivots: the lowest possible cutoff, some all over the row, and pairs ever further from the guess."""
    p = tl.arange(0, PIVOTS)
    bottom = bottom_of(place, note.low)
    even = bottom + (place.peak - bottom) * (p.to(tl.float32) / EVEN)
    pair = ((p - EVEN + 1) // 2).to(tl.float32)  # 0 is the guess itself
    apart = (tl.exp2(pair * WIDER) - 1.0) * (UNIT / place.scale.to(tl.float32))
    near = note.guess + tl.where(p % 2 == 0, -apart, apart)
    inside = tl.minimum(tl.maximum(tl.where(p < EVEN, even, near), bottom), place.peak)
    return tl.where(p == 0, note.low, inside)


@triton.jit
@no_type_check
def _between(place, span):
    """The next ones: at even distances in what is left."""
    p = tl.arange(0, PIVOTS)
    bottom = bottom_of(place, span.low)
    even = bottom + (tl.minimum(span.high, place.peak) - bottom) * (p.to(tl.float32) / PIVOTS)
    return tl.where(p == 0, span.low, even)


@triton.jit
@no_type_check
def _narrowed(batch, req, row, span, pivots, note, ROUND: tl.constexpr):
    """Borders closer to each other, by what a round has measured. Sums of the same logits rise and fall together:
    where a lower pivot's does not reach the goal, no higher one's does."""
    upto = tl.load(_sums(batch, req, row, ROUND)).to(tl.float64) * grain_of(note.total)
    enough = (upto >= note.goal) | (pivots <= span.low)
    low, high = tl.max(tl.where(enough, pivots, span.low), 0), tl.min(tl.where(enough, span.high, pivots), 0)
    above = tl.where(high == span.high, span.above, tl.max(tl.where(pivots == high, upto, 0.0), 0))
    return Span(low=low, high=high, above=above)


@triton.jit
@no_type_check
def _list(batch, req, place, part, span):
    """Write down a part's logits between the borders, EACH at most, how many there are, the least and the largest."""
    places = line_of_work(batch, dist_row(req, place.row)) + part * EACH
    found = gather(batch, req, place, span.low, span.high, places, EACH, False)
    n = tl.arange(0, EACH)
    least = tl.min(tl.load(places + n, mask=n < found, other=float("inf")), 0)
    most = tl.max(tl.load(places + n, mask=n < found, other=float("-inf")), 0)
    if found > EACH:
        least, most = _extremes(batch, req, place, span)
    known = _line(batch, req, place.row) + part
    tl.store(known + COUNTS, found.to(tl.float64))
    tl.store(known + LEAST, least.to(tl.float64))
    tl.store(known + MOST, most.to(tl.float64))


@triton.jit
@no_type_check
def _extremes(batch, req, place, span):
    least, most = tl.full((), float("inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    for n in range(0, place.count, LINES):
        which, raw = ask(batch, req, place, n + tl.arange(0, LINES))
        x = answer(batch, req, place, which, raw)
        here = (x >= span.low) & (x < span.high) & (x > float("-inf"))
        least = tl.minimum(least, tl.min(tl.min(tl.min(tl.where(here, x, float("inf")), 2), 1), 0))
        most = tl.maximum(most, tl.max(tl.max(tl.max(tl.where(here, x, float("-inf")), 2), 1), 0))
    return least, most


@triton.jit
@no_type_check
def _close(batch, req, place, first, span, note):
    """Cut among what is left of all parts, and put the sums of these right. Where too many are left, they must be all
    equal, as logits of two bytes often are: else nothing is done. Returns whether it was."""
    part = tl.arange(0, PARTS)
    known, there = _line(batch, req, place.row) + part, part < _parts_of(batch)
    counts = tl.load(known + COUNTS, mask=there, other=0.0).to(tl.int32)
    few = tl.max(counts, 0) <= EACH
    least = tl.min(tl.load(known + LEAST, mask=there, other=float("inf")), 0).to(tl.float32)
    most = tl.max(tl.load(known + MOST, mask=there, other=float("-inf")), 0).to(tl.float32)
    cutoff, kept = span.low, tl.zeros((), tl.float64)
    if few:
        x = _left(line_of_work(batch, dist_row(req, place.row)), counts)
        edge, kept = cut(x, place, tl.sum(counts, 0), 0, 1.0, note.goal, span.above, span.low)
        cutoff = tl.where(edge < float("inf"), edge, cutoff)
    equal = (~few) & (least == most)
    if equal:
        cutoff = least
        kept = tl.sum(counts, 0) * tl.exp((least - place.peak).to(tl.float64) * place.scale)
    if few | equal:
        if place.row < req.J:
            masked_sums(batch, req, place, place.first, place.first + place.count, cutoff, LINES)
        if first == 0:
            write_row(batch, req, place.row, cutoff, place.scale * place.peak.to(tl.float64), span.above + kept)
    return few | equal


@triton.jit
@no_type_check
def _left(places, counts):
    """What all parts have left, [FEW], one behind the other; −inf behind the last."""
    n, part = tl.arange(0, FEW)[:, None], tl.arange(0, PARTS)[None, :]
    mine = tl.sum((tl.cumsum(counts, 0)[None, :] <= n).to(tl.int32), 1)
    before = tl.sum(tl.where(part < mine[:, None], counts[None, :], 0), 1)
    n = tl.arange(0, FEW)
    return tl.load(places + mine * EACH + n - before, mask=mine < PARTS, other=float("-inf"))
