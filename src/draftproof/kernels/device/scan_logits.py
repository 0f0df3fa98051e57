"""Read every logit once and keep, for each slice, chunk and tile, its largest logit and its mass."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.layout import PER_CHUNK, PER_TILE, QUEUE_LENGTH, SLICE
from draftproof.kernels.device.math import INTERPRETED, fast_exp2, power, slope_of
from draftproof.kernels.device.rows import (
    batch_slices,
    dist_row,
    dist_slices,
    divisor,
    int_size,
    needed,
    request,
    segment_tokens,
    with_edits,
)

NO_TOKEN = tl.constexpr(2**30)


@triton.jit
@no_type_check
def scan(batch, STEP: tl.constexpr, EARLY: tl.constexpr):
    """Scan one tile of one distribution row. Grid: (tiles, J + K, B); with EARLY (tiles, B, J + K).

    Reference: core.draw.chunk_sums of core.distribution.log_sum_exp, and the argmax of core.filters.filter_stats.

    Writes for each slice, chunk and tile its largest logit m and Σ exp(scale · (x − m)); for a greedy row, by tile
    only, the first token that has m instead (-1 if a logit is NaN). Boundaries and the order of additions are fixed:
    the result of a row does not depend on the batch around it, nor on STEP (chunks read at a time), nor on EARLY
    (whether a program loads logits before its request is known).
    """
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(batch.work + QUEUE_LENGTH, 0.0)  # rows are queued only after the scan
    starts = _slice_starts(tl.program_id(0) * (PER_TILE // STEP), STEP)
    if EARLY:
        _scan_early(batch, starts, STEP)
    else:
        req, row = request(batch, tl.program_id(2).to(tl.int64)), tl.program_id(1)
        if needed(req, row):
            slope = _slope(batch, req, row)
            _scan_tile(batch, req, row, dist_slices(batch, req, row, starts, row >= 0, None), slope, STEP)


@triton.jit
@no_type_check
def _scan_early(batch, starts, STEP: tl.constexpr):
    """Load the request's first row before the request itself, then scan.

    The first programs would otherwise leave the memory idle while they wait for their request. Every request needs its
    first row. Loading other rows in vain would take longer than the wait, except for a single request.
    """
    b, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    asked = row < tl.where(tl.num_programs(1) == 1, int_size(batch.sizes.K) + 1, 1)
    x = batch_slices(batch, b, row, starts, asked)
    tl.debug_barrier()  # keeps the compiler from moving what follows above the load
    req = request(batch, b)
    if needed(req, row):
        if (not asked) | (req.target_row != b):
            x = dist_slices(batch, req, row, starts, row >= 0, None)
        _scan_tile(batch, req, row, x, _slope(batch, req, row), STEP)


@triton.jit
@no_type_check
def _temperature(req, row):
    """Return the temperature of a distribution row."""
    return tl.where(row < req.J, req.temperature, req.draft_temperature)


@triton.jit
@no_type_check
def _slope(batch, req, row):
    """Return the row's exponent scale for exp2; 1 if all requests are greedy."""
    slope = tl.full((), 1.0, tl.float32)
    if batch.traits.WARM:
        slope = slope_of(1.0 / divisor(_temperature(req, row)))
    return slope


@triton.jit
@no_type_check
def _scan_tile(batch, req, row, x, slope, STEP: tl.constexpr):
    """Scan a tile of a row step by step; x are the logits of the first step, and the next step is prefetched."""
    STEPS: tl.constexpr = PER_TILE // STEP
    end = tl.where(row < req.J, batch.sizes.V, batch.sizes.R)
    line = dist_row(req, row)
    sampled = row < 0
    if batch.traits.WARM:
        sampled = _temperature(req, row) > 0
    tile = tl.program_id(0)
    sliced = row < req.J
    if batch.traits.FILTERED:
        sliced = row >= 0
    m = tl.full([STEPS, STEP], float("-inf"), tl.float32)
    s = tl.zeros([STEPS, STEP], tl.float32)
    for n in range(0, STEPS):
        step = tile * STEPS + n
        ahead = dist_slices(batch, req, row, _slice_starts(step + 1, STEP), n + 1 < STEPS, None)
        y = with_edits(batch, req, row, _slice_starts(step, STEP), _widened(x))
        if (step + 1) * STEP * (PER_CHUNK * SLICE) > end:
            y = tl.where(segment_tokens(_slice_starts(step, STEP), y.shape[1]) < end, y, float("-inf"))
        if batch.traits.WARM and sampled:
            top, mass = _sums(batch, req, line, step, y, slope, sliced, STEP)
        else:
            top, mass = _argmax(step, y, STEP)
        here = (tl.arange(0, STEPS) == n)[:, None]
        m, s = tl.where(here, top[None, :], m), tl.where(here, mass[None, :], s)
        x = ahead
    _write_tile(batch, req, line, tile, m, s, slope, sampled)


