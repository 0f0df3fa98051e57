"""Attend with many queries at once in compiled loops: queries are the lanes of vectors, keys come in blocks.

For few queries a score is a sum over a vector; for many, the queries of a row that share keys (several tokens, several
heads) are laid out side by side, so that a key's number is multiplied with sixteen queries in one instruction and no
sum goes over lanes. Softmax is computed as the blocks come (Milakov and Gimelshein 2018; FlashAttention).

A query's numbers are computed in one order that depends on its own position alone: keys that it may not attend to add
exactly nothing, so its bits depend neither on the tokens read together with it nor on how threads share the work.
"""

from typing import Any, Final

from numba import types
from numba.core import cgutils

from draftproof.core.simd import (
    F32,
    I32,
    I64,
    LANES,
    NUMBERS,
    WORDS,
    Emit,
    compiled,
    emitted,
    floats,
    request_rows,
    words,
)

FEWEST: Final = 17
"""Queries that share keys from which on it pays to make them lanes: more than one vector has. Fewer are attended to one
by one (attention_few.py)."""

KEYS: Final = 64
"""Keys of a block; blocks begin at multiples of it, counted from a row's first token."""

AHEAD: Final = 3
"""Blocks that are read ahead from memory. A head's rows lie apart, which the processor does not foresee: after 4000
tokens a chunk's attention took 1.15 times as long without."""

MOST_VECTORS: Final = 3
"""Vectors of queries that share one pass over the keys: with eight keys, 24 sums in registers, of 32 there are."""

TALL: Final = 8
"""Keys, or numbers of a value, whose products are summed in registers at a time."""

NEVER: Final = -3.0e38
"""The score of a key that a query may not attend to, and the largest score before the first key."""


def product(tall: int, vectors: int) -> Any:
    """Return a compiled (a, a_step, k_step, count, b, b_step, c, c_step, adds) -> None.

    c[i] is a vector of sums over k of the number a[i, k] times the vector b[k], for `tall` i; added to what c has, if
    `adds`. Steps are in bytes.
    """

    @emitted
    def tile(typingctx, a, a_step, k_step, count, b, b_step, c, c_step, adds):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 9), codegen

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, a_step, k_step, count, b, b_step, c, c_step, adds = arguments
        emit = Emit(builder)
        places = [
            [builder.add(builder.mul(c_step, I64(i)), I64(4 * LANES * v)) for v in range(vectors)] for i in range(tall)
        ]
        sums = [[emit.variable(emit.number(0.0)) for _ in range(vectors)] for _ in range(tall)]
        with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
            for i in range(tall):
                for v in range(vectors):
                    builder.store(emit.load(NUMBERS, c, places[i][v]), sums[i][v])
        with cgutils.for_range(builder, count) as loop:
            row = builder.add(b, builder.mul(loop.index, b_step))
            lanes = [emit.load(NUMBERS, row, 4 * LANES * v) for v in range(vectors)]
            column = builder.add(a, builder.mul(loop.index, k_step))
            for i in range(tall):
                number = emit.all_lanes(emit.load(F32, column, builder.mul(a_step, I64(i))))
                for v in range(vectors):
                    builder.store(emit.fused(number, lanes[v], builder.load(sums[i][v])), sums[i][v])
        for i in range(tall):
            for v in range(vectors):
                emit.store(builder.load(sums[i][v]), c, places[i][v])
        return context.get_dummy_value()

    return tile


tall_1, tall_2, tall_3 = (product(TALL, vectors) for vectors in (1, 2, 3))
single_1, single_2, single_3 = (product(1, vectors) for vectors in (1, 2, 3))


@compiled()
def products(vectors: Any, rows: Any, a: Any, a_step: Any, k_step: Any, count: Any, b: Any, c: Any, adds: Any) -> None:
    """Write the products of `rows` rows of numbers with vectors; see `product`."""
    step = vectors * LANES * 4
    whole = rows // TALL * TALL
    for i in range(0, whole, TALL):
        if vectors == 3:
            tall_3(a + i * a_step, a_step, k_step, count, b, step, c + i * step, step, adds)
        elif vectors == 2:
            tall_2(a + i * a_step, a_step, k_step, count, b, step, c + i * step, step, adds)
        else:
            tall_1(a + i * a_step, a_step, k_step, count, b, step, c + i * step, step, adds)
    for i in range(whole, rows):
        if vectors == 3:
            single_3(a + i * a_step, a_step, k_step, count, b, step, c + i * step, step, adds)
        elif vectors == 2:
            single_2(a + i * a_step, a_step, k_step, count, b, step, c + i * step, step, adds)
        else:
            single_1(a + i * a_step, a_step, k_step, count, b, step, c + i * step, step, adds)


