"""The one pass over the logits: what it leaves of a row is its largest logit and its mass, chunk by chunk."""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.layout import PER_CHUNK, PER_TILE, QUEUED, SLICE
from draftproof.kernels.device.math import INTERPRETED, near_exp2, power, slope_of
from draftproof.kernels.device.rows import (
    batch_slices,
    dist_row,
    dist_slices,
    dressed,
    request,
    segment_tokens,
    wanted,
    warm,
    whole,
)

NO_TOKEN = tl.constexpr(2**30)


@triton.jit
@no_type_check
def scan(batch, STEP: tl.constexpr, EARLY: tl.constexpr):
    """Twin: `draw.chunk_sums` of `distribution.log_sum_exp`, and the argmax of `filters.settle`. Grid: (tiles, J + K, B), and
    where it is EARLY (tiles, B, J + K).

    Writes for each slice, chunk and tile its largest logit m and Σ exp(scale · (x − m)); for a greedy row, by tile
    only, the first token that has m instead (-1: NaN is among them). Borders and the order of the additions are
    fixed: what a row gives does not depend on the batch around it, nor on STEP, the chunks that are read at a time,
    nor on EARLY, whether a program asks for logits before it knows its request.
    """
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(batch.work + QUEUED, 0.0)  # rows are put into it when all of this is done
    lines = _lines(tl.program_id(0) * (PER_TILE // STEP), STEP)
    if EARLY:
        _scan_early(batch, lines, STEP)
    else:
        req, row = request(batch, tl.program_id(2).to(tl.int64)), tl.program_id(1)
        if wanted(req, row):
            slope = _slope(batch, req, row)
            _scan_tile(batch, req, row, dist_slices(batch, req, row, lines, row >= 0, None), slope, STEP)


@triton.jit
@no_type_check
def _scan_early(batch, lines, STEP: tl.constexpr):
    """While the first programs wait for their request, memory would have nothing to do. Every request needs its first
    row: its logits are asked for at once. To read others in vain would take longer than to wait, but for a single
    request."""
    b, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    asked = row < tl.where(tl.num_programs(1) == 1, whole(batch.sizes.K) + 1, 1)
    x = batch_slices(batch, b, row, lines, asked)
    tl.debug_barrier()  # or the compiler would put what follows before it
    req = request(batch, b)
    if wanted(req, row):
        if (not asked) | (req.target_row != b):
            x = dist_slices(batch, req, row, lines, row >= 0, None)
        _scan_tile(batch, req, row, x, _slope(batch, req, row), STEP)


@triton.jit
@no_type_check
def _temperature(req, row):
    return tl.where(row < req.J, req.temperature, req.draft_temperature)


@triton.jit
@no_type_check
def _slope(batch, req, row):
    slope = tl.full((), 1.0, tl.float32)
    if batch.traits.WARM:
        slope = slope_of(1.0 / warm(_temperature(req, row)))
    return slope


@triton.jit
@no_type_check
def _scan_tile(batch, req, row, x, slope, STEP: tl.constexpr):
    """A tile of a row, step by step; x are the first step's logits, and the next step's are on their way while one's
    are worked on."""
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
        ahead = dist_slices(batch, req, row, _lines(step + 1, STEP), n + 1 < STEPS, None)
        y = dressed(batch, req, row, _lines(step, STEP), _widened(x))
        if (step + 1) * STEP * (PER_CHUNK * SLICE) > end:
            y = tl.where(segment_tokens(_lines(step, STEP), y.shape[1]) < end, y, float("-inf"))
        if batch.traits.WARM and sampled:
            top, mass = _sums(batch, req, line, step, y, slope, sliced, STEP)
        else:
            top, mass = _first(step, y, STEP)
        here = (tl.arange(0, STEPS) == n)[:, None]
        m, s = tl.where(here, top[None, :], m), tl.where(here, mass[None, :], s)
        x = ahead
    _write_tile(batch, req, line, tile, m, s, slope, sampled)


@triton.jit
@no_type_check
def _widened(x):
    """Logits as float32. A pair of bfloat16 is taken apart in two steps, where the compiler takes three or four."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shl.b32 a, $2, 16; mov.b32 $0, a; and.b32 a, $2, 0xffff0000; mov.b32 $1, a; }",
            "=f,=f,r", [x], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
@no_type_check
def _lines(step, STEP: tl.constexpr):
    """Where the slices of a step begin."""
    return (step * STEP * PER_CHUNK + tl.arange(0, STEP * PER_CHUNK)) * SLICE


@triton.jit
@no_type_check
def _sums(batch, req, line, step, x, slope, sliced, STEP: tl.constexpr):
    """Of the slices and chunks of a step, written down; of the step, returned."""
    top = tl.max(tl.max(x, 2), 1)
    offset = _finite(top) * slope
    mass = tl.sum(tl.sum(near_exp2(tl.fma(x, slope, -offset[:, None, None])), 2), 1)
    mass *= tl.exp2(tl.fma(-_finite(top), slope, offset))  # what the rounding of the offset took off
    C = req.C
    if sliced:
        n = step * STEP * PER_CHUNK + tl.arange(0, STEP * PER_CHUNK)
        _write(batch.slices + line * 2 * C * PER_CHUNK, C * PER_CHUNK, n, top, mass)
    tops = tl.reshape(top, (STEP, PER_CHUNK))
    m = tl.max(tops, 1)
    s = tl.sum(tl.reshape(mass, (STEP, PER_CHUNK)) * power(tops - _finite(m)[:, None], slope), 1)
    _write(batch.stats + line * 2 * C, C, step * STEP + tl.arange(0, STEP), m, s)
    return m, s


@triton.jit
@no_type_check
def _first(step, x, STEP: tl.constexpr):
    """The largest logit of each chunk of a step and the first token that has it."""
    top = tl.reduce(tl.reduce(x, 2, _larger), 1, _larger)
    tokens = segment_tokens(_lines(step, STEP), x.shape[1])
    first = tl.min(tl.min(tl.where(x == top[:, None, None], tokens, NO_TOKEN), 2), 1)
    tops = tl.reshape(top, (STEP, PER_CHUNK))
    m = tl.reduce(tops, 1, _larger)
    first = tl.min(tl.where(tops == m[:, None], tl.reshape(first, (STEP, PER_CHUNK)), NO_TOKEN), 1)
    return m, first.to(tl.float32)


@triton.jit
@no_type_check
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
@no_type_check
def _write_tile(batch, req, line, tile, m, s, slope, sampled):
    """From the m and s of its chunks. They are added in pairs: a sum of two has one order only, whatever STEP is."""
    m, s = tl.reshape(m, (PER_TILE,)), tl.reshape(s, (PER_TILE,))
    top = tl.reduce(m, 0, _larger)
    if batch.traits.WARM and sampled:
        pairs = tl.reshape(s * power(m - _finite(top), slope), (2, 2, PER_TILE // 4))
        mass = tl.sum(tl.sum(tl.sum(pairs, 2), 1), 0)
    else:
        mass = tl.where(top == top, tl.min(tl.where(m == top, s, NO_TOKEN), 0), -1.0)
    count = req.T
    if tile < count:
        tl.store(batch.tiles + line * 2 * count + tile, top)
        tl.store(batch.tiles + line * 2 * count + count + tile, mass)


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
