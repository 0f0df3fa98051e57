"""Draw from the residual max(0, w·p − q): by thinning, or from its sums by chunk.

The sums need the rows of logits again and are bound by memory bandwidth.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.core.draw import TRIALS as _TRIALS
from draftproof.kernels.device.distribution import draft_prob_of, draft_stats_at, excess, load_dist_params, probs_of
from draftproof.kernels.device.draw import (
    chunk_masses,
    chunk_masses_at,
    draw_in_chunk,
    invert,
    invert_once,
    slice_of,
    token_of,
    tokens_of,
)
from draftproof.kernels.device.layout import PER_CHUNK, SLICE, WEIGHT
from draftproof.kernels.device.load_stats import row_stats_at
from draftproof.kernels.device.math import LOG2_E, fast_exp2, power
from draftproof.kernels.device.philox import CLOSE, THIN, pair, uniform
from draftproof.kernels.device.rows import dist_row, draft_row, take_draft_before, take_target, target_row, whole_slices
from draftproof.kernels.device.slice_lists import NO_SLICE


@triton.jit
@no_type_check
def excess_sums_at(batch, req, at, c):
    """Return the pointers to the residual's chunk sums; they replace the draft row's own, no longer needed."""
    return batch.chunk_stats + (dist_row(req, req.J + at) * 2 + 1) * req.C + c


@triton.jit
@no_type_check
def sum_excess(batch, req, at, p_dist, q_dist, weight, first, stride, CHUNKS: tl.constexpr):
    """Write the residual's chunk sums: pieces of CHUNKS chunks, `first` and then every `stride`-th.

    Reference: core.draw.chunk_sums of rules.chain.excess. Handles edits, masks, another vocabulary and chosen drafts.
    """
    drafted = tl.load(batch.drafted + req.b * req.K + at)
    for n in range(first, tl.cdiv(req.C, CHUNKS), stride):
        o = tokens_of(_slices(n, CHUNKS))
        each = excess(batch, req, at, drafted, p_dist, q_dist, weight, 1.0, o)
        _write_sums(batch, req, at, n, tl.sum(each, 1), CHUNKS)


@triton.jit
@no_type_check
def sum_saved_excess(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    """Write the residual's chunk sums for distributions whose parameters are stored (see `sum_excess`).

    Fast path when no penalties, mask or vocabulary map apply.
    """
    UNEDITED: tl.constexpr = not (batch.traits.EDITED or batch.traits.MASKED or batch.traits.MAPPED)
    if batch.traits.ALIKE and UNEDITED:
        if req.draft_temperature > 0:
            _sum_plain(batch, req, at, first, stride, CHUNKS)
        else:
            sum_any_excess(batch, req, at, first, stride, CHUNKS)
    else:
        sum_any_excess(batch, req, at, first, stride, CHUNKS)


@triton.jit
@no_type_check
def sum_any_excess(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    """Write the residual's chunk sums with stored parameters, for any logits."""
    p_dist, q_dist = load_dists(batch, req, at, at >= 0)
    sum_excess(batch, req, at, p_dist, q_dist, _weight(batch, req, at), first, stride, CHUNKS)


@triton.jit
@no_type_check
def load_dists(batch, req, node, there):
    """Load the stored parameters of nodes' rows. A cutoff passed by the drafter may exist without any filter."""
    CUT_Q: tl.constexpr = batch.traits.FILTERED or not batch.traits.READ_DRAFT
    q_dist = load_dist_params(draft_stats_at(batch, req, node), there, CUT_Q)
    return load_dist_params(row_stats_at(batch, req, node), there, batch.traits.FILTERED), q_dist


@triton.jit
@no_type_check
def _weight(batch, req, node):
    """Load w of a node."""
    return power(tl.load(row_stats_at(batch, req, node) + WEIGHT).to(tl.float32), LOG2_E)


