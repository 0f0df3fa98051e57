"""Block verification: verify the draft as a whole, which keeps at least as many tokens on average as token by token.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), algorithm 2. With
w₀ = 1, wᵢ = min(1, wᵢ₋₁ · p(xᵢ)/q(xᵢ)), keeping exactly i tokens is tried from the deepest i down and succeeds with
probability hᵢ = Zᵢ / (Zᵢ + 1 − wᵢ), where Zᵢ = Σ max(0, wᵢ·p − q) is the mass of the residual; with probability wᵢ at
the end of the draft; with probability 1 at i = 0. Only the positions that the scan reaches are read.
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
    """Verify each chain as one block: try to keep all of it, then one token less, down to none."""
    refuse_inexact(draft, "block")
    if draft.q is None:
        return token(p, draft, rng)  # where q is a point mass, both rules are the same
    log_weight = log_weights(p, draft)
    coins = torch.nn.functional.pad(rng.coins(draft.tokens.shape[1]), (1, 0))  # node 0 needs no coin
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
        del spare  # [N, V]: free it before the next stopping point allocates its own
    order = torch.cat(stopped)
    last = torch.empty_like(accepted)
    last[order] = close(_rows(weights), rng.take(order))
    return verdict(draft, accepted, last)


def _rows(parts: list[Tensor]) -> Float[Tensor, "B V"]:
    """Concatenate the rows of all parts; a single non-empty part is returned without a copy."""
    parts = [part for part in parts if len(part)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def stop_table(p: Distribution, draft: Draft) -> StopTable:
    """Return all stopping points, from the end of the draft down to the root. Entries after the root are padding."""
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
    """Return log w₀ … log w_K: running sums of the log-ratios, capped at 0 at every step."""
    weight = torch.zeros_like(p.lse[:, 0])
    walk = [weight]
    for step in log_ratios(p, draft).unbind(1):
        weight = (weight + step).clamp_max(0)
        walk.append(weight)
    return torch.stack(walk, 1)


def stop_point(
    p: Distribution, draft: Draft, log_weight: Float[Tensor, " N"], rows: Int[Tensor, " N"], at: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, "N V"]]:
    """Return the probability of stopping at a node before the draft's end, given that no deeper node stopped the row,
    and the weights from which the residual token is drawn."""
    spare, factor = weighted_excess(p, draft, rows, at, log_weight.exp())
    mass = factor * chunk_sums(spare).double().sum(-1)
    gap = -torch.expm1(log_weight)  # 1 − w without cancellation
    chance = (mass / (mass + gap).clamp_min(torch.finfo(mass.dtype).tiny)).masked_fill(at == 0, 1.0)
    if bool((mass <= 0).any()):  # no residual: reached by rounding only, where p = q
        spare = torch.where(mass[:, None] > 0, spare, p.probs_at(rows, at))
    return chance, spare
