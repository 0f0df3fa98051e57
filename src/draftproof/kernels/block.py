"""Block verification in three kernels: the walk of the weights, the sums where the round may stop, the verdict.

Sun et al. 2024 (arXiv 2403.10444). Only the sums need rows of logits again, and few are looked at: a round that stops
behind its whole draft needs none; inside, the chance of stopping at i is at most wᵢ, so where the coin is above wᵢ
it cannot stop, and where wᵢ = 1 it must (`draftproof.verify.block`).
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra import cuda

from draftproof.kernels.closing import draw_excess, excess_sums, sum_excess
from draftproof.kernels.draws import chunk_masses
from draftproof.kernels.laws import draft_line_of, drafted_of, laws_of, log_ratios, warm, write_centres, written_numbers
from draftproof.kernels.layout import CANDIDATE, NO_TARGET_LAW, PER_TILE, WEIGHT
from draftproof.kernels.noise import ACCEPT, uniform
from draftproof.kernels.numbers import draft_known, draft_settled, line_of, pick, target_known, target_settled
from draftproof.kernels.request import request
from draftproof.kernels.verdict import drafted_tokens, greedy_match, write

UNDECIDED = tl.constexpr(-1)
SLACK = tl.constexpr(1e-5)  # the chance is at most w only up to the rounding of the sums


@triton.jit
@no_type_check
def block_walk(batch, out):
    """Twin: `block.log_weights`, and the first station of `block.block`. Grid: (B,).

    Leaves `accepted` where it is clear already, and otherwise the nodes at which the round may stop.
    """
    req = request(batch, tl.program_id(0).to(tl.int64))
    drafted = drafted_of(batch, req)
    i = drafted.i
    coins = uniform(req.seed, req.start, ACCEPT, i, 0)
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    known, draft = target_known(batch, req), draft_known(batch, req)
    settled = target_settled(batch, req, known)
    if req.temperature > 0:
        p = laws_of(settled, req.temperature)
        q = laws_of(draft_settled(batch, req, draft), warm(req.draft_temperature))
        ratios, fault = log_ratios(batch, req, drafted, p, q)
        weights = _weights(ratios, i, req.length)  # of node i + 1, behind draft token i
        closing = tl.full((), -1, tl.int32)
        end = (i == req.length - 1) & (tl.log(coins) < weights)
        fault |= tl.max((p.lse != p.lse).to(tl.int32), 0) * NO_TARGET_LAW
        whole = (tl.max(end.to(tl.int32), 0) > 0) | (req.length == 0)
        accepted = tl.where(fault != 0, 0, tl.where(whole, req.length, UNDECIDED))
        sure = tl.max(tl.where((i < req.length - 1) & (weights == 0), i + 1, 0), 0)
        may = (weights == 0) | (coins < tl.exp(weights) * (1 + SLACK))
        may &= (i + 1 >= sure) & (i + 1 < req.length)
        _mark(batch, req, i, weights, may, sure == 0)
        write_centres(line_of(batch, req, i), i <= req.length, p)
        write_centres(line_of(batch, req, req.J + i), i < req.length, q)
    else:
        accepted, closing, fault = greedy_match(batch, req, settled, drafted.token)
    write(batch, out, req, drafted.token, accepted, closing, fault)


@triton.jit
@no_type_check
def _weights(ratios, i, length):
    """log w behind each draft token: the walk of the log-ratios, never above 0."""
    weight = tl.zeros((), tl.float64)
    weights = tl.zeros_like(ratios)
    for n in range(0, length):
        weight = tl.minimum(weight + tl.sum(tl.where(i == n, ratios, 0.0), 0), 0.0)
        weights = tl.where(i == n, weight, weights)
    return weights


@triton.jit
@no_type_check
def _mark(batch, req, i, weights, may, root):
    """Write down each node's weight and whether the round may stop there; node 0 stands before the first token."""
    node = line_of(batch, req, i + 1)
    there = i + 1 < req.J
    tl.store(node + WEIGHT, weights, mask=there)
    tl.store(node + CANDIDATE, may.to(tl.float64), mask=there)
    tl.store(line_of(batch, req, 0) + WEIGHT, 0.0)
    tl.store(line_of(batch, req, 0) + CANDIDATE, root.to(tl.float64))


@triton.jit
@no_type_check
def _laws(batch, req, node):
    q_law = written_numbers(draft_line_of(batch, req, node), warm(req.draft_temperature))
    return written_numbers(line_of(batch, req, node), req.temperature), q_law


@triton.jit
@no_type_check
def block_sums(batch, out):
    """Twin: the sums of `block.station`, at all nodes where the round may stop. Grid: (tiles, B)."""
    req = request(batch, tl.program_id(1).to(tl.int64))
    if batch.traits.OVERLAP:
        cuda.gdc_launch_dependents()  # they wait for the end of this, and are there when it comes
        cuda.gdc_wait()
    i = tl.arange(0, batch.traits.KP)
    line = line_of(batch, req, i)
    accepted = tl.load(out.accepted + req.b)
    may = tl.load(line + CANDIDATE, mask=i < req.length, other=0.0)
    weight = tl.load(line + WEIGHT, mask=i < req.length, other=0.0)
    for n in range(0, tl.where(accepted < 0, req.length, 0)):
        node = n + tl.zeros((), tl.int32)
        if pick(may, node) > 0:
            p_law, q_law = _laws(batch, req, node)
            sum_excess(
                batch, req, node, p_law, q_law, tl.exp(pick(weight, node)), tl.program_id(0) * PER_TILE, PER_TILE
            )


@triton.jit
@no_type_check
def block_close(batch, out):
    """Twin: `block.block` from its second station on. Grid: (B,).

    Where w = 1 and yet nothing is missing, which only rounding can bring about, it stops and closes with p.
    """
    req = request(batch, tl.program_id(0).to(tl.int64))
    tokens = drafted_tokens(batch, req)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    accepted = tl.load(out.accepted + req.b).to(tl.int32)
    fault = tl.load(out.faults + req.b)
    if (req.temperature > 0) & (fault == 0):
        weight, share = tl.full((), 1.0, tl.float64), tl.full((), 0.0, tl.float64)
        if accepted == UNDECIDED:
            accepted = req.length - 1
            while not _stops(batch, req, accepted):
                accepted -= 1
            weight = tl.exp(tl.load(line_of(batch, req, accepted) + WEIGHT))
            share += 1.0
        p_law, q_law = _laws(batch, req, accepted)
        masses = chunk_masses(batch, req, accepted, p_law)
        closing = draw_excess(batch, req, accepted, p_law, q_law, weight, share, masses, 0)
        write(batch, out, req, tokens, accepted, closing, fault)


@triton.jit
@no_type_check
def _stops(batch, req, node):
    """Twin: `block.station`'s chance, and its coin."""
    line = line_of(batch, req, node)
    may, log_weight = tl.load(line + CANDIDATE) > 0, tl.load(line + WEIGHT)
    stops = node == 0
    if (node > 0) & may:
        c = tl.arange(0, batch.traits.NP)
        sums = tl.load(excess_sums(batch, req, node, c), mask=c < req.C, other=0.0)
        mass = tl.sum(sums.to(tl.float64), 0)
        coin = tl.sum(uniform(req.seed, req.start, ACCEPT, node - 1 + tl.arange(0, 1), 0), 0)
        stops = (log_weight == 0) | (coin * (mass + (1 - tl.exp(log_weight))) < mass)
    return stops
