"""Sums of many float32 numbers as sums of whole ones: no order of additions matters, and they take one step where those
of float64 numbers take ten.

What is summed is first turned into grains of 2⁻⁴⁰ to 2⁻³⁹ of the largest sum there can be: in units of 2¹⁸ grains, and
what is left of each in grains. A power of 2 makes them, so that nothing is rounded but to a whole grain.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

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
