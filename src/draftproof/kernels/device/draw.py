"""Draw a token on the device by a two-step inverse CDF: chunk first, then token. Reference: `draftproof.core.draw`.

The step inside a chunk is split once more, by slice and by token. The sums are float64, so the result is the same, and
the slice sums of the scan say which slice to read.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.distribution import excess
from draftproof.kernels.device.layout import CHUNK, PER_CHUNK, SLICE
from draftproof.kernels.device.math import LN_2, power
from draftproof.kernels.device.rows import dist_row

ROWS_AT_ONCE = tl.constexpr(8)  # rows whose chunk statistics are held together


@triton.jit
@no_type_check
def chunk_masses(batch, req, row, dist):
    """Return a target row's mass by chunk, float64, up to a common factor. Reference: core.draw.chunk_sums."""
    C = req.C
    c = tl.arange(0, batch.traits.NP)
    stats = batch.chunk_stats + dist_row(req, row) * 2 * C + c
    m = tl.load(stats, mask=c < C, other=float("-inf"))
    return _masses(m, tl.load(stats + C, mask=c < C, other=0.0), dist)


@triton.jit
@no_type_check
def _masses(m, s, dist):
    """Return masses relative to the distribution's centre, float64."""
    return s.to(tl.float64) * tl.exp(
        (m.to(tl.float64) - dist.centre.to(tl.float64)) * (dist.slope.to(tl.float64) * LN_2)
    )


class ChunkStats(NamedTuple):
    """Largest logit m and mass s of the chunks of several target rows: one tensor [NP] per row."""

    m: Any
    s: Any


@triton.jit
@no_type_check
def load_chunk_stats(batch, req):
    """Load the chunk statistics of all target rows of a short draft; nothing for a long draft.

    They arrive before it is known which row matters. One tensor per row: selecting among them stays inside a thread,
    whereas one tensor of all rows would need a reduction.
    """
    m, s = (), ()
    if batch.traits.KP <= ROWS_AT_ONCE:
        c = tl.arange(0, batch.traits.NP)
        for i in tl.static_range(batch.traits.KP):
            stats = batch.chunk_stats + dist_row(req, i) * 2 * req.C + c
            there = c < tl.where(i <= req.length, req.C, 0)
            m += (tl.load(stats, mask=there, other=float("-inf")),)
            s += (tl.load(stats + req.C, mask=there, other=0.0),)
    return ChunkStats(m=m, s=s)


@triton.jit
@no_type_check
def chunk_masses_at(batch, req, row, dist, stats):
    """Return `chunk_masses` of one row, from `stats` if they were loaded."""
    if batch.traits.KP <= ROWS_AT_ONCE:
        m, s = stats.m[0], stats.s[0]
        for i in tl.static_range(1, batch.traits.KP):
            m, s = tl.where(row == i, stats.m[i], m), tl.where(row == i, stats.s[i], s)
        masses = _masses(m, s, dist)
    else:
        masses = chunk_masses(batch, req, row, dist)
    return masses


@triton.jit
@no_type_check
def invert(sums, uniform):
    """Return the index in sums [N], float64, for each number of `uniform` [T]. Reference: core.draw.invert.

    The total is a normal number and `uniform` is at most 1 − 2⁻⁵³, so that the rounded product is less than the total.
    The reference's clamp to the last index with weight is therefore not needed.
    """
    LAST: tl.constexpr = sums.shape[0] - 1
    running = tl.cumsum(sums, 0)
    total = tl.gather(running, tl.full(uniform.shape, LAST, tl.int32), 0)
    passed = running[:, None] <= (uniform * total)[None, :]  # long axis first: most of it then lies in one thread
    return tl.minimum(tl.sum(passed.to(tl.int32), 0), LAST)


@triton.jit
@no_type_check
def invert_once(sums, uniform):
    """Return the index in sums [N] for one number, as a scalar; 0 if there is no mass at all."""
    LAST: tl.constexpr = sums.shape[0] - 1
    running = tl.cumsum(sums, 0)
    total = tl.sum(tl.gather(running, tl.full([1], LAST, tl.int32), 0), 0)
    index = tl.sum((running <= uniform * total).to(tl.int32), 0)
    return tl.where(index > LAST, 0, index)


@triton.jit
@no_type_check
def slice_of(batch, req, row, dist, chunk, uniform):
    """Find the slice inside each of `chunk` [T], and the remaining mass inside that slice.

    Reference: core.draw.invert inside a chunk. The slice sums are those of the scan.
    """
    n = req.C * PER_CHUNK
    first = chunk * PER_CHUNK
    at = batch.slice_stats + dist_row(req, row) * 2 * n + first
    total = tl.zeros(chunk.shape, tl.float64)
    sums = ()  # inclusive running sums: one thread holds all slices of its chunks
    for i in tl.static_range(PER_CHUNK):
        m = tl.load(at + i, mask=first + i < n, other=float("-inf"))
        s = tl.load(at + n + i, mask=first + i < n, other=0.0)
        total += (s * power(m - dist.centre, dist.slope) * dist.gain).to(tl.float64)
        sums += (total,)
    goal = uniform * total
    which, before = tl.zeros(chunk.shape, tl.int32), tl.zeros(chunk.shape, tl.float64)
    for i in tl.static_range(PER_CHUNK - 1):
        passed = (sums[i] <= goal) & (sums[i] < total)
        which, before = which + passed.to(tl.int32), tl.where(passed, sums[i], before)
    return first + which, goal - before


@triton.jit
@no_type_check
def token_of(begin, w, rest):
    """Find the token that `rest` mass falls on, and its one-hot position [T, W].

    `begin` [T] is the first token of each range, w [T, W] the weights of its tokens.
    """
    place = tl.arange(0, w.shape[1])[None, :]
    running = tl.cumsum(w.to(tl.float64), 1)
    last = tl.max(tl.where(w > 0, place, 0), 1)  # independent of the running sums, so it adds no latency
    offset = tl.minimum(tl.sum((running <= rest[:, None]).to(tl.int32), 1), last)
    return begin + offset, place == offset[:, None]


@triton.jit
@no_type_check
def tokens_of(lines):
    """Return the tokens of slices: [S] to [S, SLICE]."""
    return lines[:, None] * SLICE + tl.arange(0, SLICE)[None, :]


@triton.jit
@no_type_check
def draw_in_chunk(batch, req, row, drafted, p_dist, q_dist, weight, share, chunk, uniform):
    """Draw a token inside a chunk by weights max(0, w·p − share·q). Reference: core.draw.invert."""
    o = (chunk * CHUNK + tl.arange(0, CHUNK))[None, :]
    w = excess(batch, req, row, drafted, p_dist, q_dist, weight, share, o)
    return chunk * CHUNK + invert_once(tl.reshape(w, (CHUNK,)).to(tl.float64), uniform)
