"""Token verification: keep each draft token with probability min(1, p/q), stop at the first miss.

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
    refuse_inexact(draft, "token")
    # log u < log p/q, strict and with u in [0, 1): what p cannot say is never kept, not even by a coin of 0
    kept = rng.coins(draft.tokens.shape[1]).log() < log_ratios(p, draft)
    accepted = leading(kept & real(draft))
    return verdict(draft, accepted, closing(p, draft, accepted, rng))


def stop_table(p: Distribution, draft: Draft) -> StopTable:
    """Every station in draft order: stop before token i with 1 − min(1, p/q), behind the last for certain."""
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
    """The closing token: from the residual where a token was rejected, from p where none was."""
    missed = (accepted < draft.lengths).nonzero()[:, 0]
    whole = (accepted == draft.lengths).nonzero()[:, 0]
    tokens = torch.empty_like(accepted)
    if len(whole):
        weights, _ = p.weights_at(whole, accepted[whole])
        tokens[whole] = close(weights, rng.take(whole))
    if len(missed):
        tokens[missed] = _residual(p, draft, missed, accepted[missed], rng.take(missed))
    return tokens


def _residual(
    p: Distribution, draft: Draft, rows: Int[Tensor, " N"], at: Int[Tensor, " N"], rng: Philox
) -> Int[Tensor, " N"]:
    """A draw from norm(max(0, p − q)): by thinning, and in full where no trial stood."""
    weights, gain = p.weights_at(rows, at)
    tokens = thin(weights, gain, lambda some, x: draft_prob_of(draft, rows[some], at[some], x), rng)
    left = (tokens == PAD).nonzero()[:, 0]
    if len(left):
        here = p.probs_at(rows[left], at[left])
        spare = excess(here.clone(), draft, rows[left], at[left])
        spare = torch.where(spare.sum(-1, keepdim=True) > 0, spare, here)  # no mass: p = q up to rounding
        tokens[left] = close(spare, rng.take(left), lane=TRIALS)
    return tokens


def leading(kept: Bool[Tensor, "B K"]) -> Int[Tensor, " B"]:
    """Length of the run of True at the head of each row."""
    return kept.long().cumprod(-1).sum(-1)
