"""Traversal verification of draft trees: depth first, leaves before their parents; slots may be drawn or chosen.

Weng et al. 2025 (arXiv 2505.12398), in our derivation (docs/why-it-is-exact.md). A node is entered with a weight
w = min(1, w_parent · p(t)/q(t)). When a whole subtree is rejected, the q of its slot is subtracted at the parent:
r = max(0, w·p − q), Z = Σ r, then p ← r/Z and w ← Z/(Z + 1 − w). After its last child a node stops the row with
probability w, the root with probability 1. On a chain this is block verification; on a tree of leaves only it is
sibling-by-sibling rejection.

What is subtracted at a parent does not depend on what happened below the slot. So all rows can process their slots in
storage order and choose their stopping point afterwards, without a device sync: the way on a GPU. On the CPU, with few
rows, it is faster to walk depth first and to end at the first stop. Both do the same arithmetic on the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.distribution import Distribution, normalise
from draftproof.core.draw import close
from draftproof.core.rng import Philox
from draftproof.core.tree import Shape, check_parents
from draftproof.core.types import PAD, Draft, InexactError, Verdict
from draftproof.rules.chain import StopTable, draft_probs, drafted_probs, slot_distributions

ROW_BY_ROW: Final = 64
"""Rows up to which the CPU walks depth first; with more rows, nearly every slot is needed by some row anyway."""


def tree(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Verify each row's tree and return the accepted path."""
    if draft.shared_rng:
        raise InexactError(
            'this draft was drawn with the target\'s own random numbers, which is a bias under rule="tree"'
        )
    coins = torch.nn.functional.pad(rng.coins(draft.tokens.shape[1]), (1, 0))  # the root's is 0: it always stops
    on_cpu = is_cpu(draft.tokens.device)
    if on_cpu:
        check_parents(draft)
    depth_first = on_cpu and len(coins) <= ROW_BY_ROW
    walk = Walk.to_the_first_stop(p, draft, coins) if depth_first else Walk.through_all(p, draft)
    node = walk.shape.turn.masked_fill(~(coins < walk.chances()), coins.shape[1]).argmin(1)
    last = close(walk.dist[torch.arange(len(node), device=node.device), node], rng)
    return _verdict(draft, walk.shape.path(node), last)


def stop_table(p: Distribution, draft: Draft) -> StopTable:
    """Return all stopping points, leaves first. Entries after the root are padding."""
    return Walk.through_all(p, draft).table()


