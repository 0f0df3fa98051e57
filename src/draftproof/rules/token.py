"""Token verification: accept each draft token with probability min(1, p/q), stop at the first rejection.

Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.distribution import Distribution, normalise
from draftproof.core.draw import CHUNK, TRIALS, chunk_sums, chunk_weights, close, invert
from draftproof.core.rng import Philox, Purpose
from draftproof.core.tree import real
from draftproof.core.types import PAD, Draft, Verdict
from draftproof.rules.chain import StopTable, draft_prob_of, excess, log_ratios, refuse_inexact, verdict


def token(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Verify each chain token by token."""
    refuse_inexact(draft, "token")
    # u in [0, 1) and a strict log u < log p/q: a token with p = 0 is rejected even by a coin of 0
    kept = rng.coins(draft.tokens.shape[1]).log() < log_ratios(p, draft)
    accepted = leading(kept & real(draft))
    return verdict(draft, accepted, closing(p, draft, accepted, rng))


def stop_table(p: Distribution, draft: Draft) -> StopTable:
    """Return all stopping points in draft order: before token i with probability 1 − min(1, p/q), after the last token
    with probability 1."""
    B, K = draft.tokens.shape
    keep = log_ratios(p, draft).clamp_max(0).exp().masked_fill(~real(draft), 0.0)
    chance = torch.cat([1 - keep, keep.new_ones(B, 1)], 1)
    node = torch.arange(K + 1, device=chance.device).expand(B, K + 1)
    rows = torch.arange(B, device=chance.device)
    dists = []
    for i in range(K + 1):
        here = p.probs_at(rows, node[:, i])
        dists.append(normalise(excess(here.clone(), draft, rows, node[:, i]), here))
    return StopTable(node, chance, torch.stack(dists, 1))


def closing(p: Distribution, draft: Draft, accepted: Int[Tensor, " B"], rng: Philox) -> Int[Tensor, " B"]:
    """Draw the round's last token: a residual token where one was rejected, else a bonus token from p."""
    points = p.points_at(torch.arange(len(accepted), device=accepted.device), accepted)
    if points is not None:
        return points
    rejected = (accepted < draft.lengths).nonzero()[:, 0]
    complete = (accepted == draft.lengths).nonzero()[:, 0]
    tokens = torch.empty_like(accepted)
    if len(complete):
        weights, _ = p.weights_at(complete, accepted[complete])
        tokens[complete] = close(weights, rng.take(complete))
    if len(rejected):
        tokens[rejected] = _residual(p, draft, rejected, accepted[rejected], rng.take(rejected))
    return tokens


def _residual(
    p: Distribution, draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], rng: Philox
) -> Int[Tensor, " N"]:
    """Draw from norm(max(0, p − q)) by thinning; where all trials fail, from the residual written out."""
    weights, gain = p.weights_at(rows, at)
    tokens = thin(weights, gain, lambda some, x: draft_prob_of(draft, rows[some], at[some], x), rng)
    left = (tokens == PAD).nonzero()[:, 0]
    if len(left):
        here = p.probs_at(rows[left], at[left])
        spare = excess(here.clone(), draft, rows[left], at[left])
        spare = torch.where(spare.sum(-1, keepdim=True) > 0, spare, here)  # no mass left: p = q up to rounding
        tokens[left] = close(spare, rng.take(left), lane=TRIALS)
    return tokens


def leading(kept: Bool[Tensor, "B K"]) -> Int[Tensor, " B"]:
    """Return the length of the run of True at the start of each row."""
    return kept.long().cumprod(-1).sum(-1)


TRIAL_BOUNDS: Final = (0, 4, TRIALS)
"""Trials are made in batches, from one of these bounds to the next. The result does not depend on them."""


def thin(
    p: Float[Tensor, "N V"],
    gain: Float[Tensor, " N"],
    q_of: Callable[[Int[Tensor, " M"], Int[Tensor, "M L"]], Float[Tensor, "M L"]],
    rng: Philox,
) -> Int[Tensor, " N"]:
    """Draw from norm(max(0, p − q)) by rejection sampling, which reads q at a few tokens; PAD if all trials failed.

    Draw x from p and accept it with probability max(0, 1 − q(x)/p(x)): the first accepted x has the residual's
    distribution. A trial succeeds with probability TV(p, q), so all fail only if p and q nearly agree. The distribution
    is p · gain (`Distribution.weights_at`); `q_of(rows, tokens)` returns q of several tokens in some of the rows.
    """
    found = torch.full((len(p),), PAD, dtype=torch.long, device=p.device)
    rows = torch.arange(len(p), device=p.device)
    sums = chunk_sums(p)
    for start, stop in pairwise(TRIAL_BOUNDS):
        first, second, coin = _trial_numbers(rng, start, stop)
        chunk = invert(sums, first)
        inside = chunk_weights(p, chunk)
        offset = invert(inside, second[..., None])
        x, p_x = chunk * CHUNK + offset[..., 0], inside.gather(-1, offset)[..., 0] * gain[:, None]
        accepted = coin * p_x < p_x - q_of(rows, x)
        done = accepted.any(-1)
        found[rows] = torch.where(done, x.gather(-1, accepted.int().argmax(-1, keepdim=True))[:, 0], PAD)
        if bool(done.all()):
            break
        left = (~done).nonzero()[:, 0]
        p, gain, sums, rng, rows = p[left], gain[left], sums[left], rng.take(left), rows[left]
    return found


def _trial_numbers(rng: Philox, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two numbers for the draw of each of these trials and its coin, generated in one call."""
    n = stop - start
    both = rng.pairs(*_trial_addresses(start, stop, rng.seeds.device))
    return both[0, :, :n], both[1, :, :n], both[0, :, n:]


@cache
def _trial_addresses(start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return purposes and lanes: those of the draws first, then those of the coins."""
    lanes = torch.arange(start, stop, device=device)
    return torch.tensor([Purpose.CLOSE, Purpose.THIN], device=device).repeat_interleave(len(lanes)), lanes.repeat(2)
