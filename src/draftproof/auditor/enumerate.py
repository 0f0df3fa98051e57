"""The exact distribution of a rule on a small vocabulary: a sum over all drafts and all stations, and no sampling.

A rule says, for every draft, where it may stop, with what chance, and from which distribution it closes (`StopTable`). Summed
over every draft that the drafter can make, that is the distribution of what one round emits. Carried on with the target's own
draws up to a fixed number of tokens, it must be the target's distribution. One round that keeps it keeps it for a whole text:
the next round starts from the emitted prefix, and the argument repeats.
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

    joint[n]     the target's distribution of the first H tokens of world n, flat: token i counts V^(H − 1 − i)
    world[r]     the world in which draft r is made, and
    chance[r]    the probability that it is; they sum to 1 in each world
    p, draft     the target's distributions along draft r, and the draft
    """

    joint: Float[Tensor, "N W"]
    world: Int[Tensor, " R"]
    chance: Float[Tensor, " R"]
    p: Distribution
    draft: Draft


@dataclass(frozen=True, slots=True)
class RoundDistribution:
    """What a round emits, carried on by the target to H tokens: its distribution, and how many draft tokens it keeps."""

    dist: Float[Tensor, "N W"]
    kept: Float[Tensor, " N"]


def round_distribution(judge: StopTableOf, scenarios: Scenarios) -> RoundDistribution:
    """The exact distribution of one round under a rule."""
    table = judge(scenarios.p, scenarios.draft)
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
            dist += _carried_on(mass[here], scenarios.world[here], at[here], d, scenarios.joint)
        reach = reach - stop
    return RoundDistribution(dist, kept)


def paths(draft: Draft, V: int) -> tuple[Int[Tensor, "B J"], Int[Tensor, "B J"]]:
    """For every node the tokens on its way from the root, read as a number in base V, and their count."""
    B, K = draft.tokens.shape
    code = torch.zeros((B, K + 1), dtype=torch.long, device=draft.tokens.device)
    depth = torch.zeros_like(code)
    for i in range(K):
        above = (torch.full_like(code[:, 0], i - 1) if draft.parents is None else draft.parents[:, i])[:, None] + 1
        code[:, i + 1] = code.gather(1, above)[:, 0] * V + draft.tokens[:, i].clamp_min(0)
        depth[:, i + 1] = depth.gather(1, above)[:, 0] + 1
    return code, depth


def _carried_on(
    mass: Float[Tensor, "R V"],
    world: Int[Tensor, " R"],
    code: Int[Tensor, " R"],
    depth: int,
    joint: Float[Tensor, "N W"],
) -> Float[Tensor, "N W"]:
    """Put down the mass of (kept tokens, closing token) and let the target say the rest of the H tokens.

    What the target cannot say it cannot carry on either: such mass is spread evenly, where it shows as an error.
    """
    N, V = len(joint), mass.shape[1]
    emitted = torch.zeros((N * V**depth, V), dtype=joint.dtype, device=joint.device)
    emitted.index_add_(0, world * V**depth + code, mass.to(joint.dtype))
    rest = joint.view(N, V ** (depth + 1), -1)
    total = rest.sum(-1, keepdim=True)
    given = torch.where(total > 0, rest / total.where(total > 0, 1.0), 1.0 / rest.shape[-1])
    return (emitted.view(N, -1, 1) * given).flatten(1)