@triton.jit
@no_type_check
def _widened(x):
    """Return logits as float32.

    A pair of bfloat16 is unpacked in two instructions, where the compiler takes three or four.
    """
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a; and.b32 a, $2, 0xffff0000; mov.b32 $1, a; }",
            "=f,=f,r", [x], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
@no_type_check
def _slice_starts(step, STEP: tl.constexpr):
    """Return the first tokens of the slices of a step."""
    return (step * STEP * PER_CHUNK + tl.arange(0, STEP * PER_CHUNK)) * SLICE


@triton.jit
@no_type_check
def _sums(batch, req, line, step, x, slope, sliced, STEP: tl.constexpr):
    """Store the largest logit and the mass of a step's slices and chunks; return those of the chunks."""
    top = tl.max(tl.max(x, 2), 1)
    offset = _finite(top) * slope
    mass = tl.sum(tl.sum(fast_exp2(tl.fma(x, slope, -offset[:, None, None])), 2), 1)
    mass *= tl.exp2(tl.fma(-_finite(top), slope, offset))  # corrects for the rounding of the offset
    C = req.C
    if sliced:
        n = step * STEP * PER_CHUNK + tl.arange(0, STEP * PER_CHUNK)
        _store_stats(batch.slice_stats + line * 2 * C * PER_CHUNK, C * PER_CHUNK, n, top, mass)
    tops = tl.reshape(top, (STEP, PER_CHUNK))
    m = tl.max(tops, 1)
    s = tl.sum(tl.reshape(mass, (STEP, PER_CHUNK)) * power(tops - _finite(m)[:, None], slope), 1)
    _store_stats(batch.chunk_stats + line * 2 * C, C, step * STEP + tl.arange(0, STEP), m, s)
    return m, s


@triton.jit
@no_type_check
def _argmax(step, x, STEP: tl.constexpr):
    """Return the largest logit of each chunk of a step and the first token that has it."""
    top = tl.reduce(tl.reduce(x, 2, _larger), 1, _larger)
    tokens = segment_tokens(_slice_starts(step, STEP), x.shape[1])
    first = tl.min(tl.min(tl.where(x == top[:, None, None], tokens, NO_TOKEN), 2), 1)
    tops = tl.reshape(top, (STEP, PER_CHUNK))
    m = tl.reduce(tops, 1, _larger)
    first = tl.min(tl.where(tops == m[:, None], tl.reshape(first, (STEP, PER_CHUNK)), NO_TOKEN), 1)
    return m, first.to(tl.float32)


@triton.jit
@no_type_check
def _larger(a, b):
    """Return the maximum; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
@no_type_check
def _write_tile(batch, req, line, tile, m, s, slope, sampled):
    """Store a tile's largest logit and mass, from those of its chunks.

    Masses are added in pairs: a sum of two has one order only, whatever STEP is.
    """
    m, s = tl.reshape(m, (PER_TILE,)), tl.reshape(s, (PER_TILE,))
    top = tl.reduce(m, 0, _larger)
    if batch.traits.WARM and sampled:
        pairs = tl.reshape(s * power(m - _finite(top), slope), (2, 2, PER_TILE // 4))
        mass = tl.sum(tl.sum(tl.sum(pairs, 2), 1), 0)
    else:
        mass = tl.where(top == top, tl.min(tl.where(m == top, s, NO_TOKEN), 0), -1.0)
    count = req.T
    if tile < count:
        tl.store(batch.tile_stats + line * 2 * count + tile, top)
        tl.store(batch.tile_stats + line * 2 * count + count + tile, mass)


@triton.jit
@no_type_check
def _finite(m):
    """Replace −inf by 0: for a chunk with no allowed token, −inf − (−inf) would be NaN, which means a fault."""
    return tl.where(m > float("-inf"), m, 0.0)


@triton.jit
@no_type_check
def _store_stats(stats, count, n, m, s):
    """Store m and s of entries n."""
    tl.store(stats + n, m, mask=n < count)
    tl.store(stats + count + n, s, mask=n < count)
