"""Compile the passes of a Llama-like decoder for a CPU with AVX-512 and VNNI, without Python between products.

A pass is one parallel region of torch's own OpenMP threads. Each stage of a layer is divided among them, and every
number is computed by one thread in one order, so a row's bits depend neither on the number of threads nor on others.
Addresses are integers: stages read and write tensors that the caller keeps alive.

Products round their inputs to sixteen bits with one step for each row, so that the sum over a group of 32 four-bit
weights is a whole number below 2²⁴, exact in float32; groups are then added in order, in float32, by fused
multiplications. Weights are read once for any number of rows.

All of it is in one file because numba's cache on disk is that of the file's time and size.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, Final

import numba
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
"""Outputs of a register."""

GROUP: Final = 32
"""Inputs that share a scale and a zero in four-bit weights."""

GROUP_BYTES: Final = 320
"""Bytes of a group for sixteen outputs: 256 of codes, then 32 of scales and 32 of zeros in bfloat16."""

LONGEST_RUN: Final = 512
"""Inputs of eight-bit weights that can be summed as whole numbers below 2³¹."""

LEVELS: Final = 32767
"""The largest rounded input."""

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS, NUMBERS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
PAIRS: Final = ir.VectorType(I16, 2 * LANES)

PATIENCE: Final = 500
"""Looks at the gate before a thread gives way to others. A thread that only spins keeps the core that the thread it
waits for may need: with one other busy process on two cores, a pass took 140 times as long."""

ROWS_OF_OWN: Final = 8
"""Rows up to which every thread rounds all inputs for itself: that takes less time than waiting for the others."""

LAYER_FIELDS: Final = ("input_norm", "qkv", "out", "mlp_norm", "gate_up", "down", "keys", "values", "captured")
"""Addresses of a layer in a pass, in order; `captured` is where its states are copied to, or 0."""

LAYER_SIZE: Final = len(LAYER_FIELDS)

SPAN_FIELDS: Final = ("first_token", "width", "start", "before", "lineage", "common", "nodes")
"""Numbers of a span in a pass, in order. For a tree, `lineage` is the address of what each token sees of the `nodes`
slots after the first `common`; otherwise it is 0."""

SPAN_SIZE: Final = len(SPAN_FIELDS)

threads_now = types.ExternalFunction("omp_get_num_threads", types.int32())
thread_now = types.ExternalFunction("omp_get_thread_num", types.int32())
give_way = types.ExternalFunction("sched_yield", types.int32())

REASSOCIATED: Final = {"reassoc", "contract", "nsz"}
"""What LLVM may do to loops: sum in vectors, and fuse multiplications and additions. It does the same for any row."""


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function as it was written: type checkers may have wrapped it."""
    return lambda function: njit(inspect.unwrap(function), nogil=True, **options)


def emitted(function: Any) -> Any:
    """Make a function that writes instructions callable from compiled code."""
    return intrinsic(inspect.unwrap(function))


LOG2_E, LN_2_HIGH, LN_2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
"""log₂ e, and ln 2 in two parts, the first of which has few bits."""

EXPONENTIAL: Final = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0
)  # fmt: skip
"""Coefficients of a polynomial close to eˣ between -ln 2 / 2 and ln 2 / 2, the highest power first."""


