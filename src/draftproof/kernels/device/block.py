"""Block verification in three kernels: the walk of the weights, the sums where the round may stop, the verdict.

Sun et al. 2024 (arXiv 2403.10444). Only the sums need rows of logits again, and few are looked at: a round that stops
behind its whole draft needs none; inside, the chance of stopping at i is at most wᵢ, so where the coin is above wᵢ
it cannot stop, and where wᵢ = 1 it must (`draftproof.rules.block`). It must as well where the coin is below a chance
that is known to be too small: with the mass of Zᵢ by tiles, which the scan has left, instead of by tokens.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.device.distribution import (
    Numbers,
    dist_of_base,
    dist_of_peak,
    drafted_of,
    log_ratios,
    write_numbers,
    written_numbers,
)
from draftproof.kernels.device.draw import chunk_masses, draw_in_chunk, invert_once
from draftproof.kernels.device.layout import WEIGHT
from draftproof.kernels.device.math import LOG2_E, at_once, power, slope_of
from draftproof.kernels.device.philox import ACCEPT, uniform
from draftproof.kernels.device.residual import closing_pair, excess_sums, sum_written, written_dists
from draftproof.kernels.device.rows import request, warm
from draftproof.kernels.device.stats import draft_known, draft_numbers, line_of, points_of, target_known, target_numbers
from draftproof.kernels.device.verdict import drafted_tokens, greedy_match, write

NODES = tl.constexpr(4)  # that are looked at side by side


@triton.jit
@no_type_check
def coins_of(req, node, COUNT: tl.constexpr):
    """Of the nodes from this one on; node 0 needs none."""
    return uniform(req.seed, req.start, ACCEPT, tl.maximum(tl.arange(0, COUNT) + node - 1, 0), 0)


class Slopes(NamedTuple):
    """All distributions of a request have the same two."""

    p: Any
    q: Any


@triton.jit
@no_type_check
def slopes_of(req):
    p_scale, q_scale = at_once(1.0 / warm(req.temperature)), at_once(1.0 / warm(req.draft_temperature))
    return Slopes(p=slope_of(p_scale), q=slope_of(q_scale))


class StopPoints(NamedTuple):
    """NODES nodes: w, the token drafted behind each, the distributions there, and the residual's sums by chunk [NODES, NP]."""

    weight: Any
    drafted: Any
    p: Any
    q: Any
    sums: Any


@triton.jit
@no_type_check
def stop_points_of(batch, req, slopes, begin):
    """The nodes from `begin` on; of those at which the round cannot stop, any sums."""
    node, c = tl.arange(0, NODES) + begin, tl.arange(0, batch.traits.NP)
    there = node < req.length
    weight = tl.load(line_of(batch, req, node) + WEIGHT, mask=there, other=0.0)
    inside = there[:, None] & (c < req.C)[None, :]
    sums = tl.load(excess_sums(batch, req, node[:, None], c[None, :]), mask=inside, other=0.0)
    drafted = tl.load(batch.drafted + req.b * req.K + node, mask=there, other=-1)
    p, q = written_dists(batch, req, node, there)
    p = Numbers(slope=slopes.p, centre=p.centre, gain=p.gain, cutoff=p.cutoff)
    q = Numbers(slope=slopes.q, centre=q.centre, gain=q.gain, cutoff=q.cutoff)
    return StopPoints(weight=at_once(tl.exp(weight)), drafted=drafted, p=p, q=q, sums=sums)


class Stop(NamedTuple):
    """Where a round stops, and all of that node: the sums [NP] and their mass, 0 where there is no residual."""

    at: Any
    mass: Any
    weight: Any
    drafted: Any
    p: Any
    q: Any
    sums: Any


@triton.jit
@no_type_check
def stop_of(batch, req, slopes, accepted, coins, stop_points):
    """Twin: `block.station`'s chances and their coins: the deepest node whose coin says so. Of the first NODES nodes
    all is given."""
    stop = _none(batch, tl.maximum(accepted, 0).to(tl.int32))
    for begin in range(0, tl.where(accepted < 0, req.length, 0), NODES):
        node = tl.arange(0, NODES) + begin
        mass = tl.sum(stop_points.sums.to(tl.float64), 1)
        bit = tl.full([NODES], 1, tl.int64) << node
        sure = (-accepted & (bit - 1)) == 0
        stops = ((-accepted & bit) != 0) & (sure | (coins * (mass + (1 - stop_points.weight)) < mass))
        deepest = _deepest(tl.where(stops, node, -1), mass, node, stop_points)
        if deepest.at >= 0:
            stop = deepest
        if begin + NODES < req.length:
            coins = coins_of(req, begin + NODES, NODES)
            stop_points = stop_points_of(batch, req, slopes, begin + NODES)
    return stop


