"""What the scan tells of a law row that has filters, and where its cutoff can be at least."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.bounds import bound_count, bound_mass
from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import PER_CHUNK
from draftproof.kernels.orders import key, value
from draftproof.kernels.request import law_row


class Summary(NamedTuple):
    """What the scan tells of a row: largest logit and sum by slice [NS], the largest and the least of these logits."""

    m: Any
    s: Any
    peak: Any
    least: Any


class Masses(NamedTuple):
    """Masses of the slices [NS], relative to the row's largest logit, and their sum, float64."""

    mass: Any
    total: Any


@triton.jit
@no_type_check
def summary_of(batch, req, row):
    """Largest and least are found in one step, as whole numbers. A row with NaN in it has a peak of +inf."""
    count = req.C * PER_CHUNK
    n = tl.arange(0, batch.traits.NS)
    slices = batch.slices + law_row(req, row) * 2 * count + n
    m = tl.load(slices, mask=n < count, other=float("-inf"))
    s = tl.load(slices + count, mask=n < count, other=0.0)
    largest = key(tl.where(s == s, m, float("inf")))
    # ~, not −: of the largest of three numbers with signs turned, ptxas 12.8 forgets one sign (sm_90)
    least = ~key(tl.where(m > float("-inf"), m, float("inf")))
    largest, least = tl.split(tl.max(tl.join(largest, least), 0))
    return Summary(m=m, s=s, peak=value(largest), least=value(~least))


@triton.jit
@no_type_check
def masses_of(summary, scale):
    mass = summary.s * power(summary.m - summary.peak, slope_of(scale))
    return Masses(mass=mass, total=tl.sum(mass.to(tl.float64), 0))


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
def bound_of(filters, summary, masses, floor, scale):
    """A number that the cutoff does not lie under. The masses are looked at only where k is off."""
    low = floor
    if filters.k > 0:
        # top-p counts all k, those too that min-p takes off
        low = bound_count(summary.m, summary.peak, summary.least, filters.k)
    elif filters.top_p < 1:
        goal = filters.top_p * masses.total
        low = bound_mass(summary.m, summary.peak, summary.least, masses.mass, masses.total, scale, goal)
        low = tl.maximum(floor, low)
    return low
