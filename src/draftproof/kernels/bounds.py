"""Where a cutoff can be, as far as the largest logit and the mass of every slice tell."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.layout import SLICE
from draftproof.kernels.orders import key, value

STEPS = tl.constexpr(16)  # of bisection: a bound need not be tight
SLACK = tl.constexpr(1e-5)  # a bound must hold in spite of rounding


@triton.jit
@no_type_check
def bound_count(m, peak, k):
    """A number that at least k logits reach: the largest of k slices each do. −inf where there are fewer slices."""
    least = _least(m, peak)
    bound = tl.zeros((), tl.float32) + float("-inf")
    if tl.sum((m >= least).to(tl.int32), 0) >= k:
        low, high = key(least).to(tl.int64), key(peak).to(tl.int64) + 1
        reached = tl.zeros((), tl.int32)
        while (high - low > 1) & ((reached < k) | (reached > k + k // 4)):
            middle = (low + high) // 2
            reached = tl.sum((m >= value(middle)).to(tl.int32), 0)
            low = tl.where(reached >= k, middle, low)
            high = tl.where(reached >= k, high, middle)
        bound = value(low)
    return bound


@triton.jit
@no_type_check
def bound_mass(m, mass, peak, scale, goal):
    """Numbers [low, high) between which the cutoff of a nucleus of mass `goal`, relative to the peak's, lies.

    A slice whose largest logit reaches v has at least that one's mass above v, and at least its whole mass less
    what the others can have below v; at most its whole mass. And all logits under v have at most the mass of so many
    v: as long as that is no more than what lies outside the nucleus, the cutoff is not under v.
    """
    top = tl.exp((m - peak) * scale)
    least = key(_least(m, peak)).to(tl.int64)
    low, high = least, key(peak).to(tl.int64) + 1
    for _ in range(STEPS):
        v = value((low + high) // 2)
        under = (SLICE - 1) * tl.exp((v - peak) * scale)
        enough = tl.sum(tl.where(m >= v, tl.maximum(top, mass - under), 0.0), 0) >= goal * (1 + SLACK)
        low, high = tl.where(enough, (low + high) // 2, low), tl.where(enough, high, (low + high) // 2)
    spare = tl.sum(mass, 0) * (1 - SLACK) - goal * (1 + SLACK)
    even = peak + tl.log(tl.maximum(spare, 0.0) / (SLICE * m.shape[0])) / scale
    bound = tl.maximum(even - SLACK / scale, tl.where(low == least, float("-inf"), value(low)))
    high = key(peak).to(tl.int64) + 1
    for _ in range(STEPS):
        v = value((low + high) // 2)
        enough = tl.sum(tl.where(m >= v, mass, 0.0), 0) >= goal * (1 - SLACK)
        low, high = tl.where(enough, (low + high) // 2, low), tl.where(enough, high, (low + high) // 2)
    return bound, value(high)


@triton.jit
@no_type_check
def _least(m, peak):
    return tl.min(tl.where(m > float("-inf"), m, peak), 0)
