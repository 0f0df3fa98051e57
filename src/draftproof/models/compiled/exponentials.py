"""Take exponentials of a row of scores in vectors: its largest score, and the weights that sum to its total."""

from typing import Any

from numba import types
from numba.core import cgutils

from draftproof.core.simd import F32, I32, I64, LANES, NUMBERS, Emit, emitted


@emitted
def peak_of(typingctx, x, size):  # type: ignore[no-untyped-def]
    """Return the largest value of a row whose size is a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, size = arguments
        emit = Emit(builder)
        found = cgutils.alloca_once(builder, NUMBERS)
        builder.store(emit.number(-3e38), found)
        with cgutils.for_range(builder, builder.udiv(size, I64(LANES))) as loop:
            x = emit.load(NUMBERS, address, builder.mul(loop.index, I64(4 * LANES)))
            builder.store(emit.call("llvm.maxnum.v16f32", NUMBERS, builder.load(found), x), found)
        return emit.call("llvm.vector.reduce.fmax.v16f32", F32, builder.load(found))

    return types.float32(types.int64, types.int64), codegen


@emitted
def write_exponentials(typingctx, x, peak, scale, out, size):  # type: ignore[no-untyped-def]
    """Write e to the ((x - peak) · scale) of a row whose size is a multiple of 16; return the sum."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, peak, scale, out, size = arguments
        emit = Emit(builder)
        peaks, scales = emit.all_lanes(peak), emit.all_lanes(scale)
        total = cgutils.alloca_once(builder, NUMBERS)
        builder.store(emit.number(0.0), total)
        with cgutils.for_range(builder, builder.udiv(size, I64(LANES))) as loop:
            place = builder.mul(loop.index, I64(4 * LANES))
            x = builder.fsub(emit.load(NUMBERS, address, place), peaks)
            weight = emit.exponential(builder.fmul(x, scales))
            emit.store(weight, out, place)
            builder.store(builder.fadd(builder.load(total), weight), total)
        # In a fixed order: half to half, as registers are added.
        lanes = builder.load(total)
        sums = [builder.extract_element(lanes, I32(i)) for i in range(LANES)]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [builder.fadd(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        return sums[0]

    signature = types.float32(types.int64, types.float32, types.float32, types.int64, types.int64)
    return signature, codegen
