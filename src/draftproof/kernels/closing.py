"""Closing a round on the device: from p, by thinning, or from the residual in full. Twin: `draftproof.core.closing`."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.core.closing import TRIALS as _TRIALS
from draftproof.kernels.draws import draw_in_chunk, invert, invert_each, slice_of, target_running, token_of, tokens_of
from draftproof.kernels.exponent import near_exp2
from draftproof.kernels.laws import draft_numbers_of, draft_prob_of, excess, numbers_of, target_probs
from draftproof.kernels.layout import PER_CHUNK, SLICE, TRIALS_PLACES
from draftproof.kernels.layout import PER_TILE as CHUNKS
from draftproof.kernels.noise import CLOSE, THIN, pair, uniform
from draftproof.kernels.request import law_row
from draftproof.kernels.rows import draft_row, target_row, whole_slices

TRIALS = tl.constexpr(_TRIALS)
AT_ONCE = tl.constexpr(16)  # trials side by side: which one stands does not depend on it


@triton.jit
@no_type_check
def draw_ahead(batch, req):
    """Write down the numbers of all trials: a number for each thread now is cheaper than many for each later."""
    lanes = tl.arange(0, TRIALS)
    first, second = pair(req.seed, req.start, CLOSE, lanes, 0)
    trials = _trials(batch, req) + lanes
    tl.store(trials, first)
    tl.store(trials + TRIALS, second)
    tl.store(trials + 2 * TRIALS, uniform(req.seed, req.start, THIN, lanes, 0))
    tl.debug_barrier()


@triton.jit
@no_type_check
def _trials(batch, req):
    """A request's own places: three for each trial, then the running sums."""
    return batch.trials + req.b * TRIALS_PLACES


@triton.jit
@no_type_check
def _look_up(batch, req, at, law):
    """Replace every trial's two numbers by the slice of p they fall into and the mass before it there."""
    running = target_running(batch, req, at, law)
    memory = _trials(batch, req) + 3 * TRIALS
    tl.store(memory + tl.arange(0, batch.traits.NP), running)
    tl.debug_barrier()
    trials = _trials(batch, req) + tl.arange(0, TRIALS)
    first, second = tl.load(trials), tl.load(trials + TRIALS)
    chunk = invert_each(memory, running, first, batch.traits.NP)
    line, rest = slice_of(batch, req, at, law, chunk, second)
    tl.debug_barrier()
    tl.store(trials, line.to(tl.float64))
    tl.store(trials + TRIALS, rest)
    tl.debug_barrier()


@triton.jit
@no_type_check
def thin(batch, req, at):
    """Twin: `token.closing`. From p behind the whole draft, from max(0, p − q) at an earlier node: there by trials.

    With the numbers that `draw_ahead` has written down.
    """
    p_law = numbers_of(batch, req, at)
    q_law = p_law
    if batch.traits.DRAWN:
        q_law = draft_numbers_of(batch, req, at)
    _look_up(batch, req, at, p_law)
    found = tl.full((), -1, tl.int32)
    begin = 0
    while (found < 0) & (begin < TRIALS):
        lanes = begin + tl.arange(0, AT_ONCE)
        trials = _trials(batch, req) + lanes
        line = tl.load(trials).to(tl.int32)
        p = target_probs(batch, req, at, p_law, tokens_of(line))
        x, p_x = token_of(line, p, tl.load(trials + TRIALS))
        stands = lanes == 0
        if at < req.length:
            spare = (p_x - draft_prob_of(batch, req, at, q_law, x)).to(tl.float64)
            stands = tl.load(trials + 2 * TRIALS) * p_x.to(tl.float64) < spare
        which = tl.min(tl.where(stands, lanes, TRIALS), 0)
        if which < TRIALS:
            found = tl.sum(tl.where(lanes == which, x, 0), 0)
        begin += AT_ONCE
    if found < 0:
        one = tl.full((), 1.0, tl.float64)
        for c in range(0, batch.sizes.C, CHUNKS):
            sum_excess(batch, req, at, p_law, q_law, one, c)
        tl.debug_barrier()
        found = draw_excess(batch, req, at, p_law, q_law, one, one, TRIALS)
    return found


@triton.jit
@no_type_check
def excess_sums(batch, req, at, c):
    """Where the residual's chunk sums stand: with the draft row, whose own sums are no longer needed."""
    return batch.stats + (law_row(batch, req, batch.sizes.J + at) * 2 + 1) * batch.sizes.C + c


@triton.jit
@no_type_check
def sum_excess(batch, req, at, p_law, q_law, weight, c):
    """Twin: `draw.chunk_sums` of `chain.excess`, for CHUNKS chunks from c on, written down."""
    lines = c * PER_CHUNK + tl.arange(0, CHUNKS * PER_CHUNK)
    traits = batch.traits
    PLAIN: tl.constexpr = traits.DRAWN and not (traits.EDITED or traits.MASKED or traits.MAPPED)
    if PLAIN and traits.SEGMENT == traits.DRAFT_SEGMENT:
        if req.draft_temperature > 0:
            each = _plain_excess(batch, req, at, p_law, q_law, weight.to(tl.float32), lines * SLICE)
        else:
            each = tl.sum(excess(batch, req, at, p_law, q_law, weight, 1.0, tokens_of(lines)), 1)
    else:
        each = tl.sum(excess(batch, req, at, p_law, q_law, weight, 1.0, tokens_of(lines)), 1)
    chunks = c + tl.arange(0, CHUNKS)
    sums = tl.sum(tl.reshape(each, (CHUNKS, PER_CHUNK)), 1)
    tl.store(excess_sums(batch, req, at, chunks), sums, mask=chunks < batch.sizes.C)


@triton.jit
@no_type_check
def _plain_excess(batch, req, at, p_law, q_law, weight, begin):
    """Sums of `excess` over the slices that begin at `begin`, of logits as they are: every row read in long pieces."""
    SEGMENT: tl.constexpr = batch.traits.SEGMENT
    x = whole_slices(target_row(batch, req, at), begin, batch.sizes.V, SEGMENT)
    y = whole_slices(draft_row(batch, req, at), begin, batch.sizes.R, SEGMENT)
    p, p_gain = _in_proportion(x.to(tl.float32), p_law, batch.traits.FILTERED)
    q, q_gain = _in_proportion(y.to(tl.float32), q_law, batch.traits.FILTERED)
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
def draw_excess(batch, req, at, p_law, q_law, weight, share, LANE: tl.constexpr):
    """Twin: `closing.close` of `chain.excess`, whose chunk sums are written down.

    From p where `share` is 0, and where the sums are all 0: then p = q up to rounding.
    """
    c = tl.arange(0, batch.traits.NP)
    count = tl.where(share > 0, batch.sizes.C, 0)
    sums = tl.load(excess_sums(batch, req, at, c), mask=c < count, other=0.0)
    running = tl.cumsum(sums.to(tl.float64), 0)
    some = tl.max(running, 0) > 0
    if not some:
        running = target_running(batch, req, at, p_law)
    first, second = pair(req.seed, req.start, CLOSE, tl.arange(0, 1) + LANE, 0)
    share, weight = tl.where(some, share, 0.0), tl.where(some, weight, 1.0)
    chunk = invert(running, tl.sum(first, 0))
    return draw_in_chunk(batch, req, at, p_law, q_law, weight, share, chunk, tl.sum(second, 0))
