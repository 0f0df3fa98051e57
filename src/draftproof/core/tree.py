"""The shape of a tree of slots: who hangs on whom, and the order in which a row may stop at its nodes.

Worked out by operations of fixed sizes, without a look at the parents: on a GPU every look is a wait.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.types import PAD, ROOT, Draft


def lineage(parents: Int[Tensor, "B K"]) -> Bool[Tensor, "B J J"]:
    """For the root and K slots: is position j an ancestor of position i, or i itself? Position 0 is the root.

    Paths double in length with every squaring, so log2(K) small products do what K steps would.
    """
    B, K = parents.shape
    up = torch.eye(K + 1, device=parents.device).repeat(B, 1, 1)
    up[:, 1:].scatter_(2, (parents + 1).unsqueeze(2), 1.0)
    for _ in range(K.bit_length()):
        up = (up @ up).clamp_(max=1.0)
    return up > 0


class Visit(NamedTuple):
    """A station on a row's way, and the nodes that are entered for the first time on the way to it."""

    entered: list[int]
    node: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Node 0 is the root, node i + 1 stands behind slot i. A slot that holds no token hangs on itself, where it is in
    nobody's way."""

    real: Bool[Tensor, "B K"]
    parent: Int[Tensor, "B K"]
    """The node that each slot hangs on."""
    above: Bool[Tensor, "B J K"]
    """Which slots stand on the way from the root to each node, its own with them."""
    turn: Int[Tensor, "B J"]
    """When each node's station is tried: children before their parents, siblings in their order. The root's comes last,
    and behind it what is not there."""

    @classmethod
    def of(cls, draft: Draft) -> "Shape":
        """A row's draft ends before the first slot that has no possible parent (`check_parents`)."""
        slots = torch.arange(draft.tokens.shape[1], device=draft.tokens.device)
        there = real(draft)
        if draft.parents is not None:
            there = there & (misplaced(draft).cumsum(1) == 0)
        parents = torch.where(there, slots - 1 if draft.parents is None else draft.parents, slots)
        above = lineage(parents)[..., 1:]
        return cls(there, parents + 1, above, _turns(there, parents, above))

    def path(self, node: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        """The slots on the way to a node of each row, then PAD. A parent's slot comes first, so they are in order."""
        B, K = self.parent.shape
        on = self.above[torch.arange(B, device=node.device), node]
        place = torch.where(on, on.cumsum(1) - 1, K)
        slots = torch.arange(K, device=node.device).expand(B, K)
        return torch.full((B, K + 1), PAD, device=node.device).scatter_(1, place, slots)[:, :K]

    def visits(self) -> list[list[Visit]]:
        """Each row's way through its tree, without the root's station. For the host: it looks."""
        rows = zip(self.turn.argsort(1).tolist(), self.parent.tolist(), self.real.sum(1).tolist(), strict=True)
        return [_way(stop_points[:length], parents) for stop_points, parents, length in rows]


def _turns(there: Bool[Tensor, "B K"], parents: Int[Tensor, "B K"], above: Bool[Tensor, "B J K"]) -> Int[Tensor, "B J"]:
    """Before a node's turn come all nodes below it, and all on earlier siblings of it or of one above it."""
    size = (above[:, 1:] & there[..., None]).sum(1)
    slots = torch.arange(parents.shape[1], device=size.device)
    earlier = (parents[:, :, None] == parents[:, None]) & (slots < slots[:, None]) & there[:, None]
    passed = (earlier * size[:, None]).sum(2)
    turn = (above[:, 1:] * passed[:, None]).sum(2) + size - 1
    return torch.cat([there.sum(1, keepdim=True), torch.where(there, turn, slots + 1)], 1)


def _way(stop_points: list[int], parents: list[int]) -> list[Visit]:
    entered, way = {0}, []
    for stop_point in stop_points:
        new, node = [], stop_point
        while node not in entered:
            new.append(node)
            entered.add(node)
            node = parents[node - 1]
        way.append(Visit(new[::-1], stop_point))
    return way


def misplaced(draft: Draft) -> Bool[Tensor, "B K"]:
    """The slots whose parent is no earlier slot and not the root. A slot comes after its parent: the order of the slots
    is the order in which they were drawn."""
    assert draft.parents is not None
    slots = torch.arange(draft.tokens.shape[1], device=draft.parents.device)
    return ((draft.parents >= slots) | (draft.parents < ROOT)) & real(draft)


def check_parents(draft: Draft) -> None:
    """Refuse a misplaced slot. It looks."""
    if draft.parents is None:
        return
    wrong = misplaced(draft)
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"parents[{b}, {i}] is {int(draft.parents[b, i])}: a slot's parent must be -1 (the root) or an earlier slot"
        )


def ancestors(draft: Draft) -> Bool[Tensor, "B J K"]:
    """Which slots come before each scored position: none at 0; at i + 1 slot i and all it descends from."""
    B, K = draft.tokens.shape
    if draft.parents is None:
        lower = torch.ones((K + 1, K), dtype=torch.bool, device=draft.tokens.device).tril(-1)
        return lower.expand(B, K + 1, K)
    return lineage(draft.parents)[..., 1:]


def real(draft: Draft) -> Bool[Tensor, "B K"]:
    """Which slots hold a token."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths[:, None]