class _Emit:
    """Write vector instructions at the end of a function that numba compiles."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, kind: Any, address: Any, offset: Any = 0, align: int = 4) -> Any:
        return self.builder.load(self.pointer(kind, address, offset), align=align)

    def store(self, value: Any, address: Any, offset: Any = 0, align: int = 4) -> None:
        self.builder.store(value, self.pointer(value.type, address, offset), align=align)

    def pointer(self, kind: Any, address: Any, offset: Any = 0) -> Any:
        offset = offset if isinstance(offset, ir.Value) else I64(offset)
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())

    def all_lanes(self, value: Any) -> Any:
        """Return a vector with this value in every lane."""
        kind = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        order = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), order)

    def constant(self, value: int) -> Any:
        return ir.Constant(WORDS, [value] * LANES)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def dot(self, total: Any, codes: Any, inputs: Any) -> Any:
        """Add the products of pairs of sixteen-bit numbers to 32-bit sums."""
        return self.call("llvm.x86.avx512.vpdpwssd.512", WORDS, total, codes, inputs)

    def fused(self, a: Any, b: Any, total: Any) -> Any:
        """Return a · b + total, rounded once."""
        return self.call("llvm.fma.v16f32", NUMBERS, a, b, total)

    def number(self, value: float) -> Any:
        return ir.Constant(NUMBERS, [value] * LANES)

    def nearest(self, values: Any) -> Any:
        """Round to the nearest whole numbers, ties to even."""
        return self.call("llvm.nearbyint.v16f32", NUMBERS, values)

    def exponential(self, x: Any) -> Any:
        """Return eˣ to a relative 2⁻²² or so, for x from -87 to 87 and clamped beyond; see `exponential`."""
        builder = self.builder
        x = self.call("llvm.maxnum.v16f32", NUMBERS, x, self.number(-87.0))
        x = self.call("llvm.minnum.v16f32", NUMBERS, x, self.number(87.0))
        whole = self.nearest(builder.fmul(x, self.number(LOG2_E)))
        rest = self.fused(whole, self.number(-LN_2_HIGH), x)
        rest = self.fused(whole, self.number(-LN_2_LOW), rest)
        result = self.number(EXPONENTIAL[0])
        for coefficient in EXPONENTIAL[1:]:
            result = self.fused(result, rest, self.number(coefficient))
        exponent = builder.shl(builder.add(builder.fptosi(whole, WORDS), self.constant(127)), self.constant(23))
        return builder.fmul(result, builder.bitcast(exponent, NUMBERS))

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


def _pointer_to(kind: Any) -> Any:
    @emitted
    def pointer(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


floats, doubles, shorts, words, longs, flags = (
    _pointer_to(kind) for kind in (types.float32, types.float64, types.int16, types.int32, types.int64, types.uint8)
)


@emitted
def nearest(typingctx, number):  # type: ignore[no-untyped-def]
    """Round a float32 to the nearest whole number, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        rounding = cgutils.get_or_insert_function(builder.module, kind, "llvm.nearbyint.f32")
        return builder.call(rounding, arguments)

    return types.float32(types.float32), codegen


@emitted
def power_of_two(typingctx, exponent):  # type: ignore[no-untyped-def]
    """Return 2 to a whole number from -127 to 127, written as the bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.shl(builder.add(builder.fptosi(arguments[0], word), word(127)), word(23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.float32), codegen


@compiled(inline="always")
def exponential(x: Any) -> Any:
    """Return eˣ to a relative 2⁻²² or so, clamped outside -87 to 87; loops over the polynomial are vectors."""
    x = min(max(x, numba.float32(-87.0)), numba.float32(87.0))
    whole = nearest(x * numba.float32(LOG2_E))
    rest = x - whole * numba.float32(LN_2_HIGH) - whole * numba.float32(LN_2_LOW)
    result = numba.float32(EXPONENTIAL[0])
    result = result * rest + numba.float32(EXPONENTIAL[1])
    result = result * rest + numba.float32(EXPONENTIAL[2])
    result = result * rest + numba.float32(EXPONENTIAL[3])
    result = result * rest + numba.float32(EXPONENTIAL[4])
    result = result * rest + numba.float32(EXPONENTIAL[5])
    result = result * rest + numba.float32(EXPONENTIAL[6])
    result = result * rest + numba.float32(EXPONENTIAL[7])
    return result * power_of_two(whole)


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


def weighted_sum(blocks: int) -> Any:
    """Return a compiled (weights, values, stride, count, factor, out) -> None over `blocks` · 16 columns of values."""

    @emitted
    def tile(typingctx, weights, values, stride, count, factor, out):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 4, types.float32, types.int64), codegen

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, values, stride, count, factor, out = arguments
        emit = _Emit(builder)
        totals = [cgutils.alloca_once(builder, NUMBERS) for _ in range(blocks)]
        for total in totals:
            builder.store(emit.number(0.0), total)
        with cgutils.for_range(builder, count) as loop:
            weight = emit.all_lanes(emit.load(F32, weights, builder.mul(loop.index, I64(4))))
            place = builder.mul(loop.index, stride)
            for b, total in enumerate(totals):
                value = emit.load(NUMBERS, values, builder.add(place, I64(4 * LANES * b)))
                builder.store(emit.fused(weight, value, builder.load(total)), total)
        factors = emit.all_lanes(factor)
        for b, total in enumerate(totals):
            emit.store(builder.fmul(builder.load(total), factors), out, 4 * LANES * b)
        return context.get_dummy_value()

    return tile


weighted_sum_64, weighted_sum_16 = weighted_sum(4), weighted_sum(1)

int4_1, int4_2, int4_3, int4_4 = (int4_tile(rows) for rows in (1, 2, 3, 4))
int8_1, int8_2, int8_3, int8_4 = (int8_tile(rows) for rows in (1, 2, 3, 4))


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


@emitted
def arrive(typingctx, gate):  # type: ignore[no-untyped-def]
    """Count one more thread at a gate; return how many had arrived before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], I64.as_pointer()), I64(1), "acq_rel")

    return types.int64(types.int64), codegen


