"""Powers on the device, as the reference takes them: of 2, with a slope rounded to float32 (`law.powers`)."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.core.law import LOG2_E as _LOG2_E

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(_LOG2_E)
LN_2 = tl.constexpr(1 / _LOG2_E)
FAR = tl.constexpr(-1e30)  # stands for −inf, whose product has no rounding to make up for


@triton.jit
@no_type_check
def slope_of(scale):
    """Twin: `slope` in `law.powers`."""
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
