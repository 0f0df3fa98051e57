"""Token verification: accept each draft token with probability min(1, p/q), stop at the first rejection.

Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.distribution import Distribution, normalise
from draftproof.core.draw import TRIALS, close, thin
from draftproof.core.rng import Philox
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
