"""The one pass over the logits: what it leaves of a row is its largest logit and its mass, chunk by chunk."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.exponent import power, slope_of
from draftproof.kernels.layout import PER_CHUNK, SLICE
from draftproof.kernels.layout import PER_TILE as CHUNKS
from draftproof.kernels.request import law_row, request, wanted
from draftproof.kernels.rows import draft_row, dress_draft, dress_target, target_row

SLICES = tl.constexpr(CHUNKS.value * PER_CHUNK.value)
NO_TOKEN = tl.constexpr(2**30)


@triton.jit
@no_type_check
def scan(batch):
    """Twin: `draw.chunk_sums` of `law.log_sum_exp`, and the argmax of `filters.settle`. Grid: (parts, J + K, B).

    Writes for each slice, chunk and tile its largest logit m and Σ exp(scale · (x − m)); for a greedy row, by tile
    only, the first token that has m instead (-1: NaN is among them). Borders and the order of the additions are
    fixed: what a row gives does not depend on the batch around it.
    """
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    req = request(batch, tl.program_id(2).to(tl.int64))
    if wanted(batch, req, row):
        if row < batch.sizes.J:
            _scan_row(batch, req, row, req.temperature, batch.traits.SEGMENT, False)
        else:
            _scan_row(batch, req, row, req.draft_temperature, batch.traits.DRAFT_SEGMENT, True)


@triton.jit
@no_type_check
def _scan_row(batch, req, row, t, SEGMENT: tl.constexpr, DRAFT: tl.constexpr):
    """TILES tiles of a row; the next one is on its way while one is worked on."""
    tile = tl.program_id(0) * batch.traits.TILES
    x = _raw(batch, req, row, tile, tile >= 0, SEGMENT, DRAFT)
    for n in range(0, batch.traits.TILES):
        ahead = _raw(batch, req, row, tile + 1, n + 1 < batch.traits.TILES, SEGMENT, DRAFT)
        y = _dressed(batch, req, row, tile, x, DRAFT)
        if t > 0:
            _sums(batch, law_row(batch, req, row), tile, y, 1.0 / t, batch.traits.FILTERED or not DRAFT)
        else:
            _firsts(batch, law_row(batch, req, row), tile, y)
        x = ahead
        tile += 1


@triton.jit
@no_type_check
def _tokens(tile, SEGMENT: tl.constexpr):
    """The tokens of a tile, [slices, parts of a slice, SEGMENT].

    A segment is 128 bytes, a line of the memory. In this shape a few threads share a slice and hold much of it each,
    and sums over slices hardly need to cross from thread to thread.
    """
    part = tl.arange(0, SLICE // SEGMENT)[None, :, None] * SEGMENT
    slices = (tile * SLICES + tl.arange(0, SLICES))[:, None, None] * SLICE
    return slices + part + tl.arange(0, SEGMENT)[None, None, :]


@triton.jit
@no_type_check
def _raw(batch, req, row, tile, there, SEGMENT: tl.constexpr, DRAFT: tl.constexpr):
    o = _tokens(tile, SEGMENT)
    if DRAFT:
        at = draft_row(batch, req, row - batch.sizes.J)
        x = tl.load(at + o, mask=o < tl.where(there, batch.sizes.R, 0), other=float("-inf"))
    else:
        at = target_row(batch, req, row)
        x = tl.load(at + o, mask=o < tl.where(there, batch.sizes.V, 0), other=float("-inf"))
    return x


@triton.jit
@no_type_check
def _dressed(batch, req, row, tile, x, DRAFT: tl.constexpr):
    """As float32, with edits and mask put in; where there may be any, a segment is a slice."""
    x = x.to(tl.float32)
    if batch.traits.EDITED or batch.traits.MASKED:
        o = tl.reshape(_tokens(tile, SLICE), (SLICES, SLICE))
        rows = row + tl.zeros([SLICES], tl.int32)
        x = tl.reshape(x, (SLICES, SLICE))
        if DRAFT:  # noqa: SIM108  (a conditional expression would compile both)
            x = dress_draft(batch, req, rows - batch.sizes.J, o, x)
        else:
            x = dress_target(batch, req, rows, o, x)
        x = tl.reshape(x, (SLICES, 1, SLICE))
    return x


@triton.jit
@no_type_check
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
@no_type_check
def _sums(batch, line, tile, x, scale, SLICED: tl.constexpr):
    slope = slope_of(scale)
    top = tl.max(tl.max(x, 1), 1)
    mass = tl.sum(tl.sum(tl.exp2((x - _finite(top)[:, None, None]) * slope), 1), 1)
    if SLICED:
        n = batch.sizes.C * PER_CHUNK
        _write(batch.slices + line * 2 * n, n, tile * SLICES + tl.arange(0, SLICES), top, mass)
    tops = tl.reshape(top, (CHUNKS, PER_CHUNK))
    m = tl.max(tops, 1)
    s = tl.sum(tl.reshape(mass, (CHUNKS, PER_CHUNK)) * power(tops - _finite(m)[:, None], slope), 1)
    C = batch.sizes.C
    _write(batch.stats + line * 2 * C, C, tile * CHUNKS + tl.arange(0, CHUNKS), m, s)
    m_tile = tl.max(m, 0)
    _write_tile(batch, line, tile, m_tile, tl.sum(s * power(m - _finite(m_tile), slope), 0))


@triton.jit
@no_type_check
def _firsts(batch, line, tile, x):
    m = tl.reduce(tl.reduce(tl.reduce(x, 1, _larger), 1, _larger), 0, _larger)
    first = tl.min(tl.min(tl.min(tl.where(x == m, _tokens(tile, x.shape[2]), NO_TOKEN), 1), 1), 0)
    _write_tile(batch, line, tile, m, tl.where(m == m, first, -1).to(tl.float32))


@triton.jit
@no_type_check
def _write_tile(batch, line, tile, m, s):
    count = batch.sizes.T
    if tile < count:
        tl.store(batch.tiles + line * 2 * count + tile, m)
        tl.store(batch.tiles + line * 2 * count + count + tile, s)


@triton.jit
@no_type_check
def _finite(m):
    """Of a chunk with nothing allowed in it, 0: −inf less −inf would be NaN, which means something else."""
    return tl.where(m > float("-inf"), m, 0.0)


@triton.jit
@no_type_check
def _write(stats, count, n, m, s):
    tl.store(stats + n, m, mask=n < count)
    tl.store(stats + count + n, s, mask=n < count)
