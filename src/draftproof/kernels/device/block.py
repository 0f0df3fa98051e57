"""Run block verification in three kernels: weights, residual sums where the round may stop, verdict.

Sun et al. 2024 (arXiv 2403.10444). Reference: `draftproof.rules.block`. Node i is the stopping point after i draft
tokens. Only the residual sums need rows of logits again, and few rows are read: a round that accepts its whole draft
needs none. Inside the draft, the chance of stopping at node i is at most wᵢ, so the round cannot stop where the coin is
above wᵢ, and must stop where wᵢ = 1. It must also stop where the coin is below a lower bound of the chance, computed
from the masses of tiles, which the scan has left, instead of tokens.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.distribution import (
    DistParams,
    dist_of_base,
    dist_of_peak,
    drafted_of,
    load_dist_params,
    log_ratios,
    save_dist_params,
)
from draftproof.kernels.device.draw import chunk_masses, draw_in_chunk, invert_once
from draftproof.kernels.device.layout import WEIGHT
from draftproof.kernels.device.load_stats import (
    draft_stats,
    greedy_tokens,
    load_draft_stats,
    load_target_stats,
    row_stats_at,
    target_stats,
)
from draftproof.kernels.device.math import LOG2_E, force_eval, power, slope_of
from draftproof.kernels.device.philox import ACCEPT, uniform
from draftproof.kernels.device.residual import excess_sums_at, last_token_uniforms, load_dists, sum_saved_excess
from draftproof.kernels.device.rows import divisor, request
from draftproof.kernels.device.verdict import drafted_tokens, greedy_match, write_verdict

NODES_AT_ONCE = tl.constexpr(4)  # nodes processed side by side


@triton.jit
@no_type_check
def coins_of(req, node, COUNT: tl.constexpr):
    """Draw the coins of COUNT nodes from this one on; node 0 needs none."""
    return uniform(req.seed, req.start, ACCEPT, tl.maximum(tl.arange(0, COUNT) + node - 1, 0), 0)


class Slopes(NamedTuple):
    """Slopes of a request's target and draft distributions, the same for all rows."""

    p: Any
    q: Any


@triton.jit
@no_type_check
def slopes_of(req):
    """Return the slopes of a request."""
    p_scale, q_scale = force_eval(1.0 / divisor(req.temperature)), force_eval(1.0 / divisor(req.draft_temperature))
    return Slopes(p=slope_of(p_scale), q=slope_of(q_scale))


class StopPoints(NamedTuple):
    """NODES_AT_ONCE nodes of a request.

    weight   w
    drafted  the draft token after the node
    p, q     parameters of the distributions there
    sums     residual sums by chunk [NODES_AT_ONCE, NP]
    """

    weight: Any
    drafted: Any
    p: Any
    q: Any
    sums: Any


@triton.jit
@no_type_check
def stop_points_of(batch, req, slopes, begin):
    """Load the nodes from `begin` on; sums are arbitrary where the round cannot stop."""
    node, c = tl.arange(0, NODES_AT_ONCE) + begin, tl.arange(0, batch.traits.NP)
    there = node < req.length
    weight = tl.load(row_stats_at(batch, req, node) + WEIGHT, mask=there, other=0.0)
    inside = there[:, None] & (c < req.C)[None, :]
    sums = tl.load(excess_sums_at(batch, req, node[:, None], c[None, :]), mask=inside, other=0.0)
    drafted = tl.load(batch.drafted + req.b * req.K + node, mask=there, other=-1)
    p, q = load_dists(batch, req, node, there)
    p = DistParams(slope=slopes.p, centre=p.centre, gain=p.gain, cutoff=p.cutoff)
    q = DistParams(slope=slopes.q, centre=q.centre, gain=q.gain, cutoff=q.cutoff)
    return StopPoints(weight=force_eval(tl.exp(weight)), drafted=drafted, p=p, q=q, sums=sums)


class Stop(NamedTuple):
    """The stopping point of a round, with its residual sums [NP] and their mass; 0 if there is no residual."""

    at: Any
    mass: Any
    weight: Any
    drafted: Any
    p: Any
    q: Any
    sums: Any


