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

from draftproof.kernels.cutoff import (
    LINES,
    Place,
    clear_sums,
    line_of_parts,
    line_of_work,
    list_slices,
    masked_sums,
    write_sums,
)
from draftproof.kernels.early import at_once
from draftproof.kernels.layout import (
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
    QUEUE,
    QUEUED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOTAL,
)
from draftproof.kernels.measure import sampled
from draftproof.kernels.numbers import line_of, plain_numbers, tiles_of, write_settled
from draftproof.kernels.request import law_row, request, wanted, warm
from draftproof.kernels.shortlist import cut, gather, listed, listed_slices
from draftproof.kernels.summary import Masses, bound_of, floor_of, masses_of, summary_of

LISTED = tl.constexpr(256)  # slices that one program reads for one row
SHORT = tl.constexpr(256)  # logits that it ranks


class Filters(NamedTuple):
    """Of one law row. `k` of 0 is off."""

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
    places = line_of_work(batch, law_row(req, place.row))
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
    line = law_row(req, row)
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
