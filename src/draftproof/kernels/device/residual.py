"""The residual's sums by chunk, of max(0, w·p − q): for these rows of logits are read again, as fast as they come."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.core.draw import TRIALS as _TRIALS
from draftproof.kernels.device.cutoff import NOWHERE
from draftproof.kernels.device.distribution import draft_line_of, draft_prob_of, excess, probs_of, written_numbers
from draftproof.kernels.device.draw import (
    chunk_masses_at,
    draw_in_chunk,
    invert,
    invert_once,
    slice_of,
    token_of,
    tokens_of,
)
from draftproof.kernels.device.layout import PER_CHUNK, SLICE, WEIGHT
from draftproof.kernels.device.math import LOG2_E, near_exp2, power
from draftproof.kernels.device.philox import CLOSE, THIN, pair, uniform
from draftproof.kernels.device.rows import dist_row, draft_row, take_draft_before, take_target, target_row, whole_slices
from draftproof.kernels.device.stats import line_of


@triton.jit
@no_type_check
def excess_sums(batch, req, at, c):
    """Where the residual's chunk sums stand: with the draft row, whose own sums are no longer needed."""
    return batch.stats + (dist_row(req, req.J + at) * 2 + 1) * req.C + c


@triton.jit
@no_type_check
def sum_excess(batch, req, at, p_dist, q_dist, weight, first, stride, CHUNKS: tl.constexpr):
    """Twin: `draw.chunk_sums` of `chain.excess`, written down: of pieces of CHUNKS chunks, the first-th and then every
    stride-th. Of whatever there may be: edits, masks, another vocabulary, a draft that was chosen."""
    drafted = tl.load(batch.drafted + req.b * req.K + at)
    for n in range(first, tl.cdiv(req.C, CHUNKS), stride):
        o = tokens_of(_slices(n, CHUNKS))
        each = excess(batch, req, at, drafted, p_dist, q_dist, weight, 1.0, o)
        _write_sums(batch, req, at, n, tl.sum(each, 1), CHUNKS)