@emitted
def arrived(typingctx, gate):  # type: ignore[no-untyped-def]
    """Return how many threads have arrived at a gate, and wait a moment."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _Emit(builder).call("llvm.x86.sse2.pause", ir.VoidType())
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@compiled()
def wait_for_others(gate: Any, threads: Any) -> None:
    """Wait until all threads have arrived as often as this one."""
    wanted, looks = (arrive(gate) // threads + 1) * threads, 0
    while arrived(gate) < wanted:
        looks += 1
        if looks > PATIENCE:
            give_way()


@compiled(inline="always")
def share(count: Any, thread: Any, threads: Any) -> Any:
    """Return the first and the last-plus-one of `count` pieces of work that are this thread's."""
    return count * thread // threads, count * (thread + 1) // threads


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


@compiled(fastmath={"contract"})
def add_product(
    weights: Any, inputs: Any, sums: Any, steps: Any, size: Any, rows: Any, outputs: Any, into: Any, adds: Any,
    tile: Any, thread: Any, threads: Any,
) -> None:  # fmt: skip
    """Write this thread's share of a product, or add it to what is there."""
    first, last = share(outputs // 32, thread, threads)
    for pair in range(first, last):
        int4_pair(weights + pair * 2 * (size // 32) * GROUP_BYTES, inputs, sums, size, rows, tile, 128)
        made = floats(tile)
        for row in range(rows):
            out, step = floats(into + (row * outputs + pair * 32) * 4), floats(steps)[row]
            if adds:
                for i in range(32):
                    out[i] += step * made[row * 32 + i]
            else:
                for i in range(32):
                    out[i] = step * made[row * 32 + i]


@compiled(fastmath={"contract"})
def gated_product(
    weights: Any, inputs: Any, sums: Any, steps: Any, size: Any, rows: Any, outputs: Any, into: Any, tile: Any,
    thread: Any, threads: Any,
) -> None:  # fmt: skip
    """Write this thread's share of silu(gate) · up; weights alternate sixteen rows of each."""
    first, last = share(outputs // 16, thread, threads)
    for pair in range(first, last):
        int4_pair(weights + pair * 2 * (size // 32) * GROUP_BYTES, inputs, sums, size, rows, tile, 128)
        for row in range(rows):
            write_gated(tile + row * 128, floats(steps)[row], into + (row * outputs + pair * 16) * 4)


@compiled(fastmath={"contract"})
def rotate(x: Any, out: Any, cosines: Any, sines: Any, half: Any) -> None:
    """Rotate pairs half a head apart."""
    for i in range(half):
        first, second = x[i], x[half + i]
        out[i] = first * cosines[i] - second * sines[i]
        out[half + i] = second * cosines[i] + first * sines[i]


@compiled(fastmath=REASSOCIATED)
def dot(a: Any, b: Any, size: Any) -> Any:
    total = numba.float32(0)
    for i in range(size):
        total += a[i] * b[i]
    return total


@compiled(fastmath=REASSOCIATED)
def softmax(scores: Any, count: Any, scale: Any) -> Any:
    """Write e to (score · scale - the largest); return the inverse of the sum."""
    largest = numba.float32(-3e38)
    for i in range(count):
        largest = max(largest, scores[i])
    total = numba.float32(0)
    for i in range(count):
        scores[i] = exponential((scores[i] - largest) * scale)
        total += scores[i]
    return numba.float32(1) / total


@compiled(fastmath={"contract"})
def attend(
    query: Any, keys: Any, values: Any, token: Any, span: Any, index: Any, head_dim: Any, scale: Any, room: Any,
    out: Any,
) -> None:  # fmt: skip
    """Write what one head of one token attends to; `token` is the bytes of a slot, `room` is for its scores."""
    scores = floats(room)
    before, lineage, common, nodes = span[3], span[4], span[5], span[6]
    count = before + index + 1 if lineage == 0 else common + nodes
    for slot in range(count):
        scores[slot] = dot(query, floats(keys + slot * token), head_dim)
    if lineage != 0:
        seen = flags(lineage + index * nodes)
        for i in range(nodes):
            if not seen[i]:
                scores[common + i] = numba.float32(-3e38)
    inverse = softmax(scores, count, scale)
    done = 0
    while head_dim - done >= 64:
        weighted_sum_64(room, values + done * 4, token, count, inverse, out + done * 4)
        done += 64
    while done < head_dim:
        weighted_sum_16(room, values + done * 4, token, count, inverse, out + done * 4)
        done += 16


PASS_FIELDS: Final = (
    "rows", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "layers", "spans", "layer_table", "span_table",
    "states", "positions", "cosines", "sines", "buffers", "projected", "attended", "gated", "scratch", "scratch_bytes",
    "settings", "final_norm", "normed", "head", "head_scales", "vocabulary", "wanted", "wanted_rows", "logits", "runs",
    "inputs", "input_width", "table", "table_bytes", "tokens", "embedding_norm", "state_norm", "gate",
)  # fmt: skip
"""Numbers and addresses of a pass, in order. `settings` are the address of the epsilon and the scale of attention;
`cosines` and `sines` have a row for each position. `head` is the matrix of the output layer, or 0: `runs` are the parts
into which the inputs of eight-bit weights are divided; 0 says that weights have four bits. In a draft head, the first
layer's `inputs` are the normed embeddings of `tokens` (rows of `table`, in float32 or bfloat16) beside the normed
states; otherwise they are states, and `table` is 0. `gate` is a counter that begins with 0."""

(ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, SPANS, LAYER_TABLE, SPAN_TABLE, STATES, POSITIONS,
 COSINES, SINES, BUFFERS, PROJECTED, ATTENDED, GATED, SCRATCH, SCRATCH_BYTES, SETTINGS, FINAL_NORM, NORMED, HEAD,
 HEAD_SCALES, VOCABULARY, WANTED, WANTED_ROWS, LOGITS, RUNS, INPUTS, INPUT_WIDTH, TABLE, TABLE_BYTES, TOKENS,
 EMBEDDING_NORM, STATE_NORM, GATE) = range(len(PASS_FIELDS))  # fmt: skip

CHAIN_FIELDS: Final = (
    "fusing", "reading", "stepping", "taps", "tap_table", "tap_norms", "tap_inputs", "fuse_weights", "fused", "last",
    "depths", "chooses", "ids", "scales", "uniforms", "weights", "entries", "sums", "paths", "lengths", "confidence",
)  # fmt: skip
"""Numbers and addresses of a call, in order. A call that is no draft head's has only `reading`.

fusing    whether the pass `reading` begins with states of the target that are to be fused
reading   the pass; a draft head's is over the target's new states, and may be missing
taps      how many states of the target are fused for `reading`, at the addresses in `tap_table`, with norms at those
          in `tap_norms`; the result is kept in `fused`
stepping  the pass over one drafted token a row; it begins with the states of `reading` at the rows `last`
depths    tokens to draft. If `chooses` is 0, only the logits after the states of `stepping` are computed
ids       the target's token of each entry of the draft vocabulary
scales    one over each row's temperature, in float64; 0: the likeliest token is chosen
uniforms  two random numbers for each token and row
entries   the entries that were drafted, and `sums` their distributions' log-sum-exp: for each token and row
paths     the logarithm of the probability of each row's path; below `confidence` the row ends
lengths   tokens that each row is to get at most, and gets"""

(FUSING, READING, STEPPING, TAPS, TAP_TABLE, TAP_NORMS, TAP_INPUTS, FUSE_WEIGHTS, FUSED, LAST, DEPTHS, CHOOSES, IDS,
 SCALES, UNIFORMS, WEIGHTS, ENTRIES, SUMS, PATHS, LENGTHS, CONFIDENCE) = range(len(CHAIN_FIELDS))  # fmt: skip

CHUNK: Final = 512
"""Tokens in a chunk of a draw: that of core/draw.py, which says why it must not be another."""


@compiled()
def write_keys_and_values(this: Any, layer: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of the pass's keys, rotated, and values to their slots."""
    size, heads, shared = this[HEAD_DIM], this[HEADS], this[KV_HEADS]
    wide = (heads + 2 * shared) * size * 4
    for s in range(this[SPANS]):
        span = longs(this[SPAN_TABLE] + s * SPAN_SIZE * 8)
        first, last = share(span[1] * shared, thread, threads)
        for item in range(first, last):
            index, head = item // shared, item % shared
            token, slot = span[0] + index, span[2] + span[3] + index
            source = this[PROJECTED] + token * wide + (heads + head) * size * 4
            place = (slot * shared + head) * size * 4
            angle = longs(this[POSITIONS])[token] * size // 2 * 4
            rotate(floats(source), floats(layer[6] + place), floats(this[COSINES] + angle),
                   floats(this[SINES] + angle), size // 2)  # fmt: skip
            kept, value = floats(layer[7] + place), floats(source + shared * size * 4)
            for i in range(size):
                kept[i] = value[i]


@compiled()
def attend_all(this: Any, layer: Any, thread: Any, threads: Any) -> None:
    """Attend with this thread's share of the pass's heads and tokens."""
    size, heads, shared = this[HEAD_DIM], this[HEADS], this[KV_HEADS]
    wide, token_bytes = (heads + 2 * shared) * size * 4, shared * size * 4
    query = this[SCRATCH] + thread * this[SCRATCH_BYTES]
    scores = query + size * 4
    scale = floats(this[SETTINGS])[1]
    for s in range(this[SPANS]):
        span = longs(this[SPAN_TABLE] + s * SPAN_SIZE * 8)
        first, last = share(span[1] * heads, thread, threads)
        for item in range(first, last):
            head, index = item // span[1], item % span[1]
            token, shared_head = span[0] + index, head // (heads // shared)
            angle = longs(this[POSITIONS])[token] * size // 2 * 4
            rotate(floats(this[PROJECTED] + token * wide + head * size * 4), floats(query),
                   floats(this[COSINES] + angle), floats(this[SINES] + angle), size // 2)  # fmt: skip
            start = (span[2] * shared + shared_head) * size * 4
            attend(floats(query), layer[6] + start, layer[7] + start, token_bytes, span, index, size, scale, scores,
                   this[ATTENDED] + (token * heads + head) * size * 4)  # fmt: skip


@compiled()
def run_layer(this: Any, layer: Any, inputs: Any, width: Any, thread: Any, threads: Any) -> None:
    """Run a layer: `inputs` are normed if the layer has a norm; states are the residual stream."""
    rows, hidden, size, eps = this[ROWS], this[HIDDEN], this[HEAD_DIM], floats(this[SETTINGS])[0]
    outputs, states = (this[HEADS] + 2 * this[KV_HEADS]) * size, this[STATES]
    tile = this[SCRATCH] + thread * this[SCRATCH_BYTES]
    codes, sums, steps = rounded_rows(inputs, layer[0], this[BUFFERS], rows, width, eps, this[GATE], thread, threads)
    add_product(layer[1], codes, sums, steps, width, rows, outputs, this[PROJECTED], False, tile, thread, threads)
    wait_for_others(this[GATE], threads)
    write_keys_and_values(this, layer, thread, threads)
    wait_for_others(this[GATE], threads)
    attend_all(this, layer, thread, threads)
    wait_for_others(this[GATE], threads)
    width = this[HEADS] * size
    codes, sums, steps = rounded_rows(this[ATTENDED], 0, this[BUFFERS], rows, width, eps, this[GATE], thread, threads)
    add_product(layer[2], codes, sums, steps, width, rows, hidden, states, True, tile, thread, threads)
    wait_for_others(this[GATE], threads)
    codes, sums, steps = rounded_rows(states, layer[3], this[BUFFERS], rows, hidden, eps, this[GATE], thread, threads)
    width = this[INTERMEDIATE]
    gated_product(layer[4], codes, sums, steps, hidden, rows, width, this[GATED], tile, thread, threads)
    wait_for_others(this[GATE], threads)
    codes, sums, steps = rounded_rows(this[GATED], 0, this[BUFFERS], rows, width, eps, this[GATE], thread, threads)
    add_product(layer[5], codes, sums, steps, width, rows, hidden, states, True, tile, thread, threads)
    wait_for_others(this[GATE], threads)


@compiled()
def copy_rows(source: Any, target: Any, count: Any, thread: Any, threads: Any) -> None:
    first, last = share(count, thread, threads)
    here, there = floats(source), floats(target)
    for i in range(first, last):
        there[i] = here[i]


@compiled(fastmath={"contract"})
def write_int8_product(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of a product with eight-bit weights."""
    rows, hidden, outputs = this[WANTED_ROWS], this[HIDDEN], this[VOCABULARY]
    tile, scales = this[SCRATCH] + thread * this[SCRATCH_BYTES], floats(this[HEAD_SCALES])
    codes, _, steps = rounded_rows(
        this[WANTED], 0, this[BUFFERS], rows, hidden, numba.float32(0), this[GATE], thread, threads
    )
    first, last = share(outputs // 32, thread, threads)
    for pair in range(first, last):
        int8_pair(this[HEAD] + pair * 32 * hidden, codes, hidden, this[RUNS], rows, tile, 128)
        made = floats(tile)
        for row in range(rows):
            out, step = floats(this[LOGITS] + (row * outputs + pair * 32) * 4), floats(steps)[row]
            for i in range(32):
                out[i] = step * made[row * 32 + i] * scales[pair * 32 + i]


@compiled()
def write_int4_product(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of a product with four-bit weights."""
    rows, hidden = this[WANTED_ROWS], this[HIDDEN]
    tile = this[SCRATCH] + thread * this[SCRATCH_BYTES]
    codes, sums, steps = rounded_rows(
        this[WANTED], 0, this[BUFFERS], rows, hidden, numba.float32(0), this[GATE], thread, threads
    )
    add_product(this[HEAD], codes, sums, steps, hidden, rows, this[VOCABULARY], this[LOGITS], False, tile, thread,
                threads)  # fmt: skip


@compiled()
def embed(this: Any, token: Any, target: Any) -> None:
    """Write the embedding of a token, in float32."""
    hidden, out = this[HIDDEN], words(target)
    if this[TABLE_BYTES] == 2:  # the bits of a bfloat16 are the first half of a float32's
        halves = shorts(this[TABLE] + token * hidden * 2)
        for i in range(hidden):
            out[i] = types.int32(halves[i]) << 16
    else:
        whole = words(this[TABLE] + token * hidden * 4)
        for i in range(hidden):
            out[i] = whole[i]


@compiled()
def join_inputs(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of a draft head's inputs."""
    hidden, eps = this[HIDDEN], floats(this[SETTINGS])[0]
    first, last = share(this[ROWS], thread, threads)
    for row in range(first, last):
        place = this[INPUTS] + row * 2 * hidden * 4
        state = floats(this[STATES] + row * hidden * 4)
        embed(this, longs(this[TOKENS])[row], place)
        scaled_by_rms(floats(place), floats(this[EMBEDDING_NORM]), floats(place), hidden, eps)
        scaled_by_rms(state, floats(this[STATE_NORM]), floats(place + hidden * 4), hidden, eps)
    wait_for_others(this[GATE], threads)


@compiled()
def run_layers(this: Any, thread: Any, threads: Any) -> None:
    """Run the layers of a pass."""
    if this[TABLE] != 0:
        join_inputs(this, thread, threads)
    for index in range(this[LAYERS]):
        layer = longs(this[LAYER_TABLE] + index * LAYER_SIZE * 8)
        run_layer(this, layer, this[INPUTS], this[INPUT_WIDTH], thread, threads)
        if layer[8] != 0:
            copy_rows(this[STATES], layer[8], this[ROWS] * this[HIDDEN], thread, threads)


@compiled()
def norm_states(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of the final norm, and wait for the others."""
    hidden = this[HIDDEN]
    first, last = share(this[ROWS], thread, threads)
    for row in range(first, last):
        scaled_by_rms(floats(this[STATES] + row * hidden * 4), floats(this[FINAL_NORM]),
                      floats(this[NORMED] + row * hidden * 4), hidden, floats(this[SETTINGS])[0])  # fmt: skip
    wait_for_others(this[GATE], threads)


@compiled()
def write_product(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of the product of the wanted rows with one matrix."""
    if this[RUNS] == 0:
        write_int4_product(this, thread, threads)
    else:
        write_int8_product(this, thread, threads)


@compiled()
def run_pass(this: Any, thread: Any, threads: Any) -> None:
    """Run the layers of a pass, the final norm, and the output layer, as far as it has them."""
    run_layers(this, thread, threads)
    if this[FINAL_NORM] != 0:
        norm_states(this, thread, threads)
    if this[HEAD] != 0:
        write_product(this, thread, threads)


@compiled()
def fuse_states(chain: Any, this: Any, thread: Any, threads: Any) -> None:
    """Combine the target's states after each tap into the states of a pass."""
    rows, hidden, taps, eps = this[ROWS], this[HIDDEN], chain[TAPS], floats(this[SETTINGS])[0]
    tile, wide = this[SCRATCH] + thread * this[SCRATCH_BYTES], taps * hidden
    first, last = share(rows, thread, threads)
    for row in range(first, last):
        for tap in range(taps):
            source = longs(chain[TAP_TABLE])[tap] + row * hidden * 4
            scaled_by_rms(floats(source), floats(longs(chain[TAP_NORMS])[tap]),
                          floats(chain[TAP_INPUTS] + (row * taps + tap) * hidden * 4), hidden, eps)  # fmt: skip
    wait_for_others(this[GATE], threads)
    codes, sums, steps = rounded_rows(chain[TAP_INPUTS], 0, this[BUFFERS], rows, wide, eps, this[GATE], thread, threads)
    add_product(chain[FUSE_WEIGHTS], codes, sums, steps, wide, rows, hidden, chain[FUSED], False, tile, thread,
                threads)  # fmt: skip
    wait_for_others(this[GATE], threads)
    copy_rows(chain[FUSED], this[STATES], rows * hidden, thread, threads)
    wait_for_others(this[GATE], threads)


@emitted
def peak_of(typingctx, x, size):  # type: ignore[no-untyped-def]
    """Return the largest value of a row whose size is a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, size = arguments
        emit = _Emit(builder)
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
        emit = _Emit(builder)
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


@compiled()
def first_index(x: Any, value: Any, size: Any) -> Any:
    """Return the first index of a value; the last index if there is none (NaN)."""
    index = 0
    while index < size - 1 and x[index] != value:
        index += 1
    return index


@compiled()
def inverted(weights: Any, count: Any, uniform: Any) -> Any:
    """Return the first index whose running sum exceeds uniform · total; see core/draw.invert."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    wanted, running, found = uniform * total, 0.0, 0
    for i in range(count):
        running += weights[i]
        if weights[i] > 0:
            found = i
            if running > wanted:
                break
    return found


@compiled()
def choose_entry(x: Any, weights: Any, size: Any, scale: Any, first: Any, second: Any) -> Any:
    """Draw an entry from the softmax of scale · x, or take the first largest if scale is 0.

    Return it, the log-sum-exp of its distribution, and its log-probability. A greedy row's are those of scale 1: how
    sure a drafter is. The draw is that of core/draw.pick.
    """
    greedy, peak = scale == 0, peak_of(x, size)
    scale = 1.0 if greedy else scale
    chunks, total = -(-size // CHUNK), 0.0
    sums = weights + size * 4
    for chunk in range(chunks):
        place, count = chunk * CHUNK * 4, min(CHUNK, size - chunk * CHUNK)
        made = write_exponentials(x + place, peak, numba.float32(scale), weights + place, count)
        floats(sums)[chunk] = made
        total += made
    if greedy:
        entry = first_index(floats(x), peak, size)
    else:
        chunk = inverted(floats(sums), chunks, first)
        begin = chunk * CHUNK
        entry = begin + inverted(floats(weights + begin * 4), min(CHUNK, size - begin), second)
    sum_log = scale * peak + math.log(total)
    return entry, sum_log, scale * floats(x)[entry] - sum_log


@compiled()
def choose_tokens(chain: Any, this: Any, depth: Any, thread: Any, threads: Any) -> None:
    """Draft one token in this thread's share of the rows, and move them one slot on."""
    rows, size = this[ROWS], this[VOCABULARY]
    first, last = share(rows, thread, threads)
    for row in range(first, last):
        place = depth * rows + row
        uniforms = doubles(chain[UNIFORMS] + place * 16)
        entry, total, log_prob = choose_entry(
            this[LOGITS] + row * size * 4, chain[WEIGHTS] + row * (size + size // 16) * 4, size,
            doubles(chain[SCALES])[row], uniforms[0], uniforms[1],
        )  # fmt: skip
        longs(chain[ENTRIES])[place], doubles(chain[SUMS])[place] = entry, total
        doubles(chain[PATHS])[row] += log_prob
        longs(this[TOKENS])[row] = longs(chain[IDS])[entry]
        longs(this[POSITIONS])[row] += depth > 0  # the first step's are given
        longs(this[SPAN_TABLE] + row * SPAN_SIZE * 8)[3] += depth > 0
        lengths = longs(chain[LENGTHS])
        if not math.isfinite(total):
            lengths[row] = min(lengths[row], depth)
        elif math.exp(doubles(chain[PATHS])[row]) < doubles(chain[CONFIDENCE])[0]:
            lengths[row] = min(lengths[row], depth + 1)


@compiled()
def has_more(chain: Any, rows: Any, depth: Any) -> Any:
    """Return whether some row is to get more than `depth` tokens."""
    longest = types.int64(0)
    for row in range(rows):
        longest = max(longest, longs(chain[LENGTHS])[row])
    return longest > depth


@compiled()
def take_last_states(chain: Any, reading: Any, this: Any, thread: Any, threads: Any) -> None:
    """Begin each row's draft with the state after its last token."""
    hidden = this[HIDDEN]
    for row in range(this[ROWS]):
        source = reading[STATES] + longs(chain[LAST])[row] * hidden * 4
        copy_rows(source, this[STATES] + row * hidden * 4, hidden, thread, threads)
    wait_for_others(this[GATE], threads)


@compiled()
def work(chain: Any) -> None:
    """Run a pass; for a draft head, fuse the target's new states before it, and draft tokens after it."""
    thread, threads = types.int64(thread_now()), types.int64(threads_now())
    this, reading = longs(chain[STEPPING]), longs(chain[READING])
    if chain[FUSING] != 0:
        fuse_states(chain, reading, thread, threads)
    if chain[READING] != 0:
        run_pass(reading, thread, threads)
    if chain[STEPPING] == 0:
        return
    if chain[READING] != 0:
        take_last_states(chain, reading, this, thread, threads)
    logits = this[LOGITS]
    for depth in range(chain[DEPTHS]):
        if depth > 0:
            run_layers(this, thread, threads)
        norm_states(this, thread, threads)
        write_product(this, thread, threads)
        wait_for_others(this[GATE], threads)
        if chain[CHOOSES] == 0:
            return
        choose_tokens(chain, this, depth, thread, threads)
        wait_for_others(this[GATE], threads)
        if not has_more(chain, this[ROWS], depth + 1):
            return
        if thread == 0:  # read again after the barriers of the layers
            this[LOGITS] = logits + (depth + 1) * this[ROWS] * this[VOCABULARY] * 4


@emitted
def address_of(typingctx, pointer):  # type: ignore[no-untyped-def]
    """Return a pointer as an integer."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(types.voidptr), codegen


def _region(data: Any) -> None:
    work(longs(address_of(data)))


# One for all kinds of work: each would have a copy of the products of its own, and take as long to compile.
region: Final = cfunc(types.void(types.voidptr), cache=True)(inspect.unwrap(_region))
"""The body of a parallel region, which reads the numbers of CHAIN_FIELDS; the machine code is kept on disk."""
