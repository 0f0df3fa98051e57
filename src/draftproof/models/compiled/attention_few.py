"""Attend with one query at a time in compiled loops: a key's numbers are the lanes of vectors.

Scores of sixteen keys are summed side by side and added over the lanes at once, because a sum over lanes by itself
takes longer than the products before it. Many queries that share keys are attended to in attention.py.
"""

from typing import Any, Final

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from draftproof.core.simd import (
    F32,
    I32,
    I64,
    LANES,
    NUMBERS,
    REASSOCIATED,
    Emit,
    compiled,
    emitted,
    floats,
)
from draftproof.models.compiled.exponentials import peak_of, write_exponentials

NEVER: Final = numba.float32(-3e38)
"""The score of a key that is not attended to."""

TOGETHER: Final = 4
"""Values that are added to sums of their own: a sum waits four cycles for the one before it."""


class _Emit(Emit):
    """Write the instructions of sums over lanes, and of parts of vectors."""

    def load_first(self, count: Any, address: Any, offset: Any) -> Any:
        """Return a vector of the first `count` numbers at an address, and zeros."""
        place, mask = self.pointer(NUMBERS, address, offset), self._first(count)
        return self.call("llvm.masked.load.v16f32.p0v16f32", NUMBERS, place, I32(4), mask, self.number(0.0))

    def store_first(self, count: Any, values: Any, address: Any) -> None:
        """Write the first `count` numbers of a vector."""
        place, mask = self.pointer(NUMBERS, address), self._first(count)
        self.call("llvm.masked.store.v16f32.p0v16f32", ir.VoidType(), values, place, I32(4), mask)

    def _first(self, count: Any) -> Any:
        lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
        return self.builder.icmp_signed("<", lanes, self.all_lanes(self.builder.trunc(count, I32)))

    def sums_of_lanes(self, vectors: list[Any]) -> Any:
        """Return a vector of the sums over the lanes of sixteen vectors.

        Each step adds halves of what is left of two vectors, which then share one.
        """
        width = LANES
        while len(vectors) > 1:
            half, step = len(vectors) // 2, width // 2
            starts = range(0, LANES, width)
            lower = [s + i + LANES * second for s in starts for second in (0, 1) for i in range(step)]
            upper = [lane + step for lane in lower]
            vectors = [
                self.builder.fadd(self._shuffled(a, b, lower), self._shuffled(a, b, upper))
                for a, b in zip(vectors[:half], vectors[half:], strict=True)
            ]
            width = step
        return vectors[0]

    def _shuffled(self, a: Any, b: Any, order: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, LANES), order))


