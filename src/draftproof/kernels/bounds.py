"""Where a cutoff can be at least, as far as the largest logit and the mass of every slice tell."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.layout import SLICE
from draftproof.kernels.orders import key, value

STEPS = tl.constexpr(8)  # of bisection: a bound need not be tight
MOST_STEPS = tl.constexpr(20)  # where it would rather be
SLACK = tl.constexpr(1e-5)  # a bound must hold in spite of rounding


@triton.jit
@no_type_check
def bound_count(m, peak, k):
    """A number that at least k logits reach: the largest of k slices each do. −inf where there are fewer slices.

    A step costs one sum over all threads, and few are needed: it is enough if not many more than k slices reach it.
    """
    bound, high = _least(m, peak), peak
    reached = tl.sum((m >= bound).to(tl.int32), 0)
    enough = reached >= k
    n = 0
    while enough & (reached > k + k // 4) & (n < MOST_STEPS):
        middle = bound + (high - bound) * 0.5
        here = tl.sum((m >= middle).to(tl.int32), 0)
        bound, high = tl.where(here >= k, middle, bound), tl.where(here >= k, high, middle)
        reached = tl.where(here >= k, here, reached)
        n += 1
    return tl.where(enough, bound, float("-inf"))


@triton.jit
@no_type_check
def bound_mass(m, mass, peak, scale, goal):
    """A number that the cutoff of a nucleus of mass `goal`, relative to the peak's, does not lie under.

    A slice whose largest logit reaches v has at least that one's mass above v, and at least its whole mass less
    what the others can have below v. And all logits under v have at most the mass of so many v: as long as that is no
    more than what lies outside the nucleus, the cutoff is not under v.
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
    return tl.maximum(even - SLACK / scale, tl.where(low == least, float("-inf"), value(low)))


@triton.jit
@no_type_check
def _least(m, peak):
    return tl.min(tl.where(m > float("-inf"), m, peak), 0)