@dataclass(frozen=True, slots=True)
class Walk:
    """A traversal of all rows' trees: residual distribution and weight of every node.

    They are final once all children of the node are rejected. The row then stops at the node with probability
    `weight`, and the round's last token is drawn from `dist`.
    """

    p: Distribution
    draft: Draft
    shape: Shape
    dist: Float[Tensor, "B J V"]
    weight: Float[Tensor, "B J"]
    q: Float[Tensor, "B K"]
    """q of every draft token; 1 where it was chosen."""
    q_dists: Float[Tensor, "B K V"] | None = None
    """q of every slot, dense, if all slots are processed; None: computed where needed."""

    @classmethod
    def through_all(cls, p: Distribution, draft: Draft) -> "Walk":
        """Process every slot, in storage order, without a device sync.

        Distributions are written out for all nodes, and for all slots if any was drawn: up to twice the memory of the
        scores.
        """
        walk = cls._start(p, draft, p.probs(), None if draft.q is None else slot_distributions(draft, draft.q))
        B, J = walk.weight.shape
        rows, nodes = torch.arange(B, device=walk.weight.device), torch.arange(J, device=walk.weight.device)
        for node in nodes[1:].expand(B, J - 1).unbind(1):
            walk._enter(rows, node)
            walk._reject(rows, node)
        return walk

    @classmethod
    def to_the_first_stop(cls, p: Distribution, draft: Draft, coins: Float[Tensor, "B J"]) -> "Walk":
        """Walk depth first, each row until a coin stops it. For the CPU: it reads values at every step."""
        (B, J), all_rows = coins.shape, torch.arange(len(coins))
        walk = cls._start(p, draft, p.logits.new_empty(B, J, p.vocab_size))
        walk.dist[:, 0] = p.probs_at(all_rows, torch.zeros_like(all_rows))
        visits, going = walk.shape.visits(), list(range(B))
        for turn in range(J - 1):
            going = [b for b in going if turn < len(visits[b])]
            if not going:
                break
            for nodes in zip_longest(*(visits[b][turn].entered for b in going)):
                rows, node = _columns([(b, n) for b, n in zip(going, nodes, strict=True) if n is not None])
                walk._enter(rows, node)
                walk.dist[rows, node] = p.probs_at(rows, node)
            rows, node = _columns([(b, visits[b][turn].node) for b in going])
            goes_on = ~(coins[rows, node] < walk.weight[rows, node])
            going = rows[goes_on].tolist()
            if going:
                walk._reject(rows[goes_on], node[goes_on])
        return walk

    @classmethod
    def _start(cls, p: Distribution, draft: Draft, dist: Tensor, q_dists: Tensor | None = None) -> "Walk":
        """Start at the root. Nodes that are never entered keep weight 0: no row stops there."""
        weight = torch.zeros(dist.shape[:2], dtype=torch.float64, device=dist.device)
        weight[:, 0] = 1.0
        return cls(p, draft, Shape.of(draft), dist, weight, drafted_probs(draft), q_dists)

    def _enter(self, rows: Int[Tensor, " N"], node: Int[Tensor, " N"]) -> None:
        """Set the weight of these nodes: min(1, w_parent · p(t)/q(t))."""
        slot = node - 1
        parent = self.shape.parent[rows, slot]
        wanted = self.weight[rows, parent] * self.dist[rows, parent, self.draft.tokens[rows, slot]]
        self.weight[rows, node] = torch.where(wanted > 0, (wanted / self.q[rows, slot]).clamp_max(1.0), 0.0)

    def _reject(self, rows: Int[Tensor, " N"], node: Int[Tensor, " N"]) -> None:
        """Subtract q of these nodes' slots at their parents."""
        slot = node - 1
        parent = self.shape.parent[rows, slot]
        w, dist = self.weight[rows, parent], self.dist[rows, parent]
        spare = dist * w.to(dist.dtype)[:, None]
        spare.sub_(self._q_dist(rows, slot, dist)).clamp_min_(0)
        mass = spare.double().sum(-1)
        self.weight[rows, parent] = mass / (mass + (1 - w)).clamp_min(torch.finfo(mass.dtype).tiny)
        self.dist[rows, parent] = normalise(spare, dist)

    def _q_dist(self, rows: Int[Tensor, " N"], slot: Int[Tensor, " N"], like: Tensor) -> Float[Tensor, "N V"]:
        return draft_probs(self.draft, rows, slot, like) if self.q_dists is None else self.q_dists[rows, slot]

    def chances(self) -> Float[Tensor, "B J"]:
        """Return the probability of stopping at each node, given that no earlier one stopped the row; 1 at the root."""
        return torch.nn.functional.pad(self.weight[:, 1:], (1, 0), value=1.0)

    def table(self) -> StopTable:
        """Return the stopping points in the order in which they are tried; after the root's, the root's repeated."""
        turn = self.shape.turn
        node = turn.argsort(1).masked_fill(torch.arange(turn.shape[1], device=turn.device) > turn[:, :1], 0)
        rows = torch.arange(len(node), device=node.device)[:, None]
        return StopTable(node, self.chances()[rows, node], self.dist[rows, node])


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    rows, nodes = torch.tensor(pairs).unbind(1)
    return rows, nodes


def _verdict(draft: Draft, path: Int[Tensor, "B K"], last: Int[Tensor, " B"]) -> Verdict:
    """Write the verdict: tokens and slots from the root to the node where each row stopped, and the last token."""
    kept = draft.tokens.gather(1, path.clamp_min(0)).masked_fill(path == PAD, PAD)
    accepted = (path != PAD).sum(1)
    tokens = torch.nn.functional.pad(kept, (0, 1), value=PAD).scatter_(1, accepted[:, None], last[:, None])
    return Verdict(tokens, accepted, path)