@triton.jit
@no_type_check
def find_stop(batch, req, slopes, accepted, coins, stop_points):
    """Find the deepest node whose coin says stop. Reference: rules.block.stop_point.

    `accepted` is a count or −mask, as `block_walk` leaves it. The first NODES_AT_ONCE nodes are loaded already.
    """
    stop = _no_residual(batch, tl.maximum(accepted, 0).to(tl.int32))
    for begin in range(0, tl.where(accepted < 0, req.length, 0), NODES_AT_ONCE):
        node = tl.arange(0, NODES_AT_ONCE) + begin
        mass = tl.sum(stop_points.sums.to(tl.float64), 1)
        bit = tl.full([NODES_AT_ONCE], 1, tl.int64) << node
        forced = (-accepted & (bit - 1)) == 0
        stops = ((-accepted & bit) != 0) & (forced | (coins * (mass + (1 - stop_points.weight)) < mass))
        deepest = _deepest(tl.where(stops, node, -1), mass, node, stop_points)
        if deepest.at >= 0:
            stop = deepest
        if begin + NODES_AT_ONCE < req.length:
            coins = coins_of(req, begin + NODES_AT_ONCE, NODES_AT_ONCE)
            stop_points = stop_points_of(batch, req, slopes, begin + NODES_AT_ONCE)
    return stop


@triton.jit
@no_type_check
def _no_residual(batch, at):
    """Return a stop without a residual."""
    zero, one = tl.zeros((), tl.float32), tl.full((), 1.0, tl.float64)
    dist = DistParams(slope=zero, centre=zero, gain=zero, cutoff=zero)
    sums = tl.zeros([batch.traits.NP], tl.float32)
    return Stop(at=at, mass=0.0 * one, weight=one, drafted=tl.full((), -1, tl.int64), p=dist, q=dist, sums=sums)


@triton.jit
@no_type_check
def _deepest(at, mass, node, stop_points):
    """Select the deepest of several nodes; `at` is -1 for nodes where the round does not stop."""
    p, q = stop_points.p, stop_points.q
    columns = (
        at,
        mass,
        stop_points.weight,
        stop_points.drafted,
        p.centre,
        p.gain,
        p.cutoff,
        q.centre,
        q.gain,
        q.cutoff,
    )
    at, mass, w, drafted, p_centre, p_gain, p_cutoff, q_centre, q_gain, q_cutoff = tl.reduce(columns, 0, _deeper)
    p = DistParams(slope=p.slope, centre=p_centre, gain=p_gain, cutoff=p_cutoff)
    q = DistParams(slope=q.slope, centre=q_centre, gain=q_gain, cutoff=q_cutoff)
    sums = tl.sum(tl.where((node == at)[:, None], stop_points.sums, 0.0), 0)
    return Stop(at=at, mass=mass, weight=w, drafted=drafted, p=p, q=q, sums=sums)


@triton.jit
@no_type_check
def _deeper(at, a, b, c, d, e, f, g, h, i, other, aa, bb, cc, dd, ee, ff, gg, hh, ii):
    """Reduce to the data of the deeper node."""
    first = at > other
    a, b, c = tl.where(first, a, aa), tl.where(first, b, bb), tl.where(first, c, cc)
    d, e, f = tl.where(first, d, dd), tl.where(first, e, ee), tl.where(first, f, ff)
    g, h, i = tl.where(first, g, gg), tl.where(first, h, hh), tl.where(first, i, ii)
    return tl.where(first, at, other), a, b, c, d, e, f, g, h, i


WEIGHT_SLACK = tl.constexpr(1e-5)  # the chance is at most w only up to rounding of the sums
ROUNDING = tl.constexpr(1e-5)  # above the rounding of float32 sums of probabilities
PIECE = tl.constexpr(4)  # chunks that a program of `block_sums` reads at a time


