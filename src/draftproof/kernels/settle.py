"""Filters without a sort of the row: one program finds a law row's cutoff and puts its sums right.

The scan has left the largest logit and the mass of every slice. They bound where the cutoff can be; only slices that
reach the lower bound are read again, about one in twenty for a small k, and the few logits in them that reach it are
ranked. A row in which they are many is put into a queue, for `draftproof.kernels.sift` and `draftproof.kernels.deep`:
what it takes would slow all others down.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.bounds import bound_count, bound_mass
from draftproof.kernels.cutoff import Place, line_of_work, list_slices, masked_sums
from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import (
    BASE,
    CUTOFF,
    DONE,
    DRAFT_SIDE,
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
from draftproof.kernels.measure import sampled
from draftproof.kernels.numbers import line_of, plain_numbers, tiles_of, write_settled
from draftproof.kernels.request import law_row, request, wanted
from draftproof.kernels.shortlist import cut, gather, listed

LISTED = tl.constexpr(256)  # slices that one program reads for one row
SHORT = tl.constexpr(256)  # logits that it ranks


class Filters(NamedTuple):
    """Of one law row. `k` of 0 is off."""

    temperature: Any
    k: Any
    top_p: Any
    min_p: Any


class Summary(NamedTuple):
    """What the scan tells of a row: largest logit and mass by slice [NS], relative to the row's own; the totals."""

    m: Any
    mass: Any
    peak: Any
    total: Any
    sound: Any


@triton.jit
@no_type_check
def settle(batch, LINES: tl.constexpr):
    """Twin: `filters.settle`. Grid: (J + K, B). LINES: slices read at a time."""
    row = tl.program_id(0)
    req = request(batch, tl.program_id(1).to(tl.int64))
    filters = filters_of(batch, req, row)
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    if wanted(req, row):
        off = (filters.k == 0) & (filters.top_p == 1) & (filters.min_p == 0)
        if off | (filters.temperature == 0):
            rows = row + tl.zeros([1], tl.int32)
            tiles = tiles_of(batch, req, rows, rows >= 0)
            settled = plain_numbers(tiles, rows >= 0, filters.temperature, 1.0 / filters.temperature, True)
            write_settled(line_of(batch, req, rows), rows >= 0, settled)
        else:
            _settle_row(batch, req, row, filters, LINES)


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
def summary_of(batch, req, row, scale):
    count = req.C * PER_CHUNK
    n = tl.arange(0, batch.traits.NS)
    slices = batch.slices + law_row(req, row) * 2 * count + n
    m = tl.load(slices, mask=n < count, other=float("-inf"))
    s = tl.load(slices + count, mask=n < count, other=0.0)
    peak = tl.max(m, 0)
    mass = s * power(m - tl.where((peak > float("-inf")) & (peak < float("inf")), peak, 0.0), slope_of(scale))
    total = tl.sum(mass.to(tl.float64), 0)
    sound = (peak > float("-inf")) & (peak < float("inf")) & (total == total)
    return Summary(m=m, mass=mass, peak=peak, total=total, sound=sound)


@triton.jit
@no_type_check
def floor_of(filters, peak, scale):
    """What min-p cuts off lies under this."""
    floor = tl.zeros((), tl.float32) + float("-inf")
    if filters.min_p > 0:
        floor = (peak.to(tl.float64) + tl.log(filters.min_p) / scale).to(tl.float32)
    return floor


@triton.jit
@no_type_check
def bound_of(filters, summary, floor, scale):
    """A number that the cutoff does not lie under."""
    low = floor
    if filters.k > 0:
        low = bound_count(summary.m, summary.peak, filters.k)  # top-p counts all k, those too that min-p takes off
    elif filters.top_p < 1:
        goal = (filters.top_p * summary.total).to(tl.float32)
        low = tl.maximum(floor, bound_mass(summary.m, summary.mass, summary.peak, scale.to(tl.float32), goal))
    return low


@triton.jit
@no_type_check
def write_row(batch, req, row, cutoff, base, mass):
    line = line_of(batch, req, row)
    tl.store(line + CUTOFF, cutoff.to(tl.float64))
    tl.store(line + BASE, base)
    tl.store(line + MASS, mass)


@triton.jit
@no_type_check
def _settle_row(batch, req, row, filters, LINES: tl.constexpr):
    """Twin: `filters._cut`, where few logits can be the cutoff."""
    scale = 1.0 / filters.temperature
    summary = summary_of(batch, req, row, scale)
    if summary.sound:
        floor = floor_of(filters, summary.peak, scale)
        low = bound_of(filters, summary, floor, scale)
        count = list_slices(batch, req, row, summary.m, low)
        place = Place(row=row, first=0, count=count, listed=1, peak=summary.peak, scale=scale)
        places = line_of_work(batch, law_row(req, row))
        found, searched = tl.zeros((), tl.int32), (filters.k > 0) | (filters.top_p < 1)
        if searched & (place.count <= LISTED):
            found = gather(batch, req, place, low, float("inf"), places, SHORT, LINES)
        if (place.count <= LISTED) & (found <= SHORT):
            cutoff, kept = floor, tl.zeros((), tl.float64)
            if searched:
                goal, none = filters.top_p * summary.total, tl.zeros((), tl.float64)
                x = listed(places, found, SHORT)
                cutoff, kept = cut(x, place, found, filters.k, filters.top_p, goal, none, floor)
            if (row < req.J) | (not searched):
                total = masked_sums(batch, req, place, 0, req.C * PER_CHUNK, cutoff, LINES)
                kept = tl.where(searched, kept, total)
            write_row(batch, req, row, cutoff, scale * summary.peak.to(tl.float64), kept)
        else:
            _leave(batch, req, row, filters, summary, low)
    else:
        nothing = tl.zeros((), tl.float64)
        write_row(batch, req, row, nothing, nothing, nothing + float("nan"))


@triton.jit
@no_type_check
def _leave(batch, req, row, filters, summary, low):
    """Put a row into the queue, and write down what is known of it: of a nucleus, where a sample says that it ends.

    In which place of the queue does not matter: rows know nothing of each other.
    """
    line = law_row(req, row)
    if (filters.k == 0) & (filters.top_p < 1):
        count = req.C * PER_CHUNK
        place = Place(row=row, first=0, count=count, listed=0, peak=summary.peak, scale=1.0 / filters.temperature)
        goal = filters.top_p * summary.total
        guess = sampled(batch, req, place, low, goal, filters.k == 0, summary.total)
        known = line_of(batch, req, row)
        tl.store(known + LOW, low.to(tl.float64))
        tl.store(known + GUESS, guess.to(tl.float64))
        tl.store(known + TOTAL, summary.total)
        tl.store(known + PEAK, summary.peak.to(tl.float64))
    tl.store(line_of_work(batch, line) + DONE, 0.0)
    n = tl.atomic_add(line_of_work(batch, 0) + QUEUED, 1.0)
    tl.store(line_of_work(batch, n.to(tl.int64)) + QUEUE, line.to(tl.float32))
