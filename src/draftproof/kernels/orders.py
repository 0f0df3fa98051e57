"""float32 numbers as whole numbers in the same order: what a search by bisection walks on."""

from typing import no_type_check

import triton
import triton.language as tl


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
