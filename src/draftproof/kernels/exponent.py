"""Exponentials on the device that are as near to the reference's as float32 allows, whatever the argument."""

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_HIGH = tl.constexpr(1.44269502162933349609375)  # LOG2_E in float32
LOG2_E_LOW = tl.constexpr(1.925963033500011e-08)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(-1e30)  # stands for −inf, which times a small number of the wrong sign would be +inf


@triton.jit
@no_type_check
def rate(scale):
    """scale · log₂ e as two float32 numbers: one alone would be a temperature off by 6e-8, the same way for all.

    The second is never 0 and never negative: −inf times it stays −inf.
    """
    exact = scale.to(tl.float32).to(tl.float64) * LOG2_E
    high = (exact * (1 - 2.0**-23)).to(tl.float32)
    return high, (exact - high.to(tl.float64)).to(tl.float32)


@triton.jit
@no_type_check
def power(distance, high, low):
    """exp(scale · distance) for distances ≤ 0, (high, low) = rate(scale). What sums of many need: no bias."""
    return tl.exp2(tl.fma(distance, high, distance * low))


@triton.jit
@no_type_check
def exp(x):
    """exp, right to 2e-7: the hardware's exp2, made up for the rounding of its argument."""
    x = tl.maximum(x, FAR, propagate_nan=tl.PropagateNan.ALL)
    high = x * LOG2_E_HIGH
    low = tl.fma(x, LOG2_E_HIGH, -high) + x * LOG2_E_LOW
    near = tl.exp2(high)
    return tl.where(near > 0, tl.fma(near, low * LN_2, near), near)
