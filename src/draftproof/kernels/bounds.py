"""Where a cutoff can be at least, as far as the largest logit and the mass of every slice tell.

A search asks of several numbers at a time whether enough lies above them: what takes long is not to count but to add up
over all threads, and that is one step however many counts there are. Whole numbers are added up faster than others.
"""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import LOG2_E, near_exp2
from draftproof.kernels.layout import SLICE

PIVOTS = tl.constexpr(8)
MOST_STEPS = tl.constexpr(7)
MASS_PIVOTS = tl.constexpr(4)  # each takes an exponential
MASS_STEPS = tl.constexpr(3)  # a bound need not be tight
SLACK = tl.constexpr(1e-5)  # a bound must hold in spite of rounding
ALL = tl.constexpr(2**30)  # what stands for the mass of a row


@triton.jit
@no_type_check
def bound_count(m, peak, least, k):
    """A number that at least k logits reach: the largest of k slices each do. −inf where there are fewer slices.

    It is enough if not many more than k slices reach it.
    """
    NS: tl.constexpr = m.shape[0]
    line = tl.reshape(m, (1, NS))  # laid out as m is, so that each thread has the counts of all pivots
    low, high = least, peak
    enough, reached, n = peak >= least, k + k, 0
    one = enough.to(tl.int32)  # unknown to the compiler: it would count bits, and pack them first
    while enough & (reached > k + k // 4) & (n < MOST_STEPS):
        here = tl.sum(tl.where(line >= _pivots(low, high, PIVOTS)[:, None], one, 0), 1)
        count = tl.sum((here >= k).to(tl.int32), 0)
        reached = tl.min(tl.where(here >= k, here, NS), 0)
        enough = count > 0
        low, high = _between(low, high, count, PIVOTS)
        n += 1
    return tl.where(enough, low, float("-inf"))


@triton.jit
@no_type_check
def bound_mass(m, peak, least, mass, total, scale, goal):
    """A number that the cutoff of a nucleus of mass `goal`, relative to the peak's, does not lie under.

    A slice whose largest logit reaches v has at least that one's mass above v, and at least its whole mass less
    what the others can have below v. And all logits under v have at most the mass of so many v: as long as that is no
    more than what lies outside the nucleus, the cutoff is not under v.
    """
    total, scale, goal = total.to(tl.float32), scale.to(tl.float32), goal.to(tl.float32)
    NS: tl.constexpr = m.shape[0]
    unit, slope = 1.0 / total * ALL, scale * LOG2_E
    line = tl.reshape(m, (1, NS))
    top = (near_exp2((line - peak) * slope) * unit).to(tl.int32)
    mass = (tl.reshape(mass, (1, NS)) * unit).to(tl.int32)
    wanted = (goal * (1 + SLACK) * unit).to(tl.int32) + 1
    others = tl.log(unit * ((SLICE - 1) * (1 + SLACK))) * LOG2_E
    low, high, found = least, peak, peak < least
    for _ in range(MASS_STEPS):
        pivots = _pivots(low, high, MASS_PIVOTS)
        under = tl.minimum(near_exp2(tl.fma(pivots - peak, slope, others)), ALL).to(tl.int32) + 1
        least_mass = tl.maximum(top, mass - under[:, None])
        enough = tl.sum(tl.where(line >= pivots[:, None], least_mass, 0), 1) >= wanted
        count = tl.sum(enough.to(tl.int32), 0)
        found |= count > 0
        low, high = _between(low, high, count, MASS_PIVOTS)
    spare = total * (1 - SLACK) - goal * (1 + SLACK)
    even = peak + tl.log(tl.maximum(spare, 0.0) / (SLICE * NS)) / scale
    return tl.maximum(even - SLACK / scale, tl.where(found, low, float("-inf")))


@triton.jit
@no_type_check
def _pivots(low, high, COUNT: tl.constexpr):
    """Numbers from `low` on, at even distances."""
    return _pivot(low, high, tl.arange(0, COUNT), COUNT)


@triton.jit
@no_type_check
def _between(low, high, enough, COUNT: tl.constexpr):
    """The two of these, or `high`, between which the highest lies above which there is enough: for so many there is."""
    first = _pivot(low, high, tl.maximum(enough - 1, 0), COUNT)
    return first, tl.where(enough < COUNT, _pivot(low, high, enough, COUNT), high)


@triton.jit
@no_type_check
def _pivot(low, high, p, COUNT: tl.constexpr):
    return tl.where(p == 0, low, tl.fma(high - low, p.to(tl.float32) * (1.0 / COUNT), low))