@triton.jit
@no_type_check
def _none(batch, at):
    """A place without a residual."""
    zero, one = tl.zeros((), tl.float32), tl.full((), 1.0, tl.float64)
    dist = Numbers(slope=zero, centre=zero, gain=zero, cutoff=zero)
    sums = tl.zeros([batch.traits.NP], tl.float32)
    return Stop(at=at, mass=0.0 * one, weight=one, drafted=tl.full((), -1, tl.int64), p=dist, q=dist, sums=sums)


@triton.jit
@no_type_check
def _deepest(at, mass, node, stop_points):
    """The last of several nodes, -1 among them for none."""
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
    p = Numbers(slope=p.slope, centre=p_centre, gain=p_gain, cutoff=p_cutoff)
    q = Numbers(slope=q.slope, centre=q_centre, gain=q_gain, cutoff=q_cutoff)
    sums = tl.sum(tl.where((node == at)[:, None], stop_points.sums, 0.0), 0)
    return Stop(at=at, mass=mass, weight=w, drafted=drafted, p=p, q=q, sums=sums)


@triton.jit
@no_type_check
def _deeper(at, a, b, c, d, e, f, g, h, i, other, aa, bb, cc, dd, ee, ff, gg, hh, ii):
    first = at > other
    a, b, c = tl.where(first, a, aa), tl.where(first, b, bb), tl.where(first, c, cc)
    d, e, f = tl.where(first, d, dd), tl.where(first, e, ee), tl.where(first, f, ff)
    g, h, i = tl.where(first, g, gg), tl.where(first, h, hh), tl.where(first, i, ii)
    return tl.where(first, at, other), a, b, c, d, e, f, g, h, i


SLACK = tl.constexpr(1e-5)  # the chance is at most w only up to the rounding of the sums
ROUNDING = tl.constexpr(1e-5)  # of float32 sums of probabilities, by far
PIECE = tl.constexpr(4)  # chunks that a program of the sums reads at a time


@triton.jit
@no_type_check
def block_walk(batch, out):
    """Twin: `block.log_weights`, and the first station of `block.block`. Grid: (B,).

    Leaves `accepted` where it is clear already. Elsewhere it is negative: less the nodes at which the round may stop,
    as bits. At the first of them it must, if it did at none behind.
    """
    req = request(batch, tl.program_id(0).to(tl.int64))
    drafted = drafted_of(batch, req)
    coins = at_once(tl.log(uniform(req.seed, req.start, ACCEPT, drafted.i, 0)))
    before = at_once(coins_of(req, 0, batch.traits.KP))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    known, draft = target_known(batch, req), draft_known(batch, req)
    p_scale, q_scale = at_once(1.0 / warm(req.temperature)), at_once(1.0 / warm(req.draft_temperature))
    p, q = target_numbers(batch, req, known, p_scale), draft_numbers(batch, req, draft, q_scale)
    if req.temperature > 0:
        i = drafted.i
        ratios, faults = log_ratios(req, drafted, p, q, p_scale, q_scale)
        p_dist, q_dist = _dist_rows(batch, req, p, q, p_scale, q_scale)
        write_numbers(line_of(batch, req, i), i <= req.length, p_dist)
        write_numbers(line_of(batch, req, req.J + i), i < req.length, q_dist)
        weights = _weights(ratios)
        tl.store(line_of(batch, req, i + 1) + WEIGHT, weights, mask=drafted.there)
        tl.store(line_of(batch, req, 0) + WEIGHT, 0.0)
        sure = tl.where((i + 1 < req.length) & (weights == 0), i + 1, 0)
        if batch.traits.READ_DRAFT and not (batch.traits.FILTERED or batch.traits.MAPPED):
            sure = tl.maximum(sure, _surely(req, i, before, weights, known, draft, p_dist, q_dist))
        accepted, fault = _where_to_stop(req, i, coins, weights, sure, faults)
        closing = tl.full((), -1, tl.int32)
    else:
        accepted, closing, fault = greedy_match(batch, req, points_of(p), drafted.token)
        accepted = accepted.to(tl.int64)
    write(batch, out, req, drafted.token, accepted, closing, fault)


@triton.jit
@no_type_check
def _weights(ratios):
    """log w behind each draft token: the walk of the log-ratios, never above 0. Steps of a walk make one step."""
    step, most = tl.associative_scan((ratios, tl.zeros_like(ratios)), 0, _one_step)
    return tl.minimum(step, most)


@triton.jit
@no_type_check
def _one_step(step, most, other, its):
    """x ↦ min(x + step, most), then the same with the others."""
    return step + other, tl.minimum(most + other, its)


