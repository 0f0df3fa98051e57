"""Run token verification in two kernels: accept draft tokens and draw the last token by thinning; then the residual
in full, for the few requests whose trials were all refused.

Reference: `draftproof.rules.token` (Leviathan et al. 2023). `token` runs one program per request and reads no row
again: its time is its longest chain of dependent steps, so nothing is reduced over all threads twice where once is
enough, and logarithms and exponentials are taken only where they decide something. A trial is accepted with probability
TV(p, q), so a draft that fits well is rejected rarely, but then runs out of trials. `token_residual` sums such
residuals with many programs: one program alone would take longer than the rest of the batch together.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.distribution import dist_of_base, dist_of_peak, drafted_of
from draftproof.kernels.device.draw import load_chunk_stats
from draftproof.kernels.device.layout import BAD_DRAFT, BAD_TARGET, BAD_TOKEN, CENTRE, GAIN, SLOPE, WEIGHT
from draftproof.kernels.device.load_stats import (
    RowStats,
    draft_stats,
    greedy_tokens,
    load_draft_stats,
    load_target_stats,
    row_stats_at,
    target_argmax,
    target_stats,
)
from draftproof.kernels.device.math import force_eval
from draftproof.kernels.device.philox import ACCEPT, uniform
from draftproof.kernels.device.residual import (
    Trials,
    draw_residual,
    sum_any_excess,
    sum_saved_excess,
    thin,
    trials_of,
)
from draftproof.kernels.device.rows import divisor, needed, request
from draftproof.kernels.device.verdict import drafted_tokens, greedy_match, write_tokens, write_verdict

RESIDUAL_PIECE = tl.constexpr(4)  # chunks that a program of `token_residual` reads at a time


@triton.jit
@no_type_check
def token(batch, out):
    """Decide one request by the token rule. Reference: rules.token.token. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    if batch.traits.WARM:
        _verify_sampled(batch, out, req)
    else:
        _verify_greedy(batch, out, req)


