"""Drawing a token on the device: an inverse CDF in two steps. Twin: `draftproof.core.draw`.

The second step, inside a chunk, is taken in two as well, by slice and by token: the sums are float64, so that it comes
to the same, and the slices' sums tell where to look.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.device.distribution import excess
from draftproof.kernels.device.layout import CHUNK, PER_CHUNK, SLICE
from draftproof.kernels.device.math import LN_2, power
from draftproof.kernels.device.rows import dist_row

SIDE_BY_SIDE = tl.constexpr(8)  # rows whose chunks are looked at together


@triton.jit
@no_type_check
def chunk_masses(batch, req, row, dist):
    """A target row's mass by chunk, float64, in proportion, from its stats. Twin: `draw.chunk_sums`."""
    C = req.C
    c = tl.arange(0, batch.traits.NP)
    stats = batch.stats + dist_row(req, row) * 2 * C + c
    m = tl.load(stats, mask=c < C, other=float("-inf"))
    return _masses(m, tl.load(stats + C, mask=c < C, other=0.0), dist)


@triton.jit
@no_type_check
def _masses(m, s, dist):
    return s.to(tl.float64) * tl.exp(
        (m.to(tl.float64) - dist.centre.to(tl.float64)) * (dist.slope.to(tl.float64) * LN_2)
    )


class Stats(NamedTuple):
    """Of the chunks of several target rows, largest logit and mass: a tensor [NP] each for every row."""

    m: Any
    s: Any


@triton.jit
@no_type_check
def chunk_stats(batch, req):
    """Of all target rows of a short draft, to be there when it is known which of them matters; of a long one, none.

    A tensor for each row: which of them is then chosen inside every thread, where a tensor of all would be summed over.
    """
    m, s = (), ()
    if batch.traits.KP <= SIDE_BY_SIDE:
        c = tl.arange(0, batch.traits.NP)
        for i in tl.static_range(batch.traits.KP):
            stats = batch.stats + dist_row(req, i) * 2 * req.C + c
            there = c < tl.where(i <= req.length, req.C, 0)
            m += (tl.load(stats, mask=there, other=float("-inf")),)
            s += (tl.load(stats + req.C, mask=there, other=0.0),)
    return Stats(m=m, s=s)


@triton.jit
@no_type_check
def chunk_masses_at(batch, req, row, dist, stats):
    """`chunk_masses`, of what was loaded already where it was."""
    if batch.traits.KP <= SIDE_BY_SIDE:
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
    """Twin: `draw.invert`. The index in sums [N], float64, for each number of `uniform` [T].

    Their total is a normal number, and those of `uniform` are at most 1 − 2⁻⁵³: the product is less than the total,
    when it is rounded as well. So it never has to be held back to the last index of any weight, as the twin does.
    """
    LAST: tl.constexpr = sums.shape[0] - 1
    running = tl.cumsum(sums, 0)
    total = tl.gather(running, tl.full(uniform.shape, LAST, tl.int32), 0)
    passed = running[:, None] <= (uniform * total)[None, :]  # the long axis first: most of it is one thread's then
    return tl.minimum(tl.sum(passed.to(tl.int32), 0), LAST)


@triton.jit
@no_type_check
def invert_once(sums, uniform):
    """The same for one number, and an index; 0 where there is no mass at all."""
    LAST: tl.constexpr = sums.shape[0] - 1
    running = tl.cumsum(sums, 0)
    total = tl.sum(tl.gather(running, tl.full([1], LAST, tl.int32), 0), 0)
    index = tl.sum((running <= uniform * total).to(tl.int32), 0)
    return tl.where(index > LAST, 0, index)


@triton.jit
@no_type_check
def slice_of(batch, req, row, dist, chunk, uniform):
    """Twin: `draw.invert` inside each of `chunk` [T], as far as its slice: which one, and how much mass lies before
    the number inside it. The slices' sums are those of the scan."""
    n = req.C * PER_CHUNK
    first = chunk * PER_CHUNK
    at = batch.slices + dist_row(req, row) * 2 * n + first
    total = tl.zeros(chunk.shape, tl.float64)
    sums = ()  # up to and with each slice: a thread has all those of its chunks
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
    """In stretches that begin at tokens `begin` [T], of weights w [T, W]: the token that `rest` mass falls on, and
    where among these it stands, [T, W]."""
    place = tl.arange(0, w.shape[1])[None, :]
    running = tl.cumsum(w.to(tl.float64), 1)
    last = tl.max(tl.where(w > 0, place, 0), 1)  # for this nobody waits: it does not depend on the running sums
    offset = tl.minimum(tl.sum((running <= rest[:, None]).to(tl.int32), 1), last)
    return begin + offset, place == offset[:, None]


@triton.jit
@no_type_check
def tokens_of(lines):
    """The tokens of these slices: [S] to [S, SLICE]."""
    return lines[:, None] * SLICE + tl.arange(0, SLICE)[None, :]


@triton.jit
@no_type_check
def draw_in_chunk(batch, req, row, drafted, p_dist, q_dist, weight, share, chunk, uniform):
    """Twin: `draw.invert` inside a chunk of weights max(0, w·p − share·q)."""
    o = (chunk * CHUNK + tl.arange(0, CHUNK))[None, :]
    w = excess(batch, req, row, drafted, p_dist, q_dist, weight, share, o)
    return chunk * CHUNK + invert_once(tl.reshape(w, (CHUNK,)).to(tl.float64), uniform)
