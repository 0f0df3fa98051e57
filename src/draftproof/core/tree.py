"""Find the shape of a draft tree: ancestors, paths, and the order in which a round may stop at its nodes.

All is computed by operations of fixed sizes that never read the parents on the CPU, so that a GPU needs no sync;
`Shape.visits` and `check_parents` are the exceptions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.types import PAD, ROOT, Draft


class Visit(NamedTuple):
    """A stopping point of a row, and the nodes that are entered for the first time on the path to it."""

    entered: list[int]
    node: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of each row's tree. Node 0 is the root, node i + 1 is the end of slot i.

    A padding slot is its own parent, so that no real node depends on it.
    """

    real: Bool[Tensor, "B K"]
    """True for slots that hold a token."""
    parent: Int[Tensor, "B K"]
    """The node that each slot follows."""
    above: Bool[Tensor, "B J K"]
    """True for the slots on the path from the root to each node, including the node's own slot."""
    turn: Int[Tensor, "B J"]
    """Rank of each node among the stopping points: children before their parents, siblings in order. Root last, then
    padding slots."""

    @classmethod
    def of(cls, draft: Draft) -> "Shape":
        """Return the shape of a draft. A row ends before its first slot with an impossible parent (`check_parents`)."""
        slots = torch.arange(draft.tokens.shape[1], device=draft.tokens.device)
        holds_token = real(draft)
        if draft.parents is not None:
            holds_token = holds_token & (misplaced(draft).cumsum(1) == 0)
        parents = torch.where(holds_token, slots - 1 if draft.parents is None else draft.parents, slots)
        above = lineage(parents)[..., 1:]
        return cls(holds_token, parents + 1, above, _turns(holds_token, parents, above))

    def path(self, node: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        """Return the slots on the path to a node of each row, in order, then PAD."""
        B, K = self.parent.shape
        on = self.above[torch.arange(B, device=node.device), node]
        place = torch.where(on, on.cumsum(1) - 1, K)  # a slot comes after its parent, so slots are in path order
        slots = torch.arange(K, device=node.device).expand(B, K)
        return torch.full((B, K + 1), PAD, device=node.device).scatter_(1, place, slots)[:, :K]

    def visits(self) -> list[list[Visit]]:
        """Return each row's stopping points in order, without the root. For the CPU: on a GPU this syncs."""
        rows = zip(self.turn.argsort(1).tolist(), self.parent.tolist(), self.real.sum(1).tolist(), strict=True)
        return [_visits(stop_points[:length], parents) for stop_points, parents, length in rows]


def _turns(
    holds_token: Bool[Tensor, "B K"], parents: Int[Tensor, "B K"], above: Bool[Tensor, "B J K"]
) -> Int[Tensor, "B J"]:
    """Return `Shape.turn`.

    Before a node's turn come all nodes below it, and all subtrees of earlier siblings of it or of one of its ancestors.
    """
    size = (above[:, 1:] & holds_token[..., None]).sum(1)
    slots = torch.arange(parents.shape[1], device=size.device)
    earlier = (parents[:, :, None] == parents[:, None]) & (slots < slots[:, None]) & holds_token[:, None]
    passed = (earlier * size[:, None]).sum(2)
    turn = (above[:, 1:] * passed[:, None]).sum(2) + size - 1
    return torch.cat([holds_token.sum(1, keepdim=True), torch.where(holds_token, turn, slots + 1)], 1)


def _visits(stop_points: list[int], parents: list[int]) -> list[Visit]:
    """Return one row's visits; `parents[i]` is the node that slot i follows."""
    entered, visits = {0}, []
    for stop_point in stop_points:
        new, node = [], stop_point
        while node not in entered:
            new.append(node)
            entered.add(node)
            node = parents[node - 1]
        visits.append(Visit(new[::-1], stop_point))
    return visits


def ancestors(draft: Draft) -> Bool[Tensor, "B J K"]:
    """Tell which slots come before each scored position: none at 0; at i + 1 slot i and all its ancestors."""
    B, K = draft.tokens.shape
    if draft.parents is None:
        lower = torch.ones((K + 1, K), dtype=torch.bool, device=draft.tokens.device).tril(-1)
        return lower.expand(B, K + 1, K)
    return lineage(draft.parents)[..., 1:]


def lineage(parents: Int[Tensor, "B K"]) -> Bool[Tensor, "B J J"]:
    """Tell whether position j is position i or an ancestor of it; position 0 is the root, i + 1 is slot i.

    Paths double in length with every squaring, so log2(K) small products replace K steps.
    """
    B, K = parents.shape
    up = torch.eye(K + 1, device=parents.device).repeat(B, 1, 1)
    up[:, 1:].scatter_(2, (parents + 1).unsqueeze(2), 1.0)
    for _ in range(K.bit_length()):
        up = (up @ up).clamp_(max=1.0)
    return up > 0


def real(draft: Draft) -> Bool[Tensor, "B K"]:
    """Tell which slots hold a token; the others are padding."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < draft.lengths[:, None]


def check_parents(draft: Draft) -> None:
    """Refuse a slot with an impossible parent. On a GPU this syncs."""
    if draft.parents is None:
        return
    wrong = misplaced(draft)
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"parents[{b}, {i}] is {int(draft.parents[b, i])}: a slot's parent must be -1 (the root) or an earlier slot"
        )


def misplaced(draft: Draft) -> Bool[Tensor, "B K"]:
    """Tell which slots have a parent that is neither the root nor an earlier slot.

    The order of the slots is the order in which they were drawn, so a slot comes after its parent.
    """
    assert draft.parents is not None
    slots = torch.arange(draft.tokens.shape[1], device=draft.parents.device)
    return ((draft.parents >= slots) | (draft.parents < ROOT)) & real(draft)