@triton.jit
@no_type_check
def _sum_plain(batch, req, at, first, stride, CHUNKS: tl.constexpr):
    """Write the residual's chunk sums for unedited logits; the first pieces are loaded before the parameters."""
    x, y = _piece(batch, req, at, first, CHUNKS)
    p_dist, q_dist = load_dists(batch, req, at, at >= 0)
    p, q = _proportion(p_dist), _proportion(q_dist)
    less = -(_weight(batch, req, at) * p.gain / q.gain)  # q's gain is applied to the sums, not to each q
    CUT_Q: tl.constexpr = batch.traits.FILTERED or not batch.traits.READ_DRAFT
    for n in range(first, tl.cdiv(req.C, CHUNKS), stride):
        here, there = _power(x.to(tl.float32), p, batch.traits.FILTERED), _power(y.to(tl.float32), q, CUT_Q)
        missing = tl.minimum(tl.fma(here, less, there), 0.0)  # left negative: a sign change costs an instruction each
        _write_sums(batch, req, at, n, -tl.sum(tl.sum(missing, 2), 1) * q.gain, CHUNKS)
        x, y = _piece(batch, req, at, n + stride, CHUNKS)


@triton.jit
@no_type_check
def _piece(batch, req, at, n, CHUNKS: tl.constexpr):
    """Load the logits of both rows in piece n, which may be after the end."""
    begin = _slices(n, CHUNKS) * SLICE
    if batch.traits.FILTERED:  # where p = 0 the residual is 0: most slices need not be read
        begin = tl.where(_has_mass(batch, req, at, _slices(n, CHUNKS)), begin, NO_SLICE * SLICE)
    x = whole_slices(target_row(batch, req, at), begin, batch.sizes.V, batch.traits.SEGMENT)
    return x, whole_slices(draft_row(batch, req, at), begin, batch.sizes.R, batch.traits.SEGMENT)


@triton.jit
@no_type_check
def _has_mass(batch, req, at, which):
    """Return whether p is positive anywhere in slices of a row."""
    count = req.C * PER_CHUNK
    masses = batch.slice_stats + (dist_row(req, at) * 2 + 1) * count
    return tl.load(masses + which, mask=which < count, other=0.0) > 0


@triton.jit
@no_type_check
def _slices(n, CHUNKS: tl.constexpr):
    """Return the slices of piece n."""
    return tl.arange(0, CHUNKS * PER_CHUNK) + n * CHUNKS * PER_CHUNK


@triton.jit
@no_type_check
def _write_sums(batch, req, at, n, each, CHUNKS: tl.constexpr):
    """Store the sums of piece n's chunks; `each`: the sums of their slices."""
    chunks = tl.arange(0, CHUNKS) + n * CHUNKS
    sums = tl.sum(tl.reshape(each, (CHUNKS, PER_CHUNK)), 1)
    tl.store(excess_sums_at(batch, req, at, chunks), sums, mask=chunks < req.C)


class Proportion(NamedTuple):
    """A distribution for many logits: 2^(x · slope − offset) · gain, one fma and one exp2; 0 below the cutoff."""

    slope: Any
    offset: Any
    gain: Any
    cutoff: Any


@triton.jit
@no_type_check
def _proportion(dist):
    """Return the parameters as a `Proportion`. Reference: core.distribution.powers.

    The gain corrects for the rounding of the offset.
    """
    offset = dist.centre * dist.slope
    gain = dist.gain * tl.exp2(tl.fma(-dist.centre, dist.slope, offset))
    return Proportion(slope=dist.slope, offset=offset, gain=gain, cutoff=dist.cutoff)


@triton.jit
@no_type_check
def _power(x, dist, CUT: tl.constexpr):
    """Return the weights of logits x without the gain."""
    w = fast_exp2(tl.fma(x, dist.slope, -dist.offset))
    if CUT:
        w = tl.where(x < dist.cutoff, 0.0, w)
    return w


TRIALS = tl.constexpr(_TRIALS)  # all side by side, two per warp
TOKEN_LIMIT = tl.constexpr(2**24)  # above any token: trial and token are packed into one integer


class Trials(NamedTuple):
    """Random numbers of the trials [TRIALS]: two for each draw, and one for its acceptance."""

    first: Any
    second: Any
    coin: Any


