"""Multiply rounded inputs with four- and eight-bit weights, on CPUs with AVX-512 and VNNI.

Inputs are rounded to sixteen bits with one step for each row, so that the sum over a group of 32 four-bit weights is a
whole number below 2²⁴, exact in float32; groups are then added in order, in float32, by fused multiplications. Weights
are read once for every 64 rows.
"""

import math
from typing import Any, Final

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from draftproof.core.simd import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    NUMBERS,
    REASSOCIATED,
    WORDS,
    Emit,
    compiled,
    emitted,
    floats,
    request_rows,
)
from draftproof.models.compiled.threads import (
    share,
    wait_for_others,
)

GROUP: Final = 32
"""Inputs that share a scale and a zero in four-bit weights."""


GROUP_BYTES: Final = 320
"""Bytes of a group for sixteen outputs: 256 of codes, then 32 of scales and 32 of zeros in bfloat16."""


LONGEST_RUN: Final = 512
"""Inputs of eight-bit weights that can be summed as whole numbers below 2³¹."""


LEVELS: Final = 32767
"""The largest rounded input."""


PAIRS: Final = ir.VectorType(I16, 2 * LANES)


ROWS_OF_OWN: Final = 8
"""Rows up to which every thread rounds all inputs for itself: that takes less time than waiting for the others."""


ROWS_IN_CACHE: Final = 64
"""Rows that are multiplied with all weights before others are: their inputs stay in the second-level cache."""


class _Emit(Emit):
    """Write the instructions of products with rounded inputs."""

    def dot(self, total: Any, codes: Any, inputs: Any) -> Any:
        """Add the products of pairs of sixteen-bit numbers to 32-bit sums."""
        return self.call("llvm.x86.avx512.vpdpwssd.512", WORDS, total, codes, inputs)

    def widened(self, halves: Any) -> Any:
        """Return sixteen bfloat16 as float32."""
        wide = self.builder.zext(halves, WORDS)
        return self.builder.bitcast(self.builder.shl(wide, self.constant(16)), NUMBERS)


def int4_tile(rows: int, blocks: int = 2) -> Any:
    """Return a compiled (weights, inputs, sums, groups, out, input_stride, sum_stride, out_stride) -> None.

    It multiplies `rows` rows with `blocks` · 16 rows of packed weights, and writes the products before their steps.
    Addresses and strides are in bytes; `sums` are the sums of each group's inputs, in 32-bit integers.
    """

    @emitted
    def tile(typingctx, weights, inputs, sums, groups, out, input_stride, sum_stride, out_stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 8), codegen

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, inputs, sums, groups, out, input_stride, sum_stride, out_stride = arguments
        emit, split = _Emit(builder), 2 if rows * blocks <= 4 else 1
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(NUMBERS, [0.0] * LANES)) for _ in range(rows)]
            for _ in range(blocks)
        ]
        for row in totals:
            for total in row:
                builder.store(ir.Constant(NUMBERS, [0.0] * LANES), total)
        block_bytes = builder.mul(groups, I64(GROUP_BYTES))
        with cgutils.for_range(builder, groups) as loop:
            here = builder.add(weights, builder.mul(loop.index, I64(GROUP_BYTES)))
            starts = [builder.add(here, builder.mul(block_bytes, I64(b))) for b in range(blocks)]
            x = [
                builder.add(
                    builder.add(inputs, builder.mul(input_stride, I64(m))), builder.mul(loop.index, I64(2 * GROUP))
                )
                for m in range(rows)
            ]
            summed = [
                emit.all_lanes(
                    emit.load(I32, sums, builder.add(builder.mul(sum_stride, I64(m)), builder.mul(loop.index, I64(4))))
                )
                for m in range(rows)
            ]
            # The next tile's weights. Without that the processor waits for memory in each tile, and with two to four
            # rows, whose tiles take longer, for longer.
            for start in starts:
                for line in range(0, GROUP_BYTES, 64):
                    emit.request(builder.add(start, builder.mul(block_bytes, I64(blocks))), line)
            # The weight is scale · (code - 8) + zero: starting at -8 · sum subtracts the 8 without an instruction.
            first = [builder.mul(total, emit.constant(-8)) for total in summed]
            parts = [
                [[first[m] if s == 0 else emit.constant(0) for s in range(split)] for m in range(rows)]
                for _ in range(blocks)
            ]
            for quarter in range(4):
                codes = [emit.load(WORDS, start, 64 * quarter, 64) for start in starts]
                for j in range(4):
                    words = [
                        builder.and_(builder.lshr(code, emit.constant(4 * j)) if j else code, emit.constant(0x000F000F))
                        for code in codes
                    ]
                    for m in range(rows):
                        pair = emit.all_lanes(emit.load(I32, x[m], 16 * quarter + 4 * j))
                        for b in range(blocks):
                            parts[b][m][j % split] = emit.dot(parts[b][m][j % split], words[b], pair)
            for b, start in enumerate(starts):
                scale = emit.widened(emit.load(ir.VectorType(I16, LANES), start, 256, 32))
                zero = emit.widened(emit.load(ir.VectorType(I16, LANES), start, 288, 32))
                for m in range(rows):
                    whole = parts[b][m][0]
                    for part in parts[b][m][1:]:
                        whole = builder.add(whole, part)
                    total = builder.load(totals[b][m])
                    total = emit.fused(scale, builder.sitofp(whole, NUMBERS), total)
                    total = emit.fused(zero, builder.sitofp(summed[m], NUMBERS), total)
                    builder.store(total, totals[b][m])
        for b in range(blocks):
            for m in range(rows):
                place = builder.add(builder.mul(out_stride, I64(m)), I64(4 * LANES * b))
                emit.store(builder.load(totals[b][m]), out, place)
        return context.get_dummy_value()

    return tile


