"""Filters without a sort of the row: one program finds a law row's cutoff and puts its chunk sums right.

The scan has left the largest logit and the mass of every slice. They bound where the cutoff can be; only slices that
reach the lower bound are read again (`draftproof.kernels.cutoff`), about one in twenty for a small k.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.bounds import bound_count, bound_mass
from draftproof.kernels.cutoff import Place, list_slices, masked_sums, search
from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.laws import line_of
from draftproof.kernels.layout import (
    BASE,
    CUTOFF,
    DRAFT_SIDE,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    MASS,
    MIN_P,
    PER_CHUNK,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from draftproof.kernels.numbers import plain_numbers
from draftproof.kernels.request import law_row, request, wanted


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
    filters = _filters(batch, req, row)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if wanted(batch, req, row):
        off = (filters.k == 0) & (filters.top_p == 1) & (filters.min_p == 0)
        if off | (filters.temperature == 0):
            line = law_row(batch, req, row) + tl.zeros([1], tl.int64)
            scale = 1.0 / filters.temperature + tl.zeros([1], tl.float64)
            plain_numbers(batch, line, line >= 0, scale, filters.temperature == 0)
        else:
            _cut(batch, req, row, filters)


@triton.jit
@no_type_check
def _filters(batch, req, row):
    side = tl.where(row < batch.sizes.J, 0, 1)
    floats = batch.floats + req.b * FLOAT_COLUMNS + side * DRAFT_SIDE
    k = tl.load(batch.ints + req.b * INT_COLUMNS + TOP_K + side).to(tl.int32)
    k = tl.where(k < tl.where(row < batch.sizes.J, batch.sizes.V, batch.sizes.R), k, 0)
    return Filters(
        temperature=tl.load(floats + TEMPERATURE), k=k, top_p=tl.load(floats + TOP_P), min_p=tl.load(floats + MIN_P)
    )


@triton.jit
@no_type_check
def _cut(batch, req, row, filters):
    """Twin: `filters._cut`."""
    scale, k, top_p = 1.0 / filters.temperature, filters.k, filters.top_p
    count = batch.sizes.C * PER_CHUNK
    n = tl.arange(0, batch.traits.NS)
    slices = batch.slices + law_row(batch, req, row) * 2 * count + n
    m = tl.load(slices, mask=n < count, other=float("-inf"))
    s = tl.load(slices + count, mask=n < count, other=0.0)
    peak = tl.max(m, 0)
    sound = (peak > float("-inf")) & (peak < float("inf")) & (tl.max((s != s).to(tl.int32), 0) == 0)
    cutoff, kept = tl.zeros((), tl.float32), tl.zeros((), tl.float64) + float("nan")
    if sound:
        mass = s * power(m - peak, slope_of(scale))
        total = tl.sum(mass.to(tl.float64), 0)
        floor = tl.zeros((), tl.float32) + float("-inf")
        if filters.min_p > 0:
            floor = (peak.to(tl.float64) + tl.log(filters.min_p) / scale).to(tl.float32)
        low, high = floor, tl.zeros((), tl.float32) + float("inf")
        if k > 0:
            low = bound_count(m, peak, k)  # top-p counts all of the k largest, those that min-p takes off too
        elif top_p < 1:
            goal = (top_p * total).to(tl.float32)
            low, high = bound_mass(m, mass, peak, scale.to(tl.float32), goal)
            low = tl.maximum(floor, low)
        place = Place(row=row, count=list_slices(batch, req, row, m, low), peak=peak, scale=scale)
        cutoff = tl.maximum(floor, search(batch, req, place, low, high, k, top_p, total))
        kept = masked_sums(batch, req, place, cutoff)
    line = line_of(batch, req, row)
    tl.store(line + CUTOFF, cutoff.to(tl.float64))
    tl.store(line + BASE, scale * peak.to(tl.float64))
    tl.store(line + MASS, kept)
