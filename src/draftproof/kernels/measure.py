"""How much of a row reaches a number: counts or masses of its logits, by a sample or by a pass over its slices."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.cutoff import answer, ask
from draftproof.kernels.exponent import near_exp2, slope_of
from draftproof.kernels.orders import key, value

SAMPLE = tl.constexpr(32)  # slices
STEPS = tl.constexpr(18)  # of bisection in a sample
FAR = tl.constexpr(60.0)  # exponents under the peak: what lies further down is rarely looked for


@triton.jit
@no_type_check
def weights(x, place, by_mass):
    """What counts of logits x: their masses relative to the peak's, or that they are."""
    slope = slope_of(place.scale)
    offset = place.peak * slope
    made_up = tl.exp2(tl.fma(-place.peak, slope, offset))  # for the rounding of the offset
    return tl.where(by_mass, near_exp2(tl.fma(x, slope, -offset)) * made_up, tl.where(x > float("-inf"), 1.0, 0.0))


@triton.jit
@no_type_check
def bottom_of(place, low):
    """A number to look from: `low`, or what has no mass to speak of."""
    return tl.maximum(low, place.peak - FAR / place.scale.to(tl.float32))


@triton.jit
@no_type_check
def sampled(batch, req, place, low, goal, by_mass, total):
    """Where the goal would be if all slices were like SAMPLE of them.

    Of masses those below are summed: what lies above is in few logits, which a sample may miss.
    """
    every = tl.maximum(place.count.to(tl.float32) / SAMPLE, 1.0)
    which, raw = ask(batch, req, place, (tl.arange(0, SAMPLE) * every).to(tl.int32))
    x = answer(batch, req, place, which, raw)
    w = weights(x, place, by_mass)
    first, last = key(bottom_of(place, low)).to(tl.int64), key(place.peak).to(tl.int64) + 1
    for _ in range(STEPS):
        middle = (first + last) // 2
        counted = tl.where((x >= value(middle)) == by_mass, 0.0, w)
        part = tl.sum(tl.sum(tl.sum(counted, 2), 1), 0) * every
        enough = tl.where(by_mass, total - part, part.to(tl.float64)) >= goal
        first, last = tl.where(enough, middle, first), tl.where(enough, last, middle)
    return value(first)


@triton.jit
@no_type_check
def measured(batch, req, place, borders, by_mass, LINES: tl.constexpr):
    """How much, float64, reaches each of `borders` [P]. One pass over the slices of a place, LINES at a time.

    Each thread adds up its own logits, and only the last sums cross from thread to thread.
    """
    WIDTH: tl.constexpr = batch.traits.SEGMENT
    sums = tl.zeros([borders.shape[0], LINES, WIDTH], tl.float32)
    lines = tl.arange(0, LINES)
    which, raw = ask(batch, req, place, lines)
    for n in range(0, place.count, LINES):
        ahead = ask(batch, req, place, n + LINES + lines)
        x = answer(batch, req, place, which, raw)
        w = weights(x, place, by_mass)
        sums += tl.sum(tl.where(x[None] >= borders[:, None, None, None], w[None], 0.0), 3)
        which, raw = ahead
    return tl.sum(tl.sum(sums.to(tl.float64), 2), 1)