@triton.jit
@no_type_check
def block_walk(batch, out):
    """Compute the weights, and decide where the round may stop. Grid: (B,).

    Reference: rules.block.log_weights, and the first stopping point of rules.block.block.

    Writes to `accepted` the number of accepted tokens if that is certain already. Otherwise −mask: bit i means the
    round may stop at node i; the lowest set bit is a forced stop. `block_sums` and `block_close` read it, and
    `block_close` replaces it by the count.
    """
    req = request(batch, tl.program_id(0).to(tl.int64))
    drafted = drafted_of(batch, req)
    coins = force_eval(tl.log(uniform(req.seed, req.start, ACCEPT, drafted.i, 0)))
    before = force_eval(coins_of(req, 0, batch.traits.KP))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # the next kernel starts early and waits for this one to end
        cuda.gdc_wait()
    target, draft = load_target_stats(batch, req), load_draft_stats(batch, req)
    p_scale, q_scale = force_eval(1.0 / divisor(req.temperature)), force_eval(1.0 / divisor(req.draft_temperature))
    p, q = target_stats(batch, req, target, p_scale), draft_stats(batch, req, draft, q_scale)
    if req.temperature > 0:
        i = drafted.i
        ratios, faults = log_ratios(req, drafted, p, q, p_scale, q_scale)
        p_dist, q_dist = _dist_rows(batch, req, p, q, p_scale, q_scale)
        save_dist_params(row_stats_at(batch, req, i), i <= req.length, p_dist)
        save_dist_params(row_stats_at(batch, req, req.J + i), i < req.length, q_dist)
        weights = _weights(ratios)
        tl.store(row_stats_at(batch, req, i + 1) + WEIGHT, weights, mask=drafted.there)
        tl.store(row_stats_at(batch, req, 0) + WEIGHT, 0.0)
        forced = tl.where((i + 1 < req.length) & (weights == 0), i + 1, 0)
        if batch.traits.READ_DRAFT and not (batch.traits.FILTERED or batch.traits.MAPPED):
            forced = tl.maximum(forced, _forced_by_tiles(req, i, before, weights, target, draft, p_dist, q_dist))
        accepted, fault = _stopping_nodes(req, i, coins, weights, forced, faults)
        last_token = tl.full((), -1, tl.int32)
    else:
        accepted, last_token, fault = greedy_match(batch, req, greedy_tokens(p), drafted.token)
        accepted = accepted.to(tl.int64)
    write_verdict(batch, out, req, drafted.token, accepted, last_token, fault)


@triton.jit
@no_type_check
def _weights(ratios):
    """Return log w after each draft token: the walk of the log-ratios, capped at 0, as one associative scan."""
    step, most = tl.associative_scan((ratios, tl.zeros_like(ratios)), 0, _one_step)
    return tl.minimum(step, most)


@triton.jit
@no_type_check
def _one_step(step, most, other, other_most):
    """Compose two steps of the form x ↦ min(x + step, most)."""
    return step + other, tl.minimum(most + other, other_most)


@triton.jit
@no_type_check
def _forced_by_tiles(req, i, coins, weights, p_tiles, q_tiles, p_dist, q_dist):
    """Return i [KP] where node i's coin is below a lower bound of the chance of stopping, else 0.

    Σ max(0, w·p − q) over tokens is at least the same sum over tiles, and mostly close to it.
    """
    log_weight = tl.gather(weights, tl.maximum(i - 1, 0), 0)
    weight = power(log_weight.to(tl.float32), LOG2_E)
    excess = _tile_masses(p_tiles, p_dist, p_dist.gain * weight) - _tile_masses(q_tiles, q_dist, q_dist.gain)
    least = tl.sum(tl.maximum(excess, 0.0), 1)
    inside = (i > 0) & (i < tl.where(req.draft_temperature > 0, req.length, 0))
    return tl.where(inside & (coins.to(tl.float32) * (least + (1 - weight)) < least - ROUNDING), i, 0)


@triton.jit
@no_type_check
def _tile_masses(tiles, dist, gain):
    """Return the masses of tiles [KP, TP] of rows, float32."""
    return tiles.s * power(tiles.m - dist.centre[:, None], dist.slope) * gain[:, None]