@emitted
def score_sixteen(typingctx, query, keys, step, size, out):  # type: ignore[no-untyped-def]
    """Write the products of a query with sixteen keys, `step` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        query, keys, step, size, out = arguments
        emit = _Emit(builder)
        sums = [emit.variable(emit.number(0.0)) for _ in range(LANES)]
        starts = [builder.add(keys, builder.mul(step, I64(key))) for key in range(LANES)]

        def add_products(load: Any, place: Any) -> None:
            numbers = load(query, place)
            for total, start in zip(sums, starts, strict=True):
                builder.store(emit.fused(numbers, load(start, place), builder.load(total)), total)

        whole = builder.udiv(size, I64(LANES))
        with cgutils.for_range(builder, whole) as loop:
            add_products(lambda address, at: emit.load(NUMBERS, address, at), builder.mul(loop.index, I64(4 * LANES)))
        rest = builder.urem(size, I64(LANES))
        with builder.if_then(builder.icmp_unsigned("!=", rest, I64(0))):
            add_products(lambda address, at: emit.load_first(rest, address, at), builder.mul(whole, I64(4 * LANES)))
        emit.store(emit.sums_of_lanes([builder.load(total) for total in sums]), out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@compiled(fastmath=REASSOCIATED)
def score_one(query: Any, key: Any, size: Any) -> Any:
    """Return the product of a query with a key."""
    total = numba.float32(0)
    for i in range(size):
        total += query[i] * key[i]
    return total


@compiled()
def score(query: Any, keys: Any, step: Any, count: Any, size: Any, scores: Any) -> None:
    """Write the products of a query with `count` keys, `step` bytes apart."""
    if count < LANES:
        for slot in range(count):
            floats(scores)[slot] = score_one(floats(query), floats(keys + slot * step), size)
        return
    for slot in range(0, count - LANES + 1, LANES):
        score_sixteen(query, keys + slot * step, step, size, scores + slot * 4)
    last = count - LANES  # the last sixteen, of which some may be written again: the same numbers
    score_sixteen(query, keys + last * step, step, size, scores + last * 4)


@compiled()
def softmax(scores: Any, count: Any, scale: Any) -> Any:
    """Write e to the (score - the largest) · scale; return the inverse of the sum.

    The room for scores must be a multiple of sixteen; what fills it up adds nothing to a float32 of at least 1.
    """
    padded = (count + LANES - 1) // LANES * LANES
    for i in range(count, padded):
        floats(scores)[i] = NEVER
    total = write_exponentials(scores, peak_of(scores, padded), scale, scores, padded)
    return numba.float32(1) / total


def columns(blocks: int, *, partial: bool = False) -> Any:
    """Return a compiled (weights, values, step, count, factor, size, out) -> None over `blocks` vectors of columns.

    If `partial`, they are the first `size` columns of one vector.
    """

    @emitted
    def tile(typingctx, weights, values, step, count, factor, size, out):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 4, types.float32, *[types.int64] * 2), codegen

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, values, step, count, factor, size, out = arguments
        emit = _Emit(builder)
        sums = [[emit.variable(emit.number(0.0)) for _ in range(blocks)] for _ in range(TOGETHER)]

        def add_value(row: list[Any], slot: Any) -> None:
            weight = emit.all_lanes(emit.load(F32, weights, builder.mul(slot, I64(4))))
            for b, total in enumerate(row):
                place = builder.add(builder.mul(slot, step), I64(4 * LANES * b))
                value = emit.load_first(size, values, place) if partial else emit.load(NUMBERS, values, place)
                builder.store(emit.fused(weight, value, builder.load(total)), total)

        whole = builder.udiv(count, I64(TOGETHER))
        with cgutils.for_range(builder, whole) as loop:
            for i, row in enumerate(sums):
                add_value(row, builder.add(builder.mul(loop.index, I64(TOGETHER)), I64(i)))
        first = builder.mul(whole, I64(TOGETHER))
        with cgutils.for_range(builder, builder.sub(count, first)) as loop:
            add_value(sums[0], builder.add(first, loop.index))
        factors = emit.all_lanes(factor)
        for b in range(blocks):
            each = [builder.load(row[b]) for row in sums]
            while len(each) > 1:
                half = len(each) // 2
                each = [builder.fadd(x, y) for x, y in zip(each[:half], each[half:], strict=True)]
            made = builder.fmul(each[0], factors)
            if partial:
                emit.store_first(size, made, out)
            else:
                emit.store(made, out, 4 * LANES * b)
        return context.get_dummy_value()

    return tile


four_vectors, one_vector, part_of_a_vector = columns(4), columns(1), columns(1, partial=True)


@compiled()
def weighted_sum(weights: Any, values: Any, step: Any, count: Any, factor: Any, size: Any, out: Any) -> None:
    """Write `factor` times the sum of `count` values by their weights; values are `step` bytes apart."""
    done = 0
    while size - done >= 4 * LANES:
        four_vectors(weights, values + done * 4, step, count, factor, 0, out + done * 4)
        done += 4 * LANES
    while size - done >= LANES:
        one_vector(weights, values + done * 4, step, count, factor, 0, out + done * 4)
        done += LANES
    if done < size:
        part_of_a_vector(weights, values + done * 4, step, count, factor, size - done, out + done * 4)
