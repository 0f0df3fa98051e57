"""Closing a round on the device: from p, by thinning, or from the residual in full. Twin: `draftproof.core.closing`."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.core.closing import TRIALS as _TRIALS
from draftproof.kernels.draws import chunk_masses_at, draw_in_chunk, invert, invert_once, slice_of, token_of, tokens_of
from draftproof.kernels.laws import draft_prob_of, probs_of
from draftproof.kernels.layout import SLICE
from draftproof.kernels.noise import CLOSE, THIN, pair, uniform
from draftproof.kernels.residual import excess_sums, sum_excess
from draftproof.kernels.rows import take_draft_before, take_target

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
def thin(batch, req, at, drafted, p_law, q_law, stats, trials):
    """Twin: `token.closing`. From p behind the whole draft, from max(0, p − q) at an earlier node: there by trials.

    `drafted` is the token that stands there, `trials` are those of the first round: rarely are there others.
    """
    masses = chunk_masses_at(batch, req, at, p_law, stats)
    found = tl.full((), -1, tl.int32)
    n = 0
    while (found < 0) & (n < TRIALS // AT_ONCE):
        line, rest = slice_of(batch, req, at, p_law, invert(masses, trials.first), trials.second)
        p, q = _both(batch, req, at, drafted, p_law, q_law, tokens_of(line))
        x, hit = token_of(line * SLICE, p, rest)
        lanes = tl.arange(0, AT_ONCE)
        stands = lanes == 0
        if at < req.length:
            if batch.traits.MAPPED:
                q_x = tl.sum(draft_prob_of(batch, req, at, q_law, drafted, x[:, None]), 1)
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
        found = _in_full(batch, req, at, drafted, p_law, q_law, masses)
    return found


@triton.jit
@no_type_check
def _in_full(batch, req, at, drafted, p_law, q_law, masses):
    """From the residual's own sums; from p, whose masses are given, where these are all 0: p = q up to rounding."""
    one = tl.full((), 1.0, tl.float64)
    sum_excess(batch, req, at, p_law, q_law, one, 0, 1, FEW_CHUNKS)
    tl.debug_barrier()
    c = tl.arange(0, batch.traits.NP)
    sums = tl.load(excess_sums(batch, req, at, c), mask=c < req.C, other=0.0).to(tl.float64)
    some = tl.max(sums, 0) > 0
    first, second = closing_pair(req, TRIALS)
    chunk = invert_once(tl.where(some, sums, masses), first)
    share = tl.where(some, one, 0.0)
    return draw_in_chunk(batch, req, at, drafted, p_law, q_law, one, share, chunk, second)


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
def _both(batch, req, at, drafted, p_law, q_law, o):
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
            q = tl.where(req.draft_temperature > 0, probs_of(y, q_law), q)
    return probs_of(x, p_law), q
