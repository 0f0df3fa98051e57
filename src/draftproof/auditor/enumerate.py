"""Compute the exact distribution of one round of a rule on a small vocabulary, by enumeration and without sampling.

For every draft, a rule's `StopTable` gives each stopping point, its probability, and the distribution of the round's
last token there. Summed over all drafts that the drafter can make, that is the distribution of what one round emits.
Continued with the target's own draws up to a fixed number of tokens, it must be the target's distribution. This proves
it for whole texts: the next round starts from the emitted prefix, and the argument repeats.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.distribution import Distribution
from draftproof.core.types import Draft
from draftproof.rules.chain import StopTable

StopTableOf = Callable[[Distribution, Draft], StopTable]


@dataclass(frozen=True, slots=True)
class Scenarios:
    """N small worlds, and every draft that can be made in them.

    joint[n]     the target's distribution of the first H tokens of world n, flat: token i has stride V^(H − 1 − i)
    world[r]     the world in which draft r is made
    chance[r]    the probability of draft r in its world; they sum to 1 in each world
    p            the target's distributions along each draft
    draft        the drafts
    """

    joint: Float[Tensor, "N W"]
    world: Int[Tensor, " R"]
    chance: Float[Tensor, " R"]
    p: Distribution
    draft: Draft


@dataclass(frozen=True, slots=True)
class RoundDistribution:
    """The distribution of H tokens, one round's and then the target's, and the mean number of draft tokens kept."""

    dist: Float[Tensor, "N W"]
    kept: Float[Tensor, " N"]


def round_distribution(stop_table: StopTableOf, scenarios: Scenarios) -> RoundDistribution:
    """Compute the exact distribution of one round under a rule."""
    table = stop_table(scenarios.p, scenarios.draft)
    code, depth = paths(scenarios.draft, scenarios.p.vocab_size)
    dist = torch.zeros_like(scenarios.joint)
    kept = torch.zeros_like(scenarios.joint[:, 0])
    reach = scenarios.chance.double()
    for s in range(table.node.shape[1]):
        node = table.node[:, s : s + 1]
        stop = reach * table.chance[:, s]
        at, deep = code.gather(1, node)[:, 0], depth.gather(1, node)[:, 0]
        kept.index_add_(0, scenarios.world, stop * deep)
        mass = stop[:, None] * table.closing[:, s]
        for d in deep.unique().tolist():
            here = deep == d
            dist += _continued(mass[here], scenarios.world[here], at[here], d, scenarios.joint)
        reach = reach - stop
    return RoundDistribution(dist, kept)


def paths(draft: Draft, V: int) -> tuple[Int[Tensor, "B J"], Int[Tensor, "B J"]]:
    """Return for every node the tokens on its path from the root, as a number in base V, and the node's depth."""
    B, K = draft.tokens.shape
    code = torch.zeros((B, K + 1), dtype=torch.long, device=draft.tokens.device)
    depth = torch.zeros_like(code)
    for i in range(K):
        above = (torch.full_like(code[:, 0], i - 1) if draft.parents is None else draft.parents[:, i])[:, None] + 1
        code[:, i + 1] = code.gather(1, above)[:, 0] * V + draft.tokens[:, i].clamp_min(0)
        depth[:, i + 1] = depth.gather(1, above)[:, 0] + 1
    return code, depth


def _continued(
    mass: Float[Tensor, "R V"],
    world: Int[Tensor, " R"],
    code: Int[Tensor, " R"],
    depth: int,
    joint: Float[Tensor, "N W"],
) -> Float[Tensor, "N W"]:
    """Continue the mass of (kept tokens, last token) with the target's draws to H tokens.

    Prefixes that are impossible under the target have no continuation: their mass is spread evenly, and shows as an
    error.
    """
    N, V = len(joint), mass.shape[1]
    emitted = torch.zeros((N * V**depth, V), dtype=joint.dtype, device=joint.device)
    emitted.index_add_(0, world * V**depth + code, mass.to(joint.dtype))
    rest = joint.view(N, V ** (depth + 1), -1)
    total = rest.sum(-1, keepdim=True)
    continuation = torch.where(total > 0, rest / total.where(total > 0, 1.0), 1.0 / rest.shape[-1])
    return (emitted.view(N, -1, 1) * continuation).flatten(1)