@emitted
def soften(typingctx, scores, step, count, first, queries):  # type: ignore[no-untyped-def]
    """Make a block's scores of one vector of queries into weights, and note how earlier sums must be scaled.

    first    position of the block's first key
    queries  address of vectors: the first position that a query attends to, the first that it does not, the largest
             score so far, the sum of the weights so far, and the factor for all that was summed before
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, step, count, first, queries = arguments
        emit = Emit(builder)
        low, high = emit.load(WORDS, queries), emit.load(WORDS, queries, 64)
        before, total = emit.load(NUMBERS, queries, 128), emit.load(NUMBERS, queries, 192)
        peak, added, never = emit.variable(before), emit.variable(emit.number(0.0)), emit.number(NEVER)
        with cgutils.for_range(builder, count) as loop:
            place = builder.mul(loop.index, step)
            key = emit.all_lanes(builder.trunc(builder.add(first, loop.index), I32))
            seen = builder.and_(builder.icmp_signed(">=", key, low), builder.icmp_signed("<", key, high))
            score = builder.select(seen, emit.load(NUMBERS, scores, place), never)
            emit.store(score, scores, place)
            builder.store(emit.larger(builder.load(peak), score), peak)
        largest = builder.load(peak)
        with cgutils.for_range(builder, count) as loop:
            place = builder.mul(loop.index, step)
            score = emit.load(NUMBERS, scores, place)
            weight = emit.exponential(builder.fsub(score, largest))
            weight = builder.select(builder.fcmp_ordered("==", score, never), emit.number(0.0), weight)
            emit.store(weight, scores, place)
            builder.store(builder.fadd(builder.load(added), weight), added)
        factor = emit.exponential(builder.fsub(before, largest))
        emit.store(largest, queries, 128)
        emit.store(emit.fused(total, factor, builder.load(added)), queries, 192)
        emit.store(factor, queries, 256)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


QUERY_BYTES: Final = 5 * 4 * LANES
"""Bytes of what `soften` keeps for a vector of queries."""


@compiled()
def scale_sums(vectors: Any, sums: Any, size: Any, queries: Any) -> None:
    """Multiply all sums of values by the factors of their queries."""
    for v in range(vectors):
        factors = floats(queries + v * QUERY_BYTES + 256)
        for i in range(size):
            row = floats(sums + (i * vectors + v) * LANES * 4)
            for lane in range(LANES):
                row[lane] *= factors[lane]


@compiled()
def attend_block(
    vectors: Any, laid_out: Any, queries: Any, scores: Any, sums: Any, keys: Any, key_step: Any, values: Any,
    value_step: Any, key_size: Any, value_size: Any, block: Any, count: Any,
) -> None:  # fmt: skip
    """Add the values of a block of keys to the sums of some vectors of queries.

    laid_out  the queries, scaled: key_size rows of `vectors` vectors
    queries   what `soften` keeps; its sums of weights are what the sums of values must be divided by in the end
    scores    room for the block's scores
    keys      address of the row's key at position 0; `key_step` bytes further is the next one
    """
    products(vectors, count, keys + block * key_step, key_step, 4, key_size, laid_out, scores, 0)
    for v in range(vectors):
        soften(scores + v * LANES * 4, vectors * LANES * 4, count, block, queries + v * QUERY_BYTES)
    scale_sums(vectors, sums, value_size, queries)
    products(vectors, value_size, values + block * value_step, 4, value_step, count, scores, sums, 1)


@compiled()
def request_block(rows: Any, step: Any, size: Any, block: Any, high: Any) -> None:
    """Have the keys or values of a block read ahead from memory, up to position `high`."""
    request_rows(rows + block * step, step, min(KEYS, high - block), size * 4)


@compiled(inline="always")
def vectors_of(queries: Any) -> Any:
    """Return how many vectors so many queries take."""
    return (queries + LANES - 1) // LANES


@compiled()
def attend_span(
    begin: Any, end: Any, room: Any, query: Any, query_token: Any, query_head: Any, scale: Any, keys: Any,
    key_head: Any, key_step: Any, values: Any, value_head: Any, value_step: Any, out: Any, out_token: Any,
    out_head: Any, group: Any, width: Any, before: Any, window: Any, key_size: Any, value_size: Any,
) -> None:  # fmt: skip
    """Attend with the vectors from `begin` to `end` of a span's queries: those of its first shared head come first.

    room    scratch of this thread, see `scratch_bytes`
    query   address of the first token's first query; bytes from token to token, and from head to head, follow
    keys    address of the key at the row's position 0, in the first shared head
    group   query heads that share keys
    before  tokens of the row before the span
    window  positions that a token attends to at most, its own counted in; 0: all before it
    """
    each, at = vectors_of(group * width), begin
    while at < end:
        head, first = at // each, at % each
        vectors = min(each - first, end - at)
        queries = room
        laid_out = queries + vectors * QUERY_BYTES
        sums = laid_out + vectors * key_size * LANES * 4
        scores = sums + vectors * value_size * LANES * 4
        low, high = before + width, types.int64(0)
        for lane in range(vectors * LANES):
            row = first * LANES + lane
            start, stop = types.int64(0), types.int64(0)
            if row < group * width:
                stop = before + row % width + 1
                start = max(types.int64(0), stop - window) if window > 0 else types.int64(0)
                low, high = min(low, start), max(high, stop)
            begin_query(queries + lane // LANES * QUERY_BYTES, lane % LANES, start, stop)
            source = query + row % width * query_token + (head * group + min(row // width, group - 1)) * query_head
            lay_out(floats(source), scale, key_size, laid_out, lane, vectors)
        clear(floats(sums), vectors * value_size * LANES)
        # Blocks of keys in the outer loop: a block is read from memory once, for all queries.
        for block in range(low // KEYS * KEYS, high, KEYS):
            request_block(keys + head * key_head, key_step, key_size, block + AHEAD * KEYS, high)
            request_block(values + head * value_head, value_step, value_size, block + AHEAD * KEYS, high)
            for v in range(0, vectors, MOST_VECTORS):
                attend_block(
                    min(MOST_VECTORS, vectors - v), laid_out + v * key_size * LANES * 4, queries + v * QUERY_BYTES,
                    scores, sums + v * value_size * LANES * 4, keys + head * key_head, key_step,
                    values + head * value_head, value_step, key_size, value_size, block, min(KEYS, high - block),
                )  # fmt: skip
        for lane in range(vectors * LANES):
            row = first * LANES + lane
            if row < group * width:
                place = out + row % width * out_token + (head * group + row // width) * out_head
                write_result(queries, sums, lane, vectors, value_size, floats(place))
        at += vectors


@compiled(inline="always")
def place_of(lane: Any, vectors: Any, size: Any) -> Any:
    """Return where a lane's first number is, in vectors that are laid out MOST_VECTORS at a time, and the step."""
    first = lane // (MOST_VECTORS * LANES) * MOST_VECTORS
    together = min(MOST_VECTORS, vectors - first)
    return first * size * LANES + lane - first * LANES, together * LANES


