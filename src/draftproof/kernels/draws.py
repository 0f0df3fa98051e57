"""Drawing a token on the device: an inverse CDF in two steps. Twin: `draftproof.core.draw`.

The second step, inside a chunk, is taken in two as well, by slice and by token: the sums are float64, so that it comes
to the same, and the slices' sums tell where to look.
"""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import LN_2, power
from draftproof.kernels.laws import excess
from draftproof.kernels.layout import PER_CHUNK, SLICE
from draftproof.kernels.request import law_row


@triton.jit
@no_type_check
def target_running(batch, req, row, law):
    """Running sums, float64, of a target row's mass by chunk, from its stats. Twin: the first line of `draw.invert`."""
    C = batch.sizes.C
    c = tl.arange(0, batch.traits.NP)
    stats = batch.stats + law_row(batch, req, row) * 2 * C + c
    m = tl.load(stats, mask=c < C, other=float("-inf")).to(tl.float64)
    s = tl.load(stats + C, mask=c < C, other=0.0).to(tl.float64)
    return tl.cumsum(s * tl.exp((m - law.centre.to(tl.float64)) * (law.slope.to(tl.float64) * LN_2)), 0)


@triton.jit
@no_type_check
def invert(running, uniform):
    """Twin: `draw.invert`. The index for one number in running sums [N]."""
    total = tl.max(running, 0)
    last = tl.sum((running < total).to(tl.int32), 0)
    return tl.minimum(tl.sum((running <= uniform * total).to(tl.int32), 0), last)


@triton.jit
@no_type_check
def invert_each(memory, running, uniform, NP: tl.constexpr):
    """Twin: `draw.invert`. The index for each of `uniform` [T], by bisection: `running` [NP] stands in memory too."""
    total = tl.max(running, 0)
    last = tl.sum((running < total).to(tl.int32), 0)
    goal = uniform * total
    found = tl.zeros(uniform.shape, tl.int32)
    for n in tl.static_range(1, 10):  # 2⁹ chunks are the most there are
        if (NP >> n) > 0:
            found += tl.where(tl.load(memory + found + (NP >> n) - 1) <= goal, NP >> n, 0)
    found += tl.where(tl.load(memory + found) <= goal, 1, 0)
    return tl.minimum(found, last)


@triton.jit
@no_type_check
def slice_of(batch, req, row, law, chunk, uniform):
    """Twin: `draw.invert` inside each of `chunk` [T], as far as its slice: which one, and how much mass lies before
    the number inside it. The slices' sums are those of the scan."""
    n = batch.sizes.C * PER_CHUNK
    part = tl.arange(0, PER_CHUNK)[None, :]
    at = batch.slices + law_row(batch, req, row) * 2 * n + chunk[:, None] * PER_CHUNK + part
    there = chunk[:, None] * PER_CHUNK + part < n
    m = tl.load(at, mask=there, other=float("-inf"))
    s = tl.load(at + n, mask=there, other=0.0)
    w = (s * power(m - law.centre, law.slope) * law.gain).to(tl.float64)
    total = tl.sum(w, 1)
    goal = uniform * total
    which, last = tl.zeros(chunk.shape, tl.int32), tl.zeros(chunk.shape, tl.int32)
    for i in tl.static_range(PER_CHUNK):
        running = tl.sum(tl.where(part <= i, w, 0.0), 1)
        which += (running <= goal).to(tl.int32)
        last += (running < total).to(tl.int32)
    which = tl.minimum(which, last)
    return chunk * PER_CHUNK + which, goal - tl.sum(tl.where(part < which[:, None], w, 0.0), 1)


@triton.jit
@no_type_check
def token_of(line, w, rest):
    """Inside slices `line` [T] of weights w [T, SLICE]: the token that `rest` mass falls on, and its weight."""
    running = tl.cumsum(w.to(tl.float64), 1)
    last = tl.sum((running < tl.max(running, 1)[:, None]).to(tl.int32), 1)
    offset = tl.minimum(tl.sum((running <= rest[:, None]).to(tl.int32), 1), last)
    hit = tl.arange(0, SLICE)[None, :] == offset[:, None]
    return line * SLICE + offset, tl.sum(tl.where(hit, w, 0.0), 1)


@triton.jit
@no_type_check
def tokens_of(lines):
    """The tokens of these slices: [S] to [S, SLICE]."""
    return lines[:, None] * SLICE + tl.arange(0, SLICE)[None, :]


@triton.jit
@no_type_check
def draw_in_chunk(batch, req, row, p_law, q_law, weight, share, chunk, uniform):
    """Twin: `draw.invert` inside one chunk of weights max(0, w·p − share·q)."""
    lines = chunk * PER_CHUNK + tl.arange(0, PER_CHUNK)
    w = excess(batch, req, row, p_law, q_law, weight, share, tokens_of(lines))
    sums = tl.sum(w.to(tl.float64), 1)
    goal = uniform * tl.sum(sums, 0)
    which, last, running = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.float64)
    total = tl.sum(sums, 0)
    part = tl.arange(0, PER_CHUNK)
    for i in tl.static_range(PER_CHUNK):
        running = tl.sum(tl.where(part <= i, sums, 0.0), 0)
        which += (running <= goal).to(tl.int32)
        last += (running < total).to(tl.int32)
    which = tl.minimum(which, last)
    rest = goal - tl.sum(tl.where(part < which, sums, 0.0), 0)
    inside = tl.sum(tl.where(part[:, None] == which, w, 0.0), 0)
    line = chunk * PER_CHUNK + which + tl.zeros([1], tl.int32)
    x, _ = token_of(line, inside[None, :], rest + tl.zeros([1], tl.float64))
    return tl.sum(x, 0)