def int8_tile(rows: int, blocks: int = 2) -> Any:
    """Return the like of `int4_tile` for eight-bit weights: (weights, inputs, runs, run_pairs, out, strides) -> None.

    A block is 16 outputs: for each pair of inputs, 32 bytes. Runs of inputs are summed as whole numbers.
    """

    @emitted
    def tile(typingctx, weights, inputs, runs, run_pairs, out, block_stride, input_stride, out_stride):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 8), codegen

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, inputs, runs, run_pairs, out, block_stride, input_stride, out_stride = arguments
        emit = _Emit(builder)
        zeros = ir.Constant(NUMBERS, [0.0] * LANES)
        totals = [[cgutils.alloca_once(builder, NUMBERS) for _ in range(rows)] for _ in range(blocks)]
        wholes = [[cgutils.alloca_once(builder, WORDS) for _ in range(rows)] for _ in range(blocks)]
        for row in totals:
            for total in row:
                builder.store(zeros, total)
        with cgutils.for_range(builder, runs) as run:
            for row in wholes:
                for whole in row:
                    builder.store(emit.constant(0), whole)
            with cgutils.for_range(builder, builder.udiv(run_pairs, I64(4))) as loop:
                at = builder.add(builder.mul(run.index, run_pairs), builder.mul(loop.index, I64(4)))
                for b in range(blocks):
                    place = builder.add(weights, builder.mul(block_stride, I64(blocks + b)))
                    place = builder.add(place, builder.mul(at, I64(2 * LANES)))
                    emit.request(place)
                    emit.request(place, 64)
                for step in range(4):
                    pair = builder.add(at, I64(step))
                    codes = [
                        builder.bitcast(
                            builder.sext(
                                emit.load(
                                    ir.VectorType(ir.IntType(8), 2 * LANES),
                                    weights,
                                    builder.add(builder.mul(block_stride, I64(b)), builder.mul(pair, I64(2 * LANES))),
                                    32,
                                ),
                                PAIRS,
                            ),
                            WORDS,
                        )
                        for b in range(blocks)
                    ]
                    for m in range(rows):
                        place = builder.add(builder.mul(input_stride, I64(m)), builder.mul(pair, I64(4)))
                        x = emit.all_lanes(emit.load(I32, inputs, place))
                        for b in range(blocks):
                            builder.store(emit.dot(builder.load(wholes[b][m]), codes[b], x), wholes[b][m])
            for b in range(blocks):
                for m in range(rows):
                    part = builder.sitofp(builder.load(wholes[b][m]), NUMBERS)
                    builder.store(builder.fadd(builder.load(totals[b][m]), part), totals[b][m])
        for b in range(blocks):
            for m in range(rows):
                place = builder.add(builder.mul(out_stride, I64(m)), I64(4 * LANES * b))
                emit.store(builder.load(totals[b][m]), out, place)
        return context.get_dummy_value()

    return tile


int4_1, int4_2, int4_3, int4_4 = (int4_tile(rows) for rows in (1, 2, 3, 4))


int8_1, int8_2, int8_3, int8_4 = (int8_tile(rows) for rows in (1, 2, 3, 4))


