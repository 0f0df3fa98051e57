"""Block verification: judge the draft as a whole, and keep on average more than token by token, never less.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), algorithm 2. With
w₀ = 1, wᵢ = min(1, wᵢ₋₁ · p(xᵢ)/q(xᵢ)), keeping exactly i tokens is tried from the deepest i down and succeeds with
probability hᵢ = Zᵢ / (Zᵢ + 1 − wᵢ), where Zᵢ = Σ max(0, wᵢ·p − q) is the mass of what closes it; w itself where the
draft ends; 1 at i = 0. Rows of logits are visited only where the scan gets to.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.distribution import Distribution, normalise
from draftproof.core.draw import chunk_sums, close
from draftproof.core.rng import Philox
from draftproof.core.types import Draft, Verdict
from draftproof.rules.chain import StopTable, log_ratios, refuse_inexact, verdict, weighted_excess
from draftproof.rules.token import token


def block(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    refuse_inexact(draft, "block")
    if draft.q is None:
        return token(p, draft, rng)  # under a point mass w never exceeds 1, and the two rules are one
    log_weight = log_weights(p, draft)
    coins = torch.nn.functional.pad(rng.coins(draft.tokens.shape[1]), (1, 0))  # node 0 needs none
    rows, at = torch.arange(len(draft.lengths), device=draft.lengths.device), draft.lengths
    accepted = torch.zeros_like(draft.lengths)
    stops = coins[rows, at].log() < log_weight[rows, at]
    stopped, weights = [rows[stops]], [p.weights_at(rows[stops], at[stops])[0]]
    accepted[stops] = at[stops]
    while len(rows := rows[~stops]):
        at = at[~stops] - 1
        chance, spare = stop_point(p, draft, log_weight[rows, at], rows, at)
        stops = coins[rows, at] < chance
        accepted[rows[stops]] = at[stops]
        stopped.append(rows[stops])
        weights.append(spare if bool(stops.all()) else spare.index_select(0, stops.nonzero()[:, 0]))
        del spare  # not to be held while the next station is visited
    order = torch.cat(stopped)
    closing = torch.empty_like(accepted)
    closing[order] = close(_rows(weights), rng.take(order))
    return verdict(draft, accepted, closing)


def _rows(parts: list[Tensor]) -> Float[Tensor, "B V"]:
    """All rows one below the other, without a copy where they are together already."""
    parts = [part for part in parts if len(part)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def stop_table(p: Distribution, draft: Draft) -> StopTable:
    """Every station, from the end of the draft down to the root; a short draft's last stations are never reached."""
    log_weight = log_weights(p, draft)
    rows, at = torch.arange(len(draft.lengths), device=draft.lengths.device), draft.lengths
    nodes, chances, dists = [at], [log_weight[rows, at].exp()], [p.probs_at(rows, at)]
    for _ in range(draft.tokens.shape[1]):
        at = (at - 1).clamp_min(0)
        chance, spare = stop_point(p, draft, log_weight[rows, at], rows, at)
        nodes.append(at)
        chances.append(chance)
        dists.append(normalise(spare, spare))
    return StopTable(torch.stack(nodes, 1), torch.stack(chances, 1), torch.stack(dists, 1))


def log_weights(p: Distribution, draft: Draft) -> Float[Tensor, "B J"]:
    """log w₀ … log w_K: the walk of the log-ratios, never above 0."""
    weight = torch.zeros_like(p.lse[:, 0])
    walk = [weight]
    for step in log_ratios(p, draft).unbind(1):
        weight = (weight + step).clamp_max(0)
        walk.append(weight)
    return torch.stack(walk, 1)


def stop_point(
    p: Distribution, draft: Draft, log_weight: Float[Tensor, " N"], rows: Int[Tensor, " N"], at: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, "N V"]]:
    """Inside a draft: the chance of stopping here, if nothing deeper did, and what the closing token is drawn from."""
    spare, factor = weighted_excess(p, draft, rows, at, log_weight.exp())
    mass = factor * chunk_sums(spare).double().sum(-1)
    gap = -torch.expm1(log_weight)  # 1 − w without cancellation
    chance = (mass / (mass + gap).clamp_min(torch.finfo(mass.dtype).tiny)).masked_fill(at == 0, 1.0)
    if bool((mass <= 0).any()):  # nothing is missing: only rounding leads here, and then p is right
        spare = torch.where(mass[:, None] > 0, spare, p.probs_at(rows, at))
    return chance, spare
