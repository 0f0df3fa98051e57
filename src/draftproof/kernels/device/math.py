"""Provide exponentials, order-preserving keys and order-independent sums for the kernels.

Sums of many float32 numbers are taken in integers: the order of additions does not matter, and an integer reduction
takes one instruction where a float64 reduction takes ten. Each summand is converted to grains of 2⁻⁴⁰ to 2⁻³⁹ of the
largest possible sum: a count of units of 2¹⁸ grains, and the remainder in grains. The scale is a power of 2, so the
only rounding is to a whole grain.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.core.distribution import LOG2_E as _LOG2_E

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(_LOG2_E)
LN_2 = tl.constexpr(1 / _LOG2_E)
FAR = tl.constexpr(-1e30)  # replaces −inf, for which the correction would be NaN


@triton.jit
@no_type_check
def slope_of(scale):
    """Return scale · log2(e) as float32. Reference: `slope` in core.distribution.powers."""
    return (scale * LOG2_E).to(tl.float32)


@triton.jit
@no_type_check
def power(distance, slope):
    """Return exp(scale · distance) with relative error 2e-7 at any distance.

    Uses exp2 and corrects for the rounding of its argument.
    """
    d = tl.maximum(distance, FAR, propagate_nan=tl.PropagateNan.ALL)
    high = d * slope
    near = tl.exp2(high)
    return tl.where(near > 0, tl.fma(near, tl.fma(d, slope, -high) * LN_2, near), near)


@triton.jit
@no_type_check
def fast_exp2(x):
    """Return 2^x, flushing subnormal results to 0.

    One instruction; handling subnormals would take four.
    """
    if INTERPRETED:
        return tl.exp2(x)
    else:  # only one of the two is compiled
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
@no_type_check
def key(x):
    """Return an int32 key that orders like the float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
@no_type_check
def value(k):
    """Return the float32 number that has key k; the inverse of `key`."""
    k = k.to(tl.int32)
    return tl.where(k < 0, k ^ 0x7FFFFFFF, k).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def force_eval(x):
    """Force evaluation of float64 x here.

    Otherwise the compiler sinks this work below the grid-dependency wait.
    """
    if INTERPRETED:
        return x
    else:  # only one of the two is compiled
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=d,d", [x], tl.float64, is_pure=False, pack=1)


UNITS = tl.constexpr(2.0**22)  # at most this many units in the largest sum, and at least half of it
GRAINS = tl.constexpr(18)  # log2 of the grains in a unit
WHOLE = tl.constexpr(1.5 * 2.0**23)  # adding a float32 number to this rounds it to an integer
WHOLE_BITS = tl.constexpr(0x4B400000)
EXPONENT = tl.constexpr(0x7F800000)  # the exponent bits: the only ones set in a float32 power of 2
INVERSE = tl.constexpr(254 << 23)  # sum of the exponent bits of a power of 2 and of its inverse


class Sums(NamedTuple):
    """Partial sums held by each thread: units, and grains, which may be negative."""

    units: Any
    grains: Any


@triton.jit
@no_type_check
def zero_sums(P: tl.constexpr, N: tl.constexpr):
    """Return empty sums of shape [P, N]."""
    return Sums(units=tl.zeros([P, N], tl.int32), grains=tl.zeros([P, N], tl.int32))


@triton.jit
@no_type_check
def add_to(sums, x, most):
    """Return the sums with x added; x is float32 and not negative.

    `most` is an upper bound of every total.
    """
    unit = _bits_of_unit(most).to(tl.float32, bitcast=True)
    units = tl.fma(x, unit, WHOLE)
    grains = tl.fma(tl.fma(x, unit, -(units - WHOLE)), 2.0**GRAINS, WHOLE)
    return Sums(
        units=sums.units + (units.to(tl.int32, bitcast=True) - WHOLE_BITS),
        grains=sums.grains + (grains.to(tl.int32, bitcast=True) - WHOLE_BITS),
    )


@triton.jit
@no_type_check
def in_grains(sums):
    """Return the totals over all threads [P], in grains, int64."""
    units = tl.sum(sums.units + (sums.grains >> GRAINS), 1)
    # each thread holds less than a unit here, so that the sum fits into 32 bits
    grains = tl.sum(sums.grains & (2**GRAINS - 1), 1)
    return (units.to(tl.int64) << GRAINS) + grains


@triton.jit
@no_type_check
def grain_of(most):
    """Return the value of one grain, float64."""
    return (-_bits_of_unit(most) + INVERSE).to(tl.float32, bitcast=True).to(tl.float64) * 2.0**-GRAINS


@triton.jit
@no_type_check
def _bits_of_unit(most):
    """Return, as float32 bits, the power of 2 that is the number of units in 1."""
    return (tl.full((), UNITS, tl.float32) / most.to(tl.float32)).to(tl.int32, bitcast=True) & EXPONENT