@compiled(fastmath=REASSOCIATED)
def scaled_by_rms(x: Any, weight: Any, out: Any, size: Any, eps: Any) -> None:
    """Write x · weight over the root mean square of x."""
    total = numba.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    factor = numba.float32(1 / math.sqrt(total / numba.float32(size) + eps))
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@emitted
def largest_of(typingctx, x, size):  # type: ignore[no-untyped-def]
    """Return the largest absolute value of a row whose size is a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, size = arguments
        emit = _Emit(builder)
        found = cgutils.alloca_once(builder, NUMBERS)
        builder.store(emit.number(0.0), found)
        with cgutils.for_range(builder, builder.udiv(size, I64(LANES))) as loop:
            x = emit.load(NUMBERS, address, builder.mul(loop.index, I64(4 * LANES)))
            x = emit.call("llvm.fabs.v16f32", NUMBERS, x)
            builder.store(emit.call("llvm.maxnum.v16f32", NUMBERS, builder.load(found), x), found)
        return emit.call("llvm.vector.reduce.fmax.v16f32", F32, builder.load(found))

    return types.float32(types.int64, types.int64), codegen


@emitted
def write_rounded(typingctx, x, factor, out, sums, size):  # type: ignore[no-untyped-def]
    """Write x · factor rounded to sixteen bits, and the sum of each group of 32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, factor, out, sums, size = arguments
        emit = _Emit(builder)
        factors = emit.all_lanes(factor)
        with cgutils.for_range(builder, builder.udiv(size, I64(GROUP))) as loop:
            total = emit.constant(0)
            for half in (0, LANES):
                first = builder.add(builder.mul(loop.index, I64(GROUP)), I64(half))
                x = emit.load(NUMBERS, address, builder.mul(first, I64(4)))
                whole = builder.fptosi(emit.nearest(builder.fmul(x, factors)), WORDS)
                emit.store(builder.trunc(whole, ir.VectorType(I16, LANES)), out, builder.mul(first, I64(2)), 2)
                total = builder.add(total, whole)
            total = emit.call("llvm.vector.reduce.add.v16i32", I32, total)
            emit.store(total, sums, builder.mul(loop.index, I64(4)))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64, types.int64), codegen


@compiled()
def round_inputs(x: Any, out: Any, sums: Any, size: Any) -> Any:
    """Write a row rounded to sixteen bits, and the sum of each group of 32; return the step."""
    largest = max(largest_of(x, size), numba.float32(1e-30))
    write_rounded(x, numba.float32(LEVELS) / largest, out, sums, size)
    return largest / numba.float32(LEVELS)


