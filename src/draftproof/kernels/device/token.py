"""Token verification, one program a request: decide, and close by thinning. No row is read again.

One program's time is the length of its longest chain of steps that wait for each other. So nothing is summed over all
threads twice where once does, and of what is not decisive neither logarithm nor exponential is taken.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.distribution import dist_of_base, dist_of_peak, drafted_of
from draftproof.kernels.device.draw import chunk_stats
from draftproof.kernels.device.layout import BAD_DRAFT, BAD_TARGET, BAD_TOKEN
from draftproof.kernels.device.math import at_once
from draftproof.kernels.device.philox import ACCEPT, uniform
from draftproof.kernels.device.residual import Trials, thin, trials_of
from draftproof.kernels.device.rows import request, wanted, warm
from draftproof.kernels.device.stats import (
    Settled,
    draft_known,
    draft_numbers,
    points_of,
    target_known,
    target_numbers,
    target_points,
)
from draftproof.kernels.device.verdict import drafted_tokens, greedy_match, write


@triton.jit
@no_type_check
def token(batch, out):
    """Twin: `rules.token.token`. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    if batch.traits.WARM:
        _judge(batch, out, req)
    else:
        _match(batch, out, req)


@triton.jit
@no_type_check
def _match(batch, out, req):
    """Of a greedy request among others that are greedy too: nothing is weighed."""
    drafted = drafted_tokens(batch, req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    points = target_points(batch, req, target_known(batch, req))
    accepted, closing, fault = greedy_match(batch, req, points, drafted)
    write(batch, out, req, drafted, accepted, closing, fault)


@triton.jit
@no_type_check
def _judge(batch, out, req):
    drafted = drafted_of(batch, req)
    coins = at_once(uniform(req.seed, req.start, ACCEPT, drafted.i, 0))
    first = trials_of(req, 0)
    trials = Trials(first=at_once(first.first), second=at_once(first.second), coin=at_once(first.coin))
    if batch.traits.OVERLAP:
        cuda.gdc_wait()  # what stands above does not depend on the scan, and is done while it ends
    known = target_known(batch, req)
    if batch.traits.DRAWN:
        draft = draft_known(batch, req)
    stats = chunk_stats(batch, req)
    scales = _scales(req)
    p = target_numbers(batch, req, known, scales.p)
    q = p
    if batch.traits.DRAWN:
        q = draft_numbers(batch, req, draft, scales.q)
    if req.temperature > 0:
        stop = _stop(batch, req, drafted, coins, scales, p, q)
        accepted, fault = stop.at, stop.fault | tl.where(stop.p.mass == stop.p.mass, 0, BAD_TARGET)
        closing = tl.full((), -1, tl.int32)
        if fault == 0:
            p_dist, q_dist = _dists(batch, req, scales, stop)
            closing = thin(batch, req, accepted, stop.drafted, p_dist, q_dist, stats, trials)
    else:
        accepted, closing, fault = greedy_match(batch, req, points_of(p), drafted.token)
    write(batch, out, req, drafted.token, accepted, closing, fault)


class Scales(NamedTuple):
    """1 / temperature of target and draft: a division takes a hundred cycles."""

    p: Any
    q: Any


@triton.jit
@no_type_check
def _scales(req):
    """To be asked for behind the loads: what they bring is then on its way, and the compiler puts no load off."""
    return Scales(p=at_once(1.0 / warm(req.temperature)), q=at_once(1.0 / warm(req.draft_temperature)))


class Stop(NamedTuple):
    """Where a round stops: behind how many tokens, before which, and the numbers of its two rows there. Bits of what is
    wrong with the draft, wherever it is."""

    at: Any
    fault: Any
    drafted: Any
    p: Any
    q: Any


@triton.jit
@no_type_check
def _stop(batch, req, drafted, coins, scales, p, q):
    """The first place at which no token is kept, and all that is known there, in one step."""
    kept, fault = _kept(batch, req, drafted, coins, scales, p, q)
    at = tl.where(kept, batch.traits.KP, drafted.i)
    columns = (at, fault, drafted.token, p.cutoff, p.base, p.mass, q.cutoff, q.base, q.mass)
    at, fault, token, p_cutoff, p_base, p_mass, q_cutoff, q_base, q_mass = tl.reduce(columns, 0, _earlier)
    p, q = Settled(cutoff=p_cutoff, base=p_base, mass=p_mass), Settled(cutoff=q_cutoff, base=q_base, mass=q_mass)
    return Stop(at=at, fault=fault, drafted=token, p=p, q=q)


@triton.jit
@no_type_check
def _earlier(at, fault, a, b, c, d, e, f, g, other, more, aa, bb, cc, dd, ee, ff, gg):
    """What stands at the earlier of two places, and the faults of both."""
    first = at < other
    a, b, c = tl.where(first, a, aa), tl.where(first, b, bb), tl.where(first, c, cc)
    d, e, f = tl.where(first, d, dd), tl.where(first, e, ee), tl.where(first, f, ff)
    return tl.where(first, at, other), fault | more, a, b, c, d, e, f, tl.where(first, g, gg)


@triton.jit
@no_type_check
def _kept(batch, req, drafted, coins, scales, p, q):
    """Twin: `chain.log_ratios`, and what `token` makes of it; bits of what is wrong with the draft, both [KP].

    u < p/q, as u · Σp < Σq · exp(…), where neither logarithm nor division is needed. Strict, and with u in [0, 1): what
    p cannot say is never kept, not even by a coin of 0. Comparisons with NaN, where a row is no distribution, are false.
    """
    known = drafted.known
    fault = (drafted.there & ~known).to(tl.int32) * BAD_TOKEN
    exponent, possible = _exponent(drafted.target, scales.p, p)
    possible &= known
    mass = tl.full(p.mass.shape, 1.0, tl.float64)
    if batch.traits.DRAWN:
        below, drawable = _exponent(drafted.draft, scales.q, q)
        weighed = known & wanted(req, req.J + drafted.i)
        # an impossible draft token was not drawn from this distribution, and then nothing here would be exact
        fault |= (weighed & ~(drawable & (q.mass == q.mass))).to(tl.int32) * BAD_DRAFT
        exponent, mass = tl.where(weighed, exponent - below, exponent), tl.where(weighed, q.mass, mass)
    return possible & (coins * p.mass < mass * tl.exp(exponent)), fault


@triton.jit
@no_type_check
def _exponent(x, scale, rows):
    """The logarithm of what logits x [S] weigh beside a mass, and whether they weigh anything."""
    x = x.to(tl.float64)
    exponent = scale * x - rows.base
    return exponent, (x >= rows.cutoff) & (exponent > float("-inf"))


@triton.jit
@no_type_check
def _dists(batch, req, scales, stop):
    """Where no row has a cutoff, none is compared with. One division serves both distributions."""
    p, q, t = stop.p, stop.q, warm(req.draft_temperature)
    none = tl.full((), float("-inf"), tl.float32)
    both = 1.0 / (p.mass * q.mass)
    p_dist = dist_of_peak(p.cutoff if batch.traits.FILTERED else none, p.base, both * q.mass, req.temperature, scales.p)
    q_dist = p_dist
    if batch.traits.READ_DRAFT:
        q_dist = dist_of_peak(q.cutoff if batch.traits.FILTERED else none, q.base, both * p.mass, t, scales.q)
    elif batch.traits.DRAWN:
        q_dist = dist_of_base(q.cutoff, q.base, both * p.mass, t, scales.q)
    return p_dist, q_dist
