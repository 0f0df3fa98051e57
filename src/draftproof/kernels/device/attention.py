"""Attend to keys and values in a pool, split over the keys of each row, and merge the splits by their log-sum-exps.

Scores and log-sum-exps are in units of log 2, so that the exponential is one instruction. The query tokens of a row and
the query heads that share a key head are folded into the rows of one tile: tile row t · G + g is token t, head g of the
group.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.math import FAR, INTERPRETED, LOG2_E, fast_exp2
from draftproof.kernels.device.rows import int_size

MERGED = tl.constexpr(32)  # splits that a merge loads at a time


class Span(NamedTuple):
    """The keys that a row attends to, and how they are split."""

    start: Any  # slot of the first key
    length: Any  # keys of earlier passes
    width: Any  # tokens of this pass
    low: Any  # first key inside the window or chunk of any token
    end: Any  # keys in the row; 0 for a row without tokens in this pass
    per_split: Any
    splits: Any


class QueryRows(NamedTuple):
    """The query tokens and heads of a tile, one entry for each tile row."""

    number: Any  # t · G + g
    token: Any
    head: Any
    position: Any
    last: Any  # last key that the token may attend to; -1 for padding
    ancestors: Any  # bit i: token i of this pass is an ancestor of this token, or itself


@triton.jit
@no_type_check
def attend(batch):
    """Attend to the keys of consecutive splits. Grid: (key heads · query tiles, programs of a row, B).

    Reference: kernels.attention_reference.decode_attention_reference. Where the splits of a row lie depends on its own
    length and on compile-time constants: its result depends neither on the batch around it nor on the grid. A row of
    one split is finished here, others in `merge`.
    """
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()
    b = tl.program_id(2).to(tl.int64)
    kv_head, tile = tl.program_id(0) % batch.sizes.kv_heads, tl.program_id(0) // batch.sizes.kv_heads
    query = _load_query(batch, b, kv_head, tile)  # does not wait for the length of the row
    span = _span(batch, b)
    first = tl.program_id(1) * span.splits // tl.num_programs(1)
    stop = (tl.program_id(1) + 1) * span.splits // tl.num_programs(1)
    if first < stop:
        rows = _query_rows(batch, b, span, kv_head, tile)
        for split in range(first, stop):
            peak, total, sums = _attend_split(batch, b, span, rows, query, kv_head, split)
            if span.splits == 1:
                _write_result(batch, b, rows, _finish(batch, rows, peak, total, sums))
            else:
                _write_split(batch, b, rows, kv_head, split, peak, total, sums)


@triton.jit
@no_type_check
def merge(batch):
    """Merge the splits of one token and head. Grid: (T · G, key heads, B)."""
    b, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    number = tl.program_id(0) + tl.arange(0, 1)
    span = _span(batch, b)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    if span.splits > 1:
        e = tl.arange(0, batch.traits.VALUE_SIZE)
        peak, total = tl.full([1], FAR, tl.float32), tl.zeros([1], tl.float32)
        sums = tl.zeros([1, batch.traits.VALUE_SIZE], tl.float32)
        for at in range(0, span.splits, MERGED):
            split = at + tl.arange(0, MERGED)
            line = _line(batch, b, kv_head, split, number)
            there = split < span.splits
            peaks = tl.load(batch.stats + line * 2, mask=there, other=FAR)
            totals = tl.load(batch.stats + line * 2 + 1, mask=there, other=0.0)
            part = batch.sums + line[:, None] * batch.sizes.value_size + e[None, :]
            part = tl.load(part, mask=there[:, None] & (e < batch.sizes.value_size)[None, :], other=0.0)
            top = tl.maximum(peak, tl.max(peaks, 0))
            weights, before = fast_exp2(peaks - top), fast_exp2(peak - top)
            total = total * before + tl.sum(weights * totals, 0)
            sums = sums * before[:, None] + tl.sum(weights[:, None] * part, 0)[None, :]
            peak = top
        group = batch.traits.GROUP
        rows = QueryRows(number, number // group, kv_head * group + number % group, number, number, number)
        _write_result(batch, b, rows, _finish(batch, rows, peak, total, sums))


@triton.jit
@no_type_check
def _span(batch, b):
    """Return the keys that row b attends to, and their splits."""
    start, length = tl.load(batch.starts + b).to(tl.int64), tl.load(batch.lengths + b).to(tl.int32)
    tokens = int_size(batch.sizes.T)
    width = tokens
    if batch.traits.RAGGED:
        width = tl.minimum(tl.load(batch.widths + b).to(tl.int32), tokens)
    end = tl.where(width > 0, length + width, 0)
    low = tl.minimum(_low(batch, b, length, width), end)
    splits = tl.minimum(tl.maximum((end - low) // batch.traits.LEAST, 1), int_size(batch.sizes.splits))
    per_split = tl.cdiv(tl.cdiv(end - low, splits), batch.traits.KEYS) * batch.traits.KEYS
    splits = tl.maximum(tl.cdiv(end - low, tl.maximum(per_split, 1)), 1)
    return Span(start, length, width, low, end, per_split, splits)


@triton.jit
@no_type_check
def _low(batch, b, length, width):
    """Return the first key of earlier passes inside the window or chunk of any token of row b."""
    low = length * 0
    if batch.traits.WINDOWED or batch.traits.CHUNKED:
        earliest = length
        if batch.traits.PLACED:
            t = tl.arange(0, 64)
            at = tl.load(batch.positions + b * int_size(batch.sizes.T) + t, mask=t < width, other=2**30)
            earliest = tl.minimum(length, tl.min(at, 0).to(tl.int32))
        if batch.traits.WINDOWED:
            low = tl.maximum(low, earliest - batch.sizes.window + 1)
        if batch.traits.CHUNKED:
            low = tl.maximum(low, earliest // batch.sizes.chunk * batch.sizes.chunk)
    return low


@triton.jit
@no_type_check
def _tokens_and_heads(batch, kv_head, tile):
    """Return number, token and head of each row of a tile."""
    number = tile * batch.traits.ROWS + tl.arange(0, batch.traits.ROWS)
    return number, number // batch.traits.GROUP, kv_head * batch.traits.GROUP + number % batch.traits.GROUP


@triton.jit
@no_type_check
def _load_query(batch, b, kv_head, tile):
    """Load the queries of a tile, [ROWS, SIZE]; those of padding tokens may be anything, their scores are masked."""
    _, token, head = _tokens_and_heads(batch, kv_head, tile)
    d = tl.arange(0, batch.traits.SIZE)
    line = b * batch.strides.query + token * batch.strides.query_token + head * batch.strides.query_head
    there = (token < int_size(batch.sizes.T))[:, None] & (d < batch.sizes.size)[None, :]
    return tl.load(batch.query + line[:, None] + d[None, :], mask=there, other=0.0)


@triton.jit
@no_type_check
def _query_rows(batch, b, span, kv_head, tile):
    """Return the query tokens and heads of a tile."""
    number, token, head = _tokens_and_heads(batch, kv_head, tile)
    real = token < span.width
    position, last, ancestors = span.length + token, span.length + token, token
    at = b * int_size(batch.sizes.T) + token
    if batch.traits.PLACED:
        position = tl.load(batch.positions + at, mask=real, other=0).to(tl.int32)
    if batch.traits.TREE:
        last = tl.full([batch.traits.ROWS], 0, tl.int32) + (span.end - 1)
        ancestors = tl.load(batch.ancestors + at, mask=real, other=0)
    return QueryRows(number, token, head, position, tl.where(real, last, -1), ancestors)


@triton.jit
@no_type_check
def _attend_split(batch, b, span, rows, query, kv_head, split):
    """Return the largest score of each tile row in a split, the sum of exponentials and that of weighted values."""
    begin = span.low + split * span.per_split
    end = tl.minimum(begin + span.per_split, span.end)
    keys = batch.key_pool + kv_head * batch.strides.key_head
    values = batch.value_pool + kv_head * batch.strides.value_head
    d, e = tl.arange(0, batch.traits.SIZE), tl.arange(0, batch.traits.VALUE_SIZE)
    peak = tl.full([batch.traits.ROWS], FAR, tl.float32)
    # in small tiles, warps share the rows: adding up over keys is cheaper once in the end than at every step
    LATE: tl.constexpr = batch.traits.ROWS < 64
    totals = tl.zeros([batch.traits.ROWS, batch.traits.KEYS if LATE else 1], tl.float32)
    sums = tl.zeros([batch.traits.ROWS, batch.traits.VALUE_SIZE], tl.float32)
    for at in tl.range(begin, end, batch.traits.KEYS, num_stages=batch.traits.STAGES):
        j = at + tl.arange(0, batch.traits.KEYS)
        # after the last key it is loaded again: what follows it in the pool may be NaN, which a weight of 0 keeps
        next_key = tl.minimum(j, span.end - 1) - at
        slot = span.start + at
        key_at = keys + slot * batch.strides.key + (next_key[None, :] * batch.strides.key + d[:, None])
        key = _load(key_at, (d < batch.sizes.size)[:, None], batch.traits.SIZE_PADDED)
        scores = _dot(query, key, tl.zeros([batch.traits.ROWS, batch.traits.KEYS], tl.float32))
        scores = _biased(batch, b, span, rows, j, scores)
        top = tl.maximum(peak, tl.max(scores, 1))
        weights = fast_exp2(scores - top[:, None])
        before = fast_exp2(peak - top)
        value_at = values + slot * batch.strides.value + (next_key[:, None] * batch.strides.value + e[None, :])
        value = _load(value_at, (e < batch.sizes.value_size)[None, :], batch.traits.VALUE_PADDED)
        totals = totals * before[:, None] + (weights if LATE else tl.sum(weights, 1)[:, None])
        sums = _dot(weights.to(value.dtype), value, sums * before[:, None])
        peak = top
    return peak, tl.sum(totals, 1), sums


@triton.jit
@no_type_check
def _dot(a, b, c):
    """Return a @ b + c in float32, without TF32."""
    if INTERPRETED:  # which would take the bits of bfloat16 numbers for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c)
    else:
        return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
@no_type_check
def _load(pointers, there, PADDED: tl.constexpr):
    """Load a tile of keys or values; only sizes that are no power of 2 need the mask."""
    if PADDED:
        return tl.load(pointers, mask=there, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
@no_type_check
def _biased(batch, b, span, rows, j, scores):
    """Return scores in units of log 2, with soft cap and ALiBi, and −inf where a token may not attend to a key."""
    inside = j - span.length  # number of the token in this pass
    key_position = j
    if batch.traits.PLACED:
        given = batch.positions + b * int_size(batch.sizes.T) + inside
        given = tl.load(given, mask=(inside >= 0) & (j < span.end), other=0).to(tl.int32)
        key_position = tl.where(inside >= 0, given, j)
    if batch.traits.CAPPED:
        scores = _tanh(scores * batch.sizes.scale) * (batch.sizes.softcap * LOG2_E)
    else:
        scores = scores * batch.sizes.scale
    if batch.traits.ALIBI:
        slope = tl.load(batch.slopes + rows.head, mask=rows.last >= 0, other=0.0).to(tl.float32) * LOG2_E
        scores += slope[:, None] * (key_position[None, :] - rows.position[:, None]).to(tl.float32)
    visible = j[None, :] <= rows.last[:, None]
    if batch.traits.TREE:
        bit = rows.ancestors[:, None] >> tl.minimum(tl.maximum(inside, 0), 63).to(tl.int64)[None, :]
        visible &= (inside < 0)[None, :] | ((bit & 1) != 0)
    if batch.traits.WINDOWED:
        visible &= rows.position[:, None] - key_position[None, :] < batch.sizes.window
    if batch.traits.CHUNKED:
        visible &= (rows.position // batch.sizes.chunk)[:, None] == (key_position // batch.sizes.chunk)[None, :]
    return tl.where(visible, scores, float("-inf"))


@triton.jit
@no_type_check
def _tanh(x):
    """Return tanh(x) with an absolute error of 2e-7."""
    e = fast_exp2(tl.abs(x) * (-2.0 * LOG2_E))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
@no_type_check
def _finish(batch, rows, peak, total, sums):
    """Return the attention of each tile row, 0 for padding; the sink of a head counts in the denominator only."""
    if batch.traits.SINKS:
        sink = tl.load(batch.sinks + rows.head).to(tl.float32) * LOG2_E
        top = tl.maximum(peak, sink)
        before = fast_exp2(peak - top)
        total = total * before + fast_exp2(sink - top)
        sums = sums * before[:, None]
    return sums * (1.0 / tl.where(total != 0, total, 1.0))[:, None]


@triton.jit
@no_type_check
def _write_result(batch, b, rows, result):
    """Store the attention of tile rows, [B, T, heads, value size]."""
    e, size, tokens = tl.arange(0, batch.traits.VALUE_SIZE), batch.sizes.value_size, int_size(batch.sizes.T)
    line = (b * tokens + rows.token) * (batch.sizes.kv_heads * batch.traits.GROUP) + rows.head
    there = (rows.token < tokens)[:, None] & (e < size)[None, :]
    tl.store(batch.out + line[:, None] * size + e[None, :], result.to(batch.out.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def _write_split(batch, b, rows, kv_head, split, peak, total, sums):
    """Store what `merge` needs of a split."""
    e, size = tl.arange(0, batch.traits.VALUE_SIZE), batch.sizes.value_size
    line = _line(batch, b, kv_head, split, rows.number)
    there = rows.token < int_size(batch.sizes.T)
    tl.store(batch.sums + line[:, None] * size + e[None, :], sums, mask=there[:, None] & (e < size)[None, :])
    tl.store(batch.stats + line * 2, peak, mask=there)
    tl.store(batch.stats + line * 2 + 1, total, mask=there)


@triton.jit
@no_type_check
def _line(batch, b, kv_head, split, number):
    """Return where a tile row of a split is stored: [B, key heads, splits, T · G]."""
    in_row = int_size(batch.sizes.T) * batch.traits.GROUP
    return ((b * batch.sizes.kv_heads + kv_head) * int_size(batch.sizes.splits) + split) * in_row + number