@triton.jit
@no_type_check
def sum_written(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    """The same of distributions that are written down, and faster of logits that are as they are, which is how most are."""
    AS_THEY_ARE: tl.constexpr = not (batch.traits.EDITED or batch.traits.MASKED or batch.traits.MAPPED)
    if batch.traits.ALIKE and AS_THEY_ARE:
        if req.draft_temperature > 0:
            _sum_plain(batch, req, at, first, stride, CHUNKS)
        else:
            _sum_others(batch, req, at, first, stride, CHUNKS)
    else:
        _sum_others(batch, req, at, first, stride, CHUNKS)


@triton.jit
@no_type_check
def _sum_others(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    p_dist, q_dist = written_dists(batch, req, at, at >= 0)
    sum_excess(batch, req, at, p_dist, q_dist, _weight(batch, req, at), first, stride, CHUNKS)


@triton.jit
@no_type_check
def written_dists(batch, req, node, there):
    """What is written down of nodes' rows. Cutoffs that were handed over stand there without any filter as well."""
    CUT_Q: tl.constexpr = batch.traits.FILTERED or not batch.traits.READ_DRAFT
    q_dist = written_numbers(draft_line_of(batch, req, node), there, CUT_Q)
    return written_numbers(line_of(batch, req, node), there, batch.traits.FILTERED), q_dist


@triton.jit
@no_type_check
def _weight(batch, req, node):
    return power(tl.load(line_of(batch, req, node) + WEIGHT).to(tl.float32), LOG2_E)


@triton.jit
@no_type_check
def _sum_plain(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    """Every row is read in long pieces, the first of which are on their way before the distributions are asked for."""
    x, y = _piece(batch, req, at, first, CHUNKS)
    p_dist, q_dist = written_dists(batch, req, at, at >= 0)
    p, q = _proportion(p_dist), _proportion(q_dist)
    less = -(_weight(batch, req, at) * p.gain / q.gain)  # the sums, not each q, are then put right by its gain
    CUT_Q: tl.constexpr = batch.traits.FILTERED or not batch.traits.READ_DRAFT
    for n in range(first, tl.cdiv(req.C, CHUNKS), stride):
        here, there = _power(x.to(tl.float32), p, batch.traits.FILTERED), _power(y.to(tl.float32), q, CUT_Q)
        missing = tl.minimum(tl.fma(here, less, there), 0.0)  # of negative sign: to change it costs a step for each
        _write_sums(batch, req, at, n, -tl.sum(tl.sum(missing, 2), 1) * q.gain, CHUNKS)
        x, y = _piece(batch, req, at, n + stride, CHUNKS)


@triton.jit
@no_type_check
def _piece(batch, req, at, n, CHUNKS: tl.constexpr):
    """Logits of both rows in piece n, of which there may be none."""
    begin = _slices(n, CHUNKS) * SLICE
    if batch.traits.FILTERED:  # where p has nothing, no more is missing: of most slices, which are not read
        begin = tl.where(_has_mass(batch, req, at, _slices(n, CHUNKS)), begin, NOWHERE * SLICE)
    x = whole_slices(target_row(batch, req, at), begin, batch.sizes.V, batch.traits.SEGMENT)
    return x, whole_slices(draft_row(batch, req, at), begin, batch.sizes.R, batch.traits.SEGMENT)


@triton.jit
@no_type_check
def _has_mass(batch, req, at, which):
    """Whether p gives anything to slices of a row."""
    count = req.C * PER_CHUNK
    masses = batch.slices + (dist_row(req, at) * 2 + 1) * count
    return tl.load(masses + which, mask=which < count, other=0.0) > 0


@triton.jit
@no_type_check
def _slices(n, CHUNKS: tl.constexpr):
    """Of piece n."""
    return tl.arange(0, CHUNKS * PER_CHUNK) + n * CHUNKS * PER_CHUNK


@triton.jit
@no_type_check
def _write_sums(batch, req, at, n, each, CHUNKS: tl.constexpr):
    """Of the chunks of piece n; `each`: the sums of their slices."""
    chunks = tl.arange(0, CHUNKS) + n * CHUNKS
    sums = tl.sum(tl.reshape(each, (CHUNKS, PER_CHUNK)), 1)
    tl.store(excess_sums(batch, req, at, chunks), sums, mask=chunks < req.C)


class Proportion(NamedTuple):
    """A distribution for many logits: 2^(x · slope − offset) · gain, one step and a power; 0 below the cutoff."""

    slope: Any
    offset: Any
    gain: Any
    cutoff: Any


@triton.jit
@no_type_check
def _proportion(dist):
    """Twin: `distribution.powers`. The rounding of the offset is left to the gain."""
    offset = dist.centre * dist.slope
    gain = dist.gain * tl.exp2(tl.fma(-dist.centre, dist.slope, offset))
    return Proportion(slope=dist.slope, offset=offset, gain=gain, cutoff=dist.cutoff)


@triton.jit
@no_type_check
def _power(x, dist, CUT: tl.constexpr):
    w = near_exp2(tl.fma(x, dist.slope, -dist.offset))
    if CUT:
        w = tl.where(x < dist.cutoff, 0.0, w)
    return w


TRIALS = tl.constexpr(_TRIALS)
FEW_CHUNKS = tl.constexpr(2)  # that a single program reads at a time: it is done so rarely that it must not take room
ANY_TOKEN = tl.constexpr(2**24)  # more than there are: a trial and its token are one number, and found together
AT_ONCE = tl.constexpr(16)  # trials side by side, two a warp: which one stands does not depend on it


class Trials(NamedTuple):
    """Numbers of a round of trials [AT_ONCE]: two for the draw of each, and one on whether it stands."""

    first: Any
    second: Any
    coin: Any


@triton.jit
@no_type_check
def trials_of(req, n):
    """Of the n-th round."""
    lanes = n * AT_ONCE + tl.arange(0, AT_ONCE)
    first, second = pair(req.seed, req.start, CLOSE, lanes, 0)
    return Trials(first=first, second=second, coin=uniform(req.seed, req.start, THIN, lanes, 0))


@triton.jit
@no_type_check
def thin(batch, req, at, drafted, p_dist, q_dist, stats, trials):
    """Twin: `token.closing`. From p behind the whole draft, from max(0, p − q) at an earlier node: there by trials.

    `drafted` is the token that stands there, `trials` are those of the first round: rarely are there others.
    """
    masses = chunk_masses_at(batch, req, at, p_dist, stats)
    found = tl.full((), -1, tl.int32)
    n = 0
    while (found < 0) & (n < TRIALS // AT_ONCE):
        line, rest = slice_of(batch, req, at, p_dist, invert(masses, trials.first), trials.second)
        p, q = _both(batch, req, at, drafted, p_dist, q_dist, tokens_of(line))
        x, hit = token_of(line * SLICE, p, rest)
        lanes = tl.arange(0, AT_ONCE)
        stands = lanes == 0
        if at < req.length:
            if batch.traits.MAPPED:
                q_x = tl.sum(draft_prob_of(batch, req, at, q_dist, drafted, x[:, None]), 1)
            else:
                q_x = _at_hit(q, hit)
            p_x = _at_hit(p, hit)
            stands = trials.coin * p_x.to(tl.float64) < (p_x - q_x).to(tl.float64)
        first = tl.min(tl.where(stands, lanes * ANY_TOKEN + x, AT_ONCE * ANY_TOKEN), 0)
        n += 1
        if first < AT_ONCE * ANY_TOKEN:
            found = first % ANY_TOKEN
        else:
            trials = trials_of(req, n)
    if found < 0:
        found = _in_full(batch, req, at, drafted, p_dist, q_dist, masses)
    return found


@triton.jit
@no_type_check
def _in_full(batch, req, at, drafted, p_dist, q_dist, masses):
    """From the residual's own sums; from p, whose masses are given, where these are all 0: p = q up to rounding."""
    one = tl.full((), 1.0, tl.float64)
    sum_excess(batch, req, at, p_dist, q_dist, one, 0, 1, FEW_CHUNKS)
    tl.debug_barrier()
    c = tl.arange(0, batch.traits.NP)
    sums = tl.load(excess_sums(batch, req, at, c), mask=c < req.C, other=0.0).to(tl.float64)
    some = tl.max(sums, 0) > 0
    first, second = closing_pair(req, TRIALS)
    chunk = invert_once(tl.where(some, sums, masses), first)
    share = tl.where(some, one, 0.0)
    return draw_in_chunk(batch, req, at, drafted, p_dist, q_dist, one, share, chunk, second)


@triton.jit
@no_type_check
def closing_pair(req, LANE: tl.constexpr):
    """Two numbers for one draw."""
    first, second = pair(req.seed, req.start, CLOSE, tl.arange(0, 1) + LANE, 0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
@no_type_check
def _at_hit(x, hit):
    """The one number of each line of x [T, W], float32, where `hit` is. As bits: whole numbers are added up in one
    step, others in five."""
    return tl.sum(tl.where(hit, x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _both(batch, req, at, drafted, p_dist, q_dist, o):
    """p and q of all tokens that a trial may draw: to wait for q until one is drawn would be to wait twice, and so
    would working on one before the other is asked for. What q is where it does not matter is left open."""
    rows = at + tl.zeros([o.shape[0]], tl.int32)
    x = take_target(batch, req, rows, o)
    q = x
    if not batch.traits.MAPPED:
        q = (o == drafted).to(tl.float32)
        if batch.traits.DRAWN:
            weighed = (at < req.length) & (req.draft_temperature > 0)
            row = tl.minimum(rows, req.K - 1)  # behind the whole draft there is none
            y = take_draft_before(batch, req, row, o, tl.where(weighed, batch.sizes.R, 0))
            q = tl.where(req.draft_temperature > 0, probs_of(y, q_dist), q)
    return probs_of(x, p_dist), q
