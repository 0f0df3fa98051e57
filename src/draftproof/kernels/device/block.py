"""Block verification in three kernels: the walk of the weights, the sums where the round may stop, the verdict.

Sun et al. 2024 (arXiv 2403.10444). Only the sums need rows of logits again, and few are looked at: a round that stops
behind its whole draft needs none; inside, the chance of stopping at i is at most wᵢ, so where the coin is above wᵢ
it cannot stop, and where wᵢ = 1 it must (`draftproof.verify.block`). It must as well where the coin is below a chance
that is known to be too small: with the mass of Zᵢ by tiles, which the scan has left, instead of by tokens.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.closing import closing_pair
from draftproof.kernels.draws import chunk_masses, draw_in_chunk, invert_once
from draftproof.kernels.early import at_once
from draftproof.kernels.exponent import LOG2_E, power
from draftproof.kernels.laws import (
    drafted_of,
    law_of_base,
    law_of_peak,
    log_ratios,
    write_numbers,
    written_numbers,
)
from draftproof.kernels.layout import WEIGHT
from draftproof.kernels.noise import ACCEPT, uniform
from draftproof.kernels.numbers import draft_known, draft_numbers, line_of, points_of, target_known, target_numbers
from draftproof.kernels.request import request, warm
from draftproof.kernels.residual import sum_written
from draftproof.kernels.stations import NODES, coins_of, slopes_of, stations_of, stop_of
from draftproof.kernels.verdict import drafted_tokens, greedy_match, write

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
        p_law, q_law = _law_rows(batch, req, p, q, p_scale, q_scale)
        write_numbers(line_of(batch, req, i), i <= req.length, p_law)
        write_numbers(line_of(batch, req, req.J + i), i < req.length, q_law)
        weights = _weights(ratios)
        tl.store(line_of(batch, req, i + 1) + WEIGHT, weights, mask=drafted.there)
        tl.store(line_of(batch, req, 0) + WEIGHT, 0.0)
        sure = tl.where((i + 1 < req.length) & (weights == 0), i + 1, 0)
        if batch.traits.READ_DRAFT and not (batch.traits.FILTERED or batch.traits.MAPPED):
            sure = tl.maximum(sure, _surely(req, i, before, weights, known, draft, p_law, q_law))
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
def _surely(req, i, coins, weights, p_tiles, q_tiles, p_law, q_law):
    """Node i [KP] where its coin is below the chance of stopping by what is known already, 0 elsewhere.

    Σ max(0, w·p − q) is at least the same sum over tiles instead of tokens, and most of the time nearly that.
    """
    behind = tl.gather(weights, tl.maximum(i - 1, 0), 0)
    weight = power(behind.to(tl.float32), LOG2_E)
    excess = _masses(p_tiles, p_law, p_law.gain * weight) - _masses(q_tiles, q_law, q_law.gain)
    least = tl.sum(tl.maximum(excess, 0.0), 1)
    inside = (i > 0) & (i < tl.where(req.draft_temperature > 0, req.length, 0))
    return tl.where(inside & (coins.to(tl.float32) * (least + (1 - weight)) < least - ROUNDING), i, 0)


@triton.jit
@no_type_check
def _masses(tiles, law, gain):
    """Of tiles [KP, TP] of rows, float32."""
    return tiles.s * power(tiles.m - law.centre[:, None], law.slope) * gain[:, None]


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
def _law_rows(batch, req, p, q, p_scale, q_scale):
    """One division serves both."""
    both = 1.0 / (p.mass * q.mass)
    p_law = law_of_peak(p.cutoff, p.base, both * q.mass, req.temperature, p_scale)
    t = warm(req.draft_temperature)
    if batch.traits.READ_DRAFT:
        q_law = law_of_peak(q.cutoff, q.base, both * p.mass, t, q_scale)
    else:
        q_law = law_of_base(q.cutoff, q.base, both * p.mass, t, q_scale)
    return p_law, q_law


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
    stations = stations_of(batch, req, slopes, 0)  # asked for before it is known whether they are needed
    if (req.temperature > 0) & (fault == 0):
        stop = stop_of(batch, req, slopes, accepted, coins, stations)
        p_law, masses, some = stop.p, stop.sums.to(tl.float64), stop.mass > 0
        if not some:
            p_law = written_numbers(line_of(batch, req, stop.at), stop.at >= 0, batch.traits.FILTERED)
            masses = chunk_masses(batch, req, stop.at, p_law)
        chunk = invert_once(masses, first)
        weight, share = tl.where(some, stop.weight, 1.0), tl.where(some, 1.0, 0.0)
        closing = draw_in_chunk(batch, req, stop.at, stop.drafted, p_law, stop.q, weight, share, chunk, second)
        write(batch, out, req, tokens, stop.at, closing, fault)