@triton.jit
@no_type_check
def _stopping_nodes(req, i, coins, weights, forced, faults):
    """Return `accepted` of `block_walk` (a count, or −mask), and the fault bits.

    `coins` are logarithms. `forced`: nodes at which the round must stop if it does not stop later.
    """
    node = i + 1  # after draft token i
    may = (node <= req.length) & (coins < weights + tl.where(node < req.length, WEIGHT_SLACK, 0.0))
    bits = tl.where(may, tl.full(i.shape, 1, tl.int64) << node, 0)
    bits, forced, fault = tl.reduce((bits, forced, faults), 0, _merge)
    whole = (((bits >> req.length) & 1) != 0) | (req.length == 0)
    one = tl.full((), 1, tl.int64)
    nodes = (bits | (one << forced)) & ((one << req.length) - (one << forced))
    return tl.where(fault != 0, 0, tl.where(whole, req.length, -nodes)), fault


@triton.jit
@no_type_check
def _merge(bits, forced, fault, more, other, others):
    """Reduce to the union of bits, the deepest forced stop and the union of faults."""
    return bits | more, tl.maximum(forced, other), fault | others


@triton.jit
@no_type_check
def _dist_rows(batch, req, p, q, p_scale, q_scale):
    """Return the parameters of all rows' distributions; one division serves both."""
    both = 1.0 / (p.mass * q.mass)
    p_dist = dist_of_peak(p.cutoff, p.base, both * q.mass, req.temperature, p_scale)
    t = divisor(req.draft_temperature)
    if batch.traits.READ_DRAFT:
        q_dist = dist_of_peak(q.cutoff, q.base, both * p.mass, t, q_scale)
    else:
        q_dist = dist_of_base(q.cutoff, q.base, both * p.mass, t, q_scale)
    return p_dist, q_dist


@triton.jit
@no_type_check
def block_sums(batch, out):
    """Compute the residual sums at all nodes where the round may stop. Grid: (parts of a row, lanes, B).

    Reference: the sums of rules.block.stop_point. A program takes the same pieces of every node of its lane. The last
    requests come first: the cache may still hold what the scan has read of them.
    """
    req = request(batch, (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # the next kernel starts early and waits for this one to end
        cuda.gdc_wait()
    nodes = -tl.load(out.accepted + req.b)
    for n in range(tl.program_id(1), tl.where(nodes > 0, req.length, 0), tl.num_programs(1)):
        node = n + tl.zeros((), tl.int32)
        if ((nodes >> node) & 1) != 0:
            sum_saved_excess(batch, req, node, tl.program_id(0), tl.num_programs(0), PIECE)


@triton.jit
@no_type_check
def block_close(batch, out):
    """Choose the stopping point, draw the last token and write the verdict. Grid: (B,).

    Reference: rules.block.block from its second stopping point on. If w = 1 and yet the residual is 0, which only
    rounding can cause, the round stops there and draws from p.
    """
    req = request(batch, tl.program_id(0).to(tl.int64))
    tokens = drafted_tokens(batch, req)
    coins = force_eval(coins_of(req, 0, NODES_AT_ONCE))
    first, second = last_token_uniforms(req, 0)
    first, second = force_eval(first), force_eval(second)
    slopes = slopes_of(req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    accepted = tl.load(out.accepted + req.b)
    fault = tl.load(out.faults + req.b)
    stop_points = stop_points_of(batch, req, slopes, 0)  # loaded before it is known whether they are needed
    if (req.temperature > 0) & (fault == 0):
        stop = find_stop(batch, req, slopes, accepted, coins, stop_points)
        p_dist, masses, some = stop.p, stop.sums.to(tl.float64), stop.mass > 0
        if not some:
            p_dist = load_dist_params(row_stats_at(batch, req, stop.at), stop.at >= 0, batch.traits.FILTERED)
            masses = chunk_masses(batch, req, stop.at, p_dist)
        chunk = invert_once(masses, first)
        weight, share = tl.where(some, stop.weight, 1.0), tl.where(some, 1.0, 0.0)
        last_token = draw_in_chunk(batch, req, stop.at, stop.drafted, p_dist, stop.q, weight, share, chunk, second)
        write_verdict(batch, out, req, tokens, stop.at, last_token, fault)
