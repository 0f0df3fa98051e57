"""Drawing a token on the device: an inverse CDF in two steps. Twin: `draftproof.core.draw`.

The second step, inside a chunk, is taken in two as well, by slice and by token: the sums are float64, so that it comes
to the same, and the slices' sums tell where to look.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.exponent import LN_2, power
from draftproof.kernels.laws import excess
from draftproof.kernels.layout import CHUNK, PER_CHUNK, SLICE
from draftproof.kernels.request import law_row

SIDE_BY_SIDE = tl.constexpr(8)  # rows whose chunks are looked at together


@triton.jit
@no_type_check
def chunk_masses(batch, req, row, law):
    """A target row's mass by chunk, float64, in proportion, from its stats. Twin: `draw.chunk_sums`."""
    C = req.C
    c = tl.arange(0, batch.traits.NP)
    stats = batch.stats + law_row(req, row) * 2 * C + c
    m = tl.load(stats, mask=c < C, other=float("-inf"))
    return _masses(m, tl.load(stats + C, mask=c < C, other=0.0), law)


@triton.jit
@no_type_check
def _masses(m, s, law):
    return s.to(tl.float64) * tl.exp((m.to(tl.float64) - law.centre.to(tl.float64)) * (law.slope.to(tl.float64) * LN_2))


class Stats(NamedTuple):
    """Of the chunks of several target rows [KP, NP]: largest logit and mass."""

    m: Any
    s: Any


@triton.jit
@no_type_check
def chunk_stats(batch, req):
    """Of all target rows of a short draft, to be there when it is known which of them matters; of a long one, the
    first row's, which stands for nothing."""
    C = req.C
    SEVERAL: tl.constexpr = batch.traits.KP if batch.traits.KP <= SIDE_BY_SIDE else 1
    i, c = tl.arange(0, SEVERAL)[:, None], tl.arange(0, batch.traits.NP)[None, :]
    there = (i <= req.length) & (c < C)
    stats = batch.stats + law_row(req, i) * 2 * C + c
    return Stats(m=tl.load(stats, mask=there, other=float("-inf")), s=tl.load(stats + C, mask=there, other=0.0))


@triton.jit
@no_type_check
def chunk_masses_at(batch, req, row, law, stats):
    """`chunk_masses`, of what was loaded already where it was."""
    if batch.traits.KP <= SIDE_BY_SIDE:
        here = tl.arange(0, batch.traits.KP)[:, None] == row
        m, s = tl.sum(tl.where(here, stats.m, 0.0), 0), tl.sum(tl.where(here, stats.s, 0.0), 0)
        masses = _masses(m, s, law)
    else:
        masses = chunk_masses(batch, req, row, law)
    return masses


@triton.jit
@no_type_check
def invert(sums, uniform):
    """Twin: `draw.invert`. The index in sums [N], float64, for each number of `uniform` [T]."""
    running = tl.cumsum(sums, 0)
    total = tl.max(running, 0)
    last = tl.sum((running < total).to(tl.int32), 0)
    passed = running[:, None] <= (uniform * total)[None, :]  # the long axis first: most of it is one thread's then
    return tl.minimum(tl.sum(passed.to(tl.int32), 0), last)


@triton.jit
@no_type_check
def slice_of(batch, req, row, law, chunk, uniform):
    """Twin: `draw.invert` inside each of `chunk` [T], as far as its slice: which one, and how much mass lies before
    the number inside it. The slices' sums are those of the scan."""
    n = req.C * PER_CHUNK
    part = tl.arange(0, PER_CHUNK)[None, :]
    at = batch.slices + law_row(req, row) * 2 * n + chunk[:, None] * PER_CHUNK + part
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
def token_of(begin, w, rest):
    """In stretches that begin at tokens `begin` [T], of weights w [T, W]: the token that `rest` mass falls on, and
    where among these it stands, [T, W]."""
    running = tl.cumsum(w.to(tl.float64), 1)
    last = tl.sum((running < tl.max(running, 1)[:, None]).to(tl.int32), 1)
    offset = tl.minimum(tl.sum((running <= rest[:, None]).to(tl.int32), 1), last)
    return begin + offset, tl.arange(0, w.shape[1])[None, :] == offset[:, None]


@triton.jit
@no_type_check
def tokens_of(lines):
    """The tokens of these slices: [S] to [S, SLICE]."""
    return lines[:, None] * SLICE + tl.arange(0, SLICE)[None, :]


@triton.jit
@no_type_check
def draw_in_chunk(batch, req, row, p_law, q_law, weight, share, chunk, uniform):
    """Twin: `draw.invert` inside each of `chunk` [T] of weights max(0, w·p − share·q)."""
    begin = chunk * CHUNK
    w = excess(batch, req, row, p_law, q_law, weight, share, begin[:, None] + tl.arange(0, CHUNK)[None, :])
    x, _ = token_of(begin, w, uniform * tl.sum(w.to(tl.float64), 1))
    return x
