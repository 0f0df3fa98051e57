"""Closing a round on the device: from p, by thinning, or from the residual in full. Twin: `draftproof.core.closing`."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.core.closing import TRIALS as _TRIALS
from draftproof.kernels.draws import chunk_masses_at, draw_in_chunk, invert, slice_of, token_of, tokens_of
from draftproof.kernels.exponent import near_exp2
from draftproof.kernels.laws import draft_prob_of, excess, probs_of
from draftproof.kernels.layout import PER_CHUNK, SLICE
from draftproof.kernels.noise import CLOSE, THIN, pair, uniform
from draftproof.kernels.request import law_row
from draftproof.kernels.rows import draft_row, segment_tokens, take_draft_before, take_target, target_row, whole_slices

TRIALS = tl.constexpr(_TRIALS)
FEW_CHUNKS = tl.constexpr(2)  # that a single program reads at a time: it is done so rarely that it must not take room
ANY_TOKEN = tl.constexpr(2**24)  # more than there are: a trial and its token are one number, and found together
AT_ONCE = tl.constexpr(8)  # trials side by side, one a warp: which one stands does not depend on it


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
        one = tl.full((), 1.0, tl.float64)
        for c in range(0, req.C, FEW_CHUNKS):
            sum_excess(batch, req, at, p_law, q_law, one, c, FEW_CHUNKS)
        tl.debug_barrier()
        found = draw_excess(batch, req, at, p_law, q_law, one, one, masses, TRIALS)
    return found


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


@triton.jit
@no_type_check
def excess_sums(batch, req, at, c):
    """Where the residual's chunk sums stand: with the draft row, whose own sums are no longer needed."""
    return batch.stats + (law_row(req, req.J + at) * 2 + 1) * req.C + c


@triton.jit
@no_type_check
def sum_excess(batch, req, at, p_law, q_law, weight, c, CHUNKS: tl.constexpr):
    """Twin: `draw.chunk_sums` of `chain.excess`, for CHUNKS chunks from c on, written down."""
    lines = c * PER_CHUNK + tl.arange(0, CHUNKS * PER_CHUNK)
    AS_THEY_ARE: tl.constexpr = not (batch.traits.EDITED or batch.traits.MASKED or batch.traits.MAPPED)
    if batch.traits.ALIKE and batch.traits.DRAWN and AS_THEY_ARE:
        each = _plain_excess(batch, req, at, p_law, q_law, weight.to(tl.float32), lines * SLICE)
    else:
        each = tl.sum(excess(batch, req, at, p_law, q_law, weight, 1.0, tokens_of(lines)), 1)
    chunks = c + tl.arange(0, CHUNKS)
    sums = tl.sum(tl.reshape(each, (CHUNKS, PER_CHUNK)), 1)
    tl.store(excess_sums(batch, req, at, chunks), sums, mask=chunks < req.C)


@triton.jit
@no_type_check
def _plain_excess(batch, req, at, p_law, q_law, weight, begin):
    """Sums of `excess` over the slices that begin at `begin`, of logits as they are: every row read in long pieces."""
    SEGMENT: tl.constexpr = batch.traits.SEGMENT
    x = whole_slices(target_row(batch, req, at), begin, batch.sizes.V, SEGMENT)
    y = whole_slices(draft_row(batch, req, at), begin, batch.sizes.R, SEGMENT)
    p, p_gain = _in_proportion(x.to(tl.float32), p_law, batch.traits.FILTERED)
    q, q_gain = _in_proportion(y.to(tl.float32), q_law, batch.traits.FILTERED)
    if req.draft_temperature == 0:  # a point mass, at least p where it is and nothing elsewhere
        point = tl.load(batch.drafted + req.b * req.K + at).to(tl.int32)
        p, q = tl.where(segment_tokens(begin, SEGMENT) == point, 0.0, p), tl.zeros_like(q)
    return tl.sum(tl.sum(tl.maximum(tl.fma(p, p_gain * weight, -q * q_gain), 0.0), 2), 1)


@triton.jit
@no_type_check
def _in_proportion(x, law, FILTERED: tl.constexpr):
    """Twin: `law.powers`, weights and factor. The exponent in one step; its offset's rounding is left to the factor."""
    offset = law.centre * law.slope
    w = near_exp2(tl.fma(x, law.slope, -offset))
    if FILTERED:
        w = tl.where(x < law.cutoff, 0.0, w)
    return w, law.gain * tl.exp2(tl.fma(-law.centre, law.slope, offset))


@triton.jit
@no_type_check
def draw_excess(batch, req, at, p_law, q_law, weight, share, masses, LANE: tl.constexpr):
    """Twin: `closing.close` of `chain.excess`, whose chunk sums are written down; `masses` are those of p.

    From p where `share` is 0, and where the sums are all 0: then p = q up to rounding.
    """
    c = tl.arange(0, batch.traits.NP)
    count = tl.where(share > 0, req.C, 0)
    sums = tl.load(excess_sums(batch, req, at, c), mask=c < count, other=0.0).to(tl.float64)
    some = tl.max(sums, 0) > 0
    share, weight = tl.where(some, share, 0.0), tl.where(some, weight, 1.0)
    first, second = pair(req.seed, req.start, CLOSE, tl.arange(0, 1) + LANE, 0)
    chunk = invert(tl.where(some, sums, masses), first)
    return tl.sum(draw_in_chunk(batch, req, at, p_law, q_law, weight, share, chunk, second), 0)