@triton.jit
@no_type_check
def trials_of(req):
    """Draw the random numbers of the trials."""
    lanes = tl.arange(0, TRIALS)
    first, second = pair(req.seed, req.start, CLOSE, lanes, 0)
    return Trials(first=first, second=second, coin=uniform(req.seed, req.start, THIN, lanes, 0))


@triton.jit
@no_type_check
def thin(batch, req, at, drafted, p_dist, q_dist, stats, trials):
    """Draw the last token of a token-rule round by thinning; -1 if no trial was accepted.

    After the whole draft the bonus token is drawn from p; at an earlier node the residual token is drawn from max(0, p
    − q) by trials. `drafted` is the rejected draft token. Reference: rules.token.closing.
    """
    masses = chunk_masses_at(batch, req, at, p_dist, stats)
    line, rest = slice_of(batch, req, at, p_dist, invert(masses, trials.first), trials.second)
    p, q = _p_and_q(batch, req, at, drafted, p_dist, q_dist, tokens_of(line))
    x, hit = token_of(line * SLICE, p, rest)
    lanes = tl.arange(0, TRIALS)
    accepted = lanes == 0
    if at < req.length:
        if batch.traits.MAPPED:
            q_x = tl.sum(draft_prob_of(batch, req, at, q_dist, drafted, x[:, None]), 1)
        else:
            q_x = _at_hit(q, hit)
        p_x = _at_hit(p, hit)
        accepted = trials.coin * p_x.to(tl.float64) < (p_x - q_x).to(tl.float64)
    first = tl.min(tl.where(accepted, lanes * TOKEN_LIMIT + x, TRIALS * TOKEN_LIMIT), 0)
    return tl.where(first < TRIALS * TOKEN_LIMIT, first % TOKEN_LIMIT, -1)


@triton.jit
@no_type_check
def draw_residual(batch, req, at):
    """Draw from the stored sums of the residual max(0, p − q); from p if they are all 0: p = q up to rounding."""
    p_dist, q_dist = load_dists(batch, req, at, at >= 0)
    drafted = tl.load(batch.drafted + req.b * req.K + at)
    c = tl.arange(0, batch.traits.NP)
    sums = tl.load(excess_sums_at(batch, req, at, c), mask=c < req.C, other=0.0).to(tl.float64)
    some = tl.max(sums, 0) > 0
    first, second = last_token_uniforms(req, TRIALS)
    if not some:
        sums = chunk_masses(batch, req, at, p_dist)
    chunk = invert_once(sums, first)
    one = tl.full((), 1.0, tl.float64)
    return draw_in_chunk(batch, req, at, drafted, p_dist, q_dist, one, tl.where(some, one, 0.0), chunk, second)


@triton.jit
@no_type_check
def last_token_uniforms(req, LANE: tl.constexpr):
    """Draw the two uniform numbers for the round's last token."""
    first, second = pair(req.seed, req.start, CLOSE, tl.arange(0, 1) + LANE, 0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
@no_type_check
def _at_hit(x, hit):
    """Select the float32 entry of each line of x [T, W] at `hit`, as bits: integers reduce in one instruction, not
    five."""
    return tl.sum(tl.where(hit, x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _p_and_q(batch, req, at, drafted, p_dist, q_dist, o):
    """Return p and q of all tokens that a trial may draw.

    Both rows are loaded before either is used: loading q after the draw would add one memory latency. q is arbitrary
    where it does not matter.
    """
    rows = at + tl.zeros([o.shape[0]], tl.int32)
    x = take_target(batch, req, rows, o)
    q = x
    if not batch.traits.MAPPED:
        q = (o == drafted).to(tl.float32)
        if batch.traits.DRAWN:
            weighed = (at < req.length) & (req.draft_temperature > 0)
            row = tl.minimum(rows, req.K - 1)  # after the whole draft there is no draft row
            y = take_draft_before(batch, req, row, o, tl.where(weighed, batch.sizes.R, 0))
            q = tl.where(req.draft_temperature > 0, probs_of(y, q_dist), q)
    return probs_of(x, p_dist), q
