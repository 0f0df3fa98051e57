"""Sums of many float32 numbers as sums of whole ones: no order of additions matters, and they take one step where those
of float64 numbers take ten.

What is summed is first turned into grains of 2⁻⁴⁰ to 2⁻³⁹ of the largest sum there can be: in units of 2¹⁸ grains, and
what is left of each in grains. A power of 2 makes them, so that nothing is rounded but to a whole grain.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.core.distribution import LOG2_E as _LOG2_E

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(_LOG2_E)
LN_2 = tl.constexpr(1 / _LOG2_E)
FAR = tl.constexpr(-1e30)  # stands for −inf, whose product has no rounding to make up for


@triton.jit
@no_type_check
def slope_of(scale):
    """Twin: `slope` in `distribution.powers`."""
    return (scale * LOG2_E).to(tl.float32)


@triton.jit
@no_type_check
def power(distance, slope):
    """exp(scale · distance), right to 2e-7 whatever the distance: exp2, made up for the rounding of its argument."""
    d = tl.maximum(distance, FAR, propagate_nan=tl.PropagateNan.ALL)
    high = d * slope
    near = tl.exp2(high)
    return tl.where(near > 0, tl.fma(near, tl.fma(d, slope, -high) * LN_2, near), near)


@triton.jit
@no_type_check
def near_exp2(x):
    """2^x, and 0 where that is no normal number: one instruction, where care for the others would take four."""
    if INTERPRETED:
        return tl.exp2(x)
    else:  # only one of the two is compiled
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
@no_type_check
def key(x):
    """int32, larger for larger x."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
@no_type_check
def value(k):
    """The number of this key."""
    k = k.to(tl.int32)
    return tl.where(k < 0, k ^ 0x7FFFFFFF, k).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def at_once(x):
    """The same float64 numbers, worked out here: the compiler would put it off until they are needed."""
    if INTERPRETED:
        return x
    else:  # only one of the two is compiled
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=d,d", [x], tl.float64, is_pure=False, pack=1)


UNITS = tl.constexpr(2.0**22)  # that the largest sum has at most, and half as many at least
GRAINS = tl.constexpr(18)  # of a unit, log2
WHOLE = tl.constexpr(1.5 * 2.0**23)  # a float32 number that is added to it is rounded to a whole one
WHOLE_BITS = tl.constexpr(0x4B400000)
EXPONENT = tl.constexpr(0x7F800000)  # all that a power of 2 has of a float32's bits
INVERSE = tl.constexpr(254 << 23)  # these of a power of 2 and of its inverse, added up


class Sums(NamedTuple):
    """Each thread's own: units, and grains, which may be less than none."""

    units: Any
    grains: Any


@triton.jit
@no_type_check
def no_sums(P: tl.constexpr, N: tl.constexpr):
    return Sums(units=tl.zeros([P, N], tl.int32), grains=tl.zeros([P, N], tl.int32))


@triton.jit
@no_type_check
def add_to(sums, x, most):
    """The sums with x added, float32 numbers that are not negative; no sum of all is ever more than `most`."""
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
    """All threads' together [P], in grains, int64."""
    units = tl.sum(sums.units + (sums.grains >> GRAINS), 1)
    grains = tl.sum(
        sums.grains & (2**GRAINS - 1), 1
    )  # of each thread less than a unit: all of them find room in 32 bits
    return (units.to(tl.int64) << GRAINS) + grains


@triton.jit
@no_type_check
def grain_of(most):
    """What a grain is worth, float64."""
    return (-_bits_of_unit(most) + INVERSE).to(tl.float32, bitcast=True).to(tl.float64) * 2.0**-GRAINS


@triton.jit
@no_type_check
def _bits_of_unit(most):
    """A power of 2: that many units of 1."""
    return (tl.full((), UNITS, tl.float32) / most.to(tl.float32)).to(tl.int32, bitcast=True) & EXPONENT