@triton.jit
@no_type_check
def _verify_greedy(batch, out, req):
    """Decide a request of a batch in which all are greedy; no probabilities are needed."""
    drafted = drafted_tokens(batch, req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    points = target_argmax(batch, req, load_target_stats(batch, req))
    accepted, last_token, fault = greedy_match(batch, req, points, drafted)
    write_verdict(batch, out, req, drafted, accepted, last_token, fault)


@triton.jit
@no_type_check
def _verify_sampled(batch, out, req):
    """Decide a request of a batch in which some are sampled."""
    drafted = drafted_of(batch, req)
    coins = force_eval(uniform(req.seed, req.start, ACCEPT, drafted.i, 0))
    first = trials_of(req)
    trials = Trials(first=force_eval(first.first), second=force_eval(first.second), coin=force_eval(first.coin))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # the next kernel starts early and waits for this one to end
        cuda.gdc_wait()  # everything above is independent of the scan and overlaps with its end
    target = load_target_stats(batch, req)
    if batch.traits.DRAWN:
        draft = load_draft_stats(batch, req)
    stats = load_chunk_stats(batch, req)
    scales = _scales(req)
    p = target_stats(batch, req, target, scales.p)
    q = p
    if batch.traits.DRAWN:
        q = draft_stats(batch, req, draft, scales.q)
    if req.temperature > 0:
        stop = _find_stop(batch, req, drafted, coins, scales, p, q)
        accepted, fault = stop.at, stop.fault | tl.where(stop.p.mass == stop.p.mass, 0, BAD_TARGET)
        last_token = tl.full((), -1, tl.int32)
        pending = fault == 0
        if fault == 0:
            p_dist, q_dist = _dists(batch, req, scales, stop)
            last_token = thin(batch, req, accepted, stop.drafted, p_dist, q_dist, stats, trials)
            pending = last_token < 0
            if pending:
                _save_for_residual(batch, req, accepted, p_dist, q_dist)
    else:
        accepted, last_token, fault = greedy_match(batch, req, greedy_tokens(p), drafted.token)
        pending = accepted < 0
    write_tokens(batch, out, req, drafted.token, accepted, last_token)
    tl.store(out.accepted + req.b, tl.where(pending, -1 - accepted, accepted).to(tl.int64))
    tl.store(out.faults + req.b, fault.to(tl.int32))


@triton.jit
@no_type_check
def _save_for_residual(batch, req, at, p_dist, q_dist):
    """Store the parameters of both distributions at the stop, with weight 1, for `token_residual`."""
    p_line = row_stats_at(batch, req, at)
    tl.store(p_line + WEIGHT, tl.zeros((), tl.float64))
    _save_params(p_line, p_dist)
    if batch.traits.DRAWN:
        _save_params(row_stats_at(batch, req, req.J + at), q_dist)


@triton.jit
@no_type_check
def _save_params(line, dist):
    tl.store(line + SLOPE, dist.slope.to(tl.float64))
    tl.store(line + CENTRE, dist.centre.to(tl.float64))
    tl.store(line + GAIN, dist.gain.to(tl.float64))


ONE_PROGRAM = tl.constexpr(2**32)  # `accepted` of a pending request counts finished programs above its low 32 bits
HALF_PROGRAM = tl.constexpr(2**31)  # rounds the count: the low bits are negative


@triton.jit
@no_type_check
def token_residual(batch, out):
    """Draw the residual token of requests that ran out of trials. Grid: (parts of a row, B).

    Reference: rules.token._residual. `token` leaves −1 − node in `accepted` of such a request. Every program sums its
    parts of the residual; the last one to finish draws the token and writes the count.
    """
    req = request(batch, tl.program_id(1).to(tl.int64))
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    at = -1 - tl.load(out.accepted + req.b).to(tl.int32)
    if at >= 0:
        if batch.traits.DRAWN:
            sum_saved_excess(batch, req, at, tl.program_id(0), tl.num_programs(0), RESIDUAL_PIECE)
        else:
            sum_any_excess(batch, req, at, tl.program_id(0), tl.num_programs(0), RESIDUAL_PIECE)
        tl.debug_barrier()  # all threads have stored their sums before one of them counts the program
        before = tl.atomic_add(out.accepted + req.b, ONE_PROGRAM)
        if ((before + HALF_PROGRAM) >> 32) == tl.num_programs(0) - 1:
            last_token = draw_residual(batch, req, at)
            tl.store(out.tokens + req.b * req.J + at, last_token.to(tl.int64))
            tl.store(out.accepted + req.b, at.to(tl.int64))


class Scales(NamedTuple):
    """1 / temperature of target and draft, computed once: a division takes a hundred cycles."""

    p: Any
    q: Any


@triton.jit
@no_type_check
def _scales(req):
    """Compute the scales. Call this after the loads are issued: the compiler would otherwise delay them."""
    return Scales(p=force_eval(1.0 / divisor(req.temperature)), q=force_eval(1.0 / divisor(req.draft_temperature)))


class Stop(NamedTuple):
    """Where a round stops: after `at` tokens, before the token `drafted`; `RowStats` of its two rows there.

    fault: bits of what is wrong anywhere in the draft.
    """

    at: Any
    fault: Any
    drafted: Any
    p: Any
    q: Any


@triton.jit
@no_type_check
def _find_stop(batch, req, drafted, coins, scales, p, q):
    """Find the first position at which no token is accepted, and select all data there, in one reduction."""
    kept, fault = _kept(batch, req, drafted, coins, scales, p, q)
    at = tl.where(kept, batch.traits.KP, drafted.i)
    columns = (at, fault, drafted.token, p.cutoff, p.base, p.mass, q.cutoff, q.base, q.mass)
    at, fault, token, p_cutoff, p_base, p_mass, q_cutoff, q_base, q_mass = tl.reduce(columns, 0, _earlier)
    p, q = RowStats(cutoff=p_cutoff, base=p_base, mass=p_mass), RowStats(cutoff=q_cutoff, base=q_base, mass=q_mass)
    return Stop(at=at, fault=fault, drafted=token, p=p, q=q)


@triton.jit
@no_type_check
def _earlier(at, fault, a, b, c, d, e, f, g, other, more, aa, bb, cc, dd, ee, ff, gg):
    """Reduce to the data of the earlier position, and the faults of both."""
    first = at < other
    a, b, c = tl.where(first, a, aa), tl.where(first, b, bb), tl.where(first, c, cc)
    d, e, f = tl.where(first, d, dd), tl.where(first, e, ee), tl.where(first, f, ff)
    return tl.where(first, at, other), fault | more, a, b, c, d, e, f, tl.where(first, g, gg)


@triton.jit
@no_type_check
def _kept(batch, req, drafted, coins, scales, p, q):
    """Return which draft tokens their coins accept, and fault bits, both [KP].

    Reference: rules.chain.log_ratios and rules.token.token. u < p/q is tested as u · Σp < Σq · exp(…), without
    logarithm or division. The comparison is strict, with u in [0, 1): a token of p = 0 is never accepted, not even by a
    coin of 0. Comparisons with NaN, where a row is not a distribution, are false.
    """
    known = drafted.known
    fault = (drafted.there & ~known).to(tl.int32) * BAD_TOKEN
    exponent, possible = _exponent(drafted.target, scales.p, p)
    possible &= known
    mass = tl.full(p.mass.shape, 1.0, tl.float64)
    if batch.traits.DRAWN:
        below, drawable = _exponent(drafted.draft, scales.q, q)
        weighed = known & needed(req, req.J + drafted.i)
        # a draft token of probability 0 was not drawn from this distribution: the verdict would not be exact
        fault |= (weighed & ~(drawable & (q.mass == q.mass))).to(tl.int32) * BAD_DRAFT
        exponent, mass = tl.where(weighed, exponent - below, exponent), tl.where(weighed, q.mass, mass)
    return possible & (coins * p.mass < mass * tl.exp(exponent)), fault


@triton.jit
@no_type_check
def _exponent(x, scale, rows):
    """Return scale · x − base of logits x [S], and whether these logits have any mass."""
    x = x.to(tl.float64)
    exponent = scale * x - rows.base
    return exponent, (x >= rows.cutoff) & (exponent > float("-inf"))


@triton.jit
@no_type_check
def _dists(batch, req, scales, stop):
    """Return the parameters of both distributions at the stop.

    Without cutoffs no comparison is made. One division serves both distributions.
    """
    p, q, t = stop.p, stop.q, divisor(req.draft_temperature)
    none = tl.full((), float("-inf"), tl.float32)
    both = 1.0 / (p.mass * q.mass)
    p_dist = dist_of_peak(p.cutoff if batch.traits.FILTERED else none, p.base, both * q.mass, req.temperature, scales.p)
    q_dist = p_dist
    if batch.traits.READ_DRAFT:
        q_dist = dist_of_peak(q.cutoff if batch.traits.FILTERED else none, q.base, both * p.mass, t, scales.q)
    elif batch.traits.DRAWN:
        q_dist = dist_of_base(q.cutoff, q.base, both * p.mass, t, scales.q)
    return p_dist, q_dist