@triton.jit
@no_type_check
def _surely(req, i, coins, weights, p_tiles, q_tiles, p_dist, q_dist):
    """Node i [KP] where its coin is below the chance of stopping by what is known already, 0 elsewhere.

    Σ max(0, w·p − q) is at least the same sum over tiles instead of tokens, and most of the time nearly that.
    """
    behind = tl.gather(weights, tl.maximum(i - 1, 0), 0)
    weight = power(behind.to(tl.float32), LOG2_E)
    excess = _masses(p_tiles, p_dist, p_dist.gain * weight) - _masses(q_tiles, q_dist, q_dist.gain)
    least = tl.sum(tl.maximum(excess, 0.0), 1)
    inside = (i > 0) & (i < tl.where(req.draft_temperature > 0, req.length, 0))
    return tl.where(inside & (coins.to(tl.float32) * (least + (1 - weight)) < least - ROUNDING), i, 0)


@triton.jit
@no_type_check
def _masses(tiles, dist, gain):
    """Of tiles [KP, TP] of rows, float32."""
    return tiles.s * power(tiles.m - dist.centre[:, None], dist.slope) * gain[:, None]


@triton.jit
@no_type_check
def _where_to_stop(req, i, coins, weights, sure, faults):
    """`accepted` of `block_walk`, and what is wrong. `coins` are logarithms; `sure`: where it stops, if not behind."""
    node = i + 1  # behind draft token i
    may = (node <= req.length) & (coins < weights + tl.where(node < req.length, SLACK, 0.0))
    bits = tl.where(may, tl.full(i.shape, 1, tl.int64) << node, 0)
    bits, sure, fault = tl.reduce((bits, sure, faults), 0, _all_of)
    whole = (((bits >> req.length) & 1) != 0) | (req.length == 0)
    one = tl.full((), 1, tl.int64)
    nodes = (bits | (one << sure)) & ((one << req.length) - (one << sure))
    return tl.where(fault != 0, 0, tl.where(whole, req.length, -nodes)), fault


@triton.jit
@no_type_check
def _all_of(bits, sure, fault, more, other, others):
    return bits | more, tl.maximum(sure, other), fault | others


@triton.jit
@no_type_check
def _dist_rows(batch, req, p, q, p_scale, q_scale):
    """One division serves both."""
    both = 1.0 / (p.mass * q.mass)
    p_dist = dist_of_peak(p.cutoff, p.base, both * q.mass, req.temperature, p_scale)
    t = warm(req.draft_temperature)
    if batch.traits.READ_DRAFT:
        q_dist = dist_of_peak(q.cutoff, q.base, both * p.mass, t, q_scale)
    else:
        q_dist = dist_of_base(q.cutoff, q.base, both * p.mass, t, q_scale)
    return p_dist, q_dist


@triton.jit
@no_type_check
def block_sums(batch, out):
    """Twin: the sums of `block.station`, at all nodes where the round may stop. Grid: (parts of a row, lanes, B).

    A program takes the same pieces of every node of its lane. The last requests come first: the cache may still hold
    what the scan has read of them.
    """
    req = request(batch, (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    nodes = -tl.load(out.accepted + req.b)
    for n in range(tl.program_id(1), tl.where(nodes > 0, req.length, 0), tl.num_programs(1)):
        node = n + tl.zeros((), tl.int32)
        if ((nodes >> node) & 1) != 0:
            sum_written(batch, req, node, tl.program_id(0), tl.num_programs(0), PIECE)


@triton.jit
@no_type_check
def block_close(batch, out):
    """Twin: `block.block` from its second station on. Grid: (B,).

    Where w = 1 and yet nothing is missing, which only rounding can bring about, it stops and closes with p.
    """
    req = request(batch, tl.program_id(0).to(tl.int64))
    tokens = drafted_tokens(batch, req)
    coins = at_once(coins_of(req, 0, NODES))
    first, second = closing_pair(req, 0)
    first, second = at_once(first), at_once(second)
    slopes = slopes_of(req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    accepted = tl.load(out.accepted + req.b)
    fault = tl.load(out.faults + req.b)
    stop_points = stop_points_of(batch, req, slopes, 0)  # asked for before it is known whether they are needed
    if (req.temperature > 0) & (fault == 0):
        stop = stop_of(batch, req, slopes, accepted, coins, stop_points)
        p_dist, masses, some = stop.p, stop.sums.to(tl.float64), stop.mass > 0
        if not some:
            p_dist = written_numbers(line_of(batch, req, stop.at), stop.at >= 0, batch.traits.FILTERED)
            masses = chunk_masses(batch, req, stop.at, p_dist)
        chunk = invert_once(masses, first)
        weight, share = tl.where(some, stop.weight, 1.0), tl.where(some, 1.0, 0.0)
        closing = draw_in_chunk(batch, req, stop.at, stop.drafted, p_dist, stop.q, weight, share, chunk, second)
        write(batch, out, req, tokens, stop.at, closing, fault)