@compiled()
def begin_query(query: Any, lane: Any, start: Any, stop: Any) -> None:
    """Begin with a query that attends to the positions from `start` to `stop`."""
    limits, numbers = words(query), floats(query)
    limits[lane], limits[LANES + lane] = start, stop
    numbers[2 * LANES + lane], numbers[3 * LANES + lane] = NEVER, 0


@compiled()
def clear(numbers: Any, count: Any) -> None:
    for i in range(count):
        numbers[i] = 0


@compiled()
def lay_out(query: Any, scale: Any, size: Any, laid_out: Any, lane: Any, vectors: Any) -> None:
    """Write a query, scaled, to its lane."""
    first, step = place_of(lane, vectors, size)
    numbers = floats(laid_out)
    for i in range(size):
        numbers[first + i * step] = query[i] * scale


@compiled()
def write_result(queries: Any, sums: Any, lane: Any, vectors: Any, size: Any, out: Any) -> None:
    """Write what a lane's query attended to."""
    total = floats(queries + lane // LANES * QUERY_BYTES + 192)[lane % LANES]
    first, step = place_of(lane, vectors, size)
    made = floats(sums)
    for i in range(size):
        out[i] = made[first + i * step] / total


def scratch_bytes(queries: int, key_size: int, value_size: int) -> int:
    """Return the bytes that a thread needs to attend with so many queries that share keys."""
    vectors = -(-queries // LANES)
    return vectors * (QUERY_BYTES + (key_size + value_size) * LANES * 4) + MOST_VECTORS * KEYS * LANES * 4
