"""Work that is done where it stands: before a wait, and not when it is needed."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import INTERPRETED


@triton.jit
@no_type_check
def at_once(x):
    """The same float64 numbers, worked out here: the compiler would put it off until they are needed."""
    if INTERPRETED:
        return x
    else:  # only one of the two is compiled
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=d,d", [x], tl.float64, is_pure=False, pack=1)