@emitted
def write_gated(typingctx, gate_and_up, step, out):  # type: ignore[no-untyped-def]
    """Write silu(gate) · up of sixteen outputs, from their products before the step."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, step, out = arguments
        emit = _Emit(builder)
        steps = emit.all_lanes(step)
        gate, up = (builder.fmul(emit.load(NUMBERS, address, 4 * LANES * i), steps) for i in range(2))
        below = builder.fadd(emit.exponential(builder.fneg(gate)), emit.number(1.0))
        emit.store(builder.fmul(builder.fdiv(gate, below), up), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@compiled()
def int4_pair(weights: Any, inputs: Any, sums: Any, size: Any, rows: Any, out: Any, out_stride: Any) -> None:
    """Multiply all rows with 32 rows of packed weights; the weights stay in the first-level cache."""
    groups, stride, sum_stride, done = size // 32, 2 * size, size // 8, 0
    while rows - done >= 4:
        int4_4(weights, inputs + done * stride, sums + done * sum_stride, groups, out + done * out_stride,
               stride, sum_stride, out_stride)  # fmt: skip
        done += 4
    x, s, o = inputs + done * stride, sums + done * sum_stride, out + done * out_stride
    if rows - done == 3:
        int4_3(weights, x, s, groups, o, stride, sum_stride, out_stride)
    elif rows - done == 2:
        int4_2(weights, x, s, groups, o, stride, sum_stride, out_stride)
    elif rows - done == 1:
        int4_1(weights, x, s, groups, o, stride, sum_stride, out_stride)


@compiled()
def int8_pair(weights: Any, inputs: Any, size: Any, runs: Any, rows: Any, out: Any, out_stride: Any) -> None:
    """Multiply all rows with 32 rows of eight-bit weights."""
    pairs, stride, block, done = size // runs // 2, 2 * size, 16 * size, 0
    while rows - done >= 4:
        int8_4(weights, inputs + done * stride, runs, pairs, out + done * out_stride, block, stride, out_stride)
        done += 4
    x, o = inputs + done * stride, out + done * out_stride
    if rows - done == 3:
        int8_3(weights, x, runs, pairs, o, block, stride, out_stride)
    elif rows - done == 2:
        int8_2(weights, x, runs, pairs, o, block, stride, out_stride)
    elif rows - done == 1:
        int8_1(weights, x, runs, pairs, o, block, stride, out_stride)


@compiled()
def rounded_rows(
    x: Any, norm: Any, buffers: Any, rows: Any, size: Any, eps: Any, gate: Any, thread: Any, threads: Any
) -> Any:
    """Norm (if `norm` is not 0) and round rows of inputs; return the addresses of codes, sums and steps.

    Few rows are rounded by each thread in buffers of its own; many are divided.
    """
    codes_bytes, sums_bytes = (rows * size * 2 + 63) // 64 * 64, (rows * (size // 32) * 4 + 63) // 64 * 64
    steps_bytes = (rows * 4 + 63) // 64 * 64
    place = buffers
    first, last = 0, rows
    scratch = buffers + threads * (codes_bytes + sums_bytes + steps_bytes) + thread * size * 4
    if rows <= ROWS_OF_OWN:
        place += thread * (codes_bytes + sums_bytes + steps_bytes)
    else:
        first, last = share(rows, thread, threads)
    sums, steps = place + codes_bytes, place + codes_bytes + sums_bytes
    for row in range(first, last):
        source = x + row * size * 4
        if norm != 0:
            scaled_by_rms(floats(source), floats(norm), floats(scratch), size, eps)
            source = scratch
        floats(steps)[row] = round_inputs(source, place + row * size * 2, sums + row * (size // 32) * 4, size)
    if rows > ROWS_OF_OWN:
        wait_for_others(gate, threads)
    return place, sums, steps


@compiled(inline="always")
def pair_bytes(scales: Any, size: Any) -> Any:
    """Return the bytes of the weights of 32 outputs."""
    return 2 * (size // 32) * GROUP_BYTES if scales == 0 else 32 * size


@compiled()
def request_share(weights: Any, scales: Any, size: Any, outputs: Any, thread: Any, threads: Any) -> None:
    """Have the first weights of this thread's share of a product read ahead from memory."""
    first, _ = share(outputs // 32, thread, threads)
    request_rows(weights + first * pair_bytes(scales, size), 0, 1, pair_bytes(scales, size))


@compiled()
def runs_of(size: Any) -> Any:
    """Return into how many runs the inputs of eight-bit weights are divided: equal ones of eights, none too long."""
    runs = types.int64(1)
    while size % (8 * runs) != 0 or size // runs > LONGEST_RUN:
        runs += 1
    return runs


@compiled(fastmath={"contract"})
def pair_product(
    weights: Any, scales: Any, pair: Any, inputs: Any, sums: Any, size: Any, rows: Any, tile: Any
) -> None:  # fmt: skip
    """Multiply rows with the weights of the 32 outputs of a pair: before the steps of the rows."""
    weights += pair * pair_bytes(scales, size)
    if scales == 0:
        int4_pair(weights, inputs, sums, size, rows, tile, 128)
        return
    int8_pair(weights, inputs, size, runs_of(size), rows, tile, 128)
    made, scale = floats(tile), floats(scales + pair * 128)
    for row in range(rows):
        for i in range(32):
            made[row * 32 + i] *= scale[i]


@compiled(fastmath={"contract"})
def add_product(
    weights: Any, scales: Any, inputs: Any, sums: Any, steps: Any, size: Any, rows: Any, outputs: Any, into: Any,
    adds: Any, tile: Any, thread: Any, threads: Any,
) -> None:  # fmt: skip
    """Write this thread's share of a product, or add it to what is there.

    Weights have eight bits, and `scales` is the address of a scale for each output; if it is 0, they have four.
    """
    first, last = share(outputs // 32, thread, threads)
    for start in range(0, rows, ROWS_IN_CACHE):
        codes, totals, count = (
            inputs + start * size * 2,
            sums + start * (size // 32) * 4,
            min(ROWS_IN_CACHE, rows - start),
        )
        for pair in range(first, last):
            pair_product(weights, scales, pair, codes, totals, size, count, tile)
            made = floats(tile)
            for row in range(count):
                out, step = floats(into + ((start + row) * outputs + pair * 32) * 4), floats(steps)[start + row]
                if adds:
                    for i in range(32):
                        out[i] += step * made[row * 32 + i]
                else:
                    for i in range(32):
                        out[i] = step * made[row * 32 + i]


@compiled(fastmath={"contract"})
def gated_product(
    weights: Any, scales: Any, inputs: Any, sums: Any, steps: Any, size: Any, rows: Any, outputs: Any, into: Any,
    tile: Any, thread: Any, threads: Any,
) -> None:  # fmt: skip
    """Write this thread's share of silu(gate) · up; weights alternate sixteen rows of each, and so do scales."""
    first, last = share(outputs // 16, thread, threads)
    for start in range(0, rows, ROWS_IN_CACHE):
        codes, totals, count = (
            inputs + start * size * 2,
            sums + start * (size // 32) * 4,
            min(ROWS_IN_CACHE, rows - start),
        )
        for pair in range(first, last):
            pair_product(weights, scales, pair, codes, totals, size, count, tile)
            for row in range(start, start + count):
                write_gated(tile + (row - start) * 128, floats(steps)[row], into + (row * outputs + pair * 16) * 4)
