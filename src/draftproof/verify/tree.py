"""Tree verification by traversal: depth first, leaves before their parents, any mixture of drawn and chosen slots.

Weng et al. 2025 (arXiv 2505.12398), in our derivation (docs/why-it-is-exact.md). A node is entered with a weight
w = min(1, w_parent · p(t)/q(t)); when a whole subtree is rejected, its slot's law is taken out of the parent's:
r = max(0, w·p − q), Z = Σ r, then p ← r/Z and w ← Z/(Z + 1 − w); after its last child a node is kept with probability
w, the root for certain. On a chain this is block verification; with leaves only, sibling by sibling rejection.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.closing import close
from draftproof.core.law import Law, normalise
from draftproof.core.noise import Noise
from draftproof.core.types import PAD, ROOT, Draft, Inexact, Verdict
from draftproof.verify.chain import draft_prob_of, draft_probs
from draftproof.verify.judgement import Judgement


def tree(p: Law, draft: Draft, noise: Noise) -> Verdict:
    if draft.shared_noise:
        raise Inexact('this draft was drawn with the target\'s own noise, which is a bias under rule="tree"')
    check_parents(draft)
    K = draft.tokens.shape[1]
    coins = torch.nn.functional.pad(noise.coins(K), (1, 0))  # the root stops for certain: its coin is 0
    node = torch.zeros_like(draft.lengths)
    weights = p.logits.new_empty(len(node), p.vocab_size)  # what each row's closing token is drawn from
    walk = Walk.start(p, draft)
    for stop in walk.stations():
        stops = coins[stop.rows, stop.node] < stop.chance
        node[stop.rows[stops]] = stop.node[stops]
        weights[stop.rows[stops]] = stop.law[stops]
        walk.leave(stop.rows[stops])
    return _verdict(draft, node, close(weights, noise))


def judge(p: Law, draft: Draft) -> Judgement:
    """Every station, leaves first; what stands behind a row's root is never reached."""
    B, K = draft.tokens.shape
    node = torch.zeros((B, K + 1), dtype=torch.long, device=draft.tokens.device)
    chance = torch.ones((B, K + 1), dtype=torch.float64, device=node.device)
    closing = p.probs_at(torch.arange(B, device=node.device), node[:, 0])[:, None].repeat(1, K + 1, 1)
    tried = torch.zeros_like(draft.lengths)
    for stop in Walk.start(p, draft).stations():
        place = (stop.rows, tried[stop.rows])
        node[place], chance[place], closing[place] = stop.node, stop.chance, stop.law
        tried[stop.rows] += 1
    return Judgement(node, chance, closing)


class Station(NamedTuple):
    """Where some of the rows may stop now: the node, the chance, the law of the closing token."""

    rows: Int[Tensor, " N"]
    node: Int[Tensor, " N"]
    chance: Float[Tensor, " N"]
    law: Float[Tensor, "N V"]


@dataclass(slots=True)
class Walk:
    """All rows on their way through their trees, in step. `law` and `weight` hold a row's path, one node a depth."""

    p: Law
    draft: Draft
    law: Float[Tensor, "B D V"]
    weight: Float[Tensor, "B D"]
    tour: Int[Tensor, "B E"]
    depth: Int[Tensor, "B J"]
    going: Tensor

    @classmethod
    def start(cls, p: Law, draft: Draft) -> "Walk":
        tour, depth = tours(draft)
        B, D = len(tour), int(depth.max()) + 1
        everyone = torch.arange(B, device=tour.device)
        root = p.probs_at(everyone, torch.zeros_like(everyone))
        law = root.new_zeros(B, D, root.shape[-1])
        law[:, 0] = root
        weight = torch.ones((B, D), dtype=torch.float64, device=tour.device)
        return cls(p, draft, law, weight, tour, depth, torch.ones(B, dtype=torch.bool, device=tour.device))

    def leave(self, rows: Int[Tensor, " N"]) -> None:
        self.going[rows] = False

    def stations(self) -> Iterator[Station]:
        """Walk on to the next station until every row has left or come past its root.

        An event 2n enters node n, 2n + 1 is its station: all its children are rejected by then. A row that does not
        leave there takes the node's own slot out of its parent's law.
        """
        for event in self.tour.unbind(1):
            node, is_station = event // 2, event % 2 == 1
            self._enter(*self._moving(node, ~is_station))
            rows, here = self._moving(node, is_station)
            if len(rows):
                d = self.depth[rows, here]
                chance = self.weight[rows, d].masked_fill(here == 0, 1.0)
                yield Station(rows, here, chance, self.law[rows, d])
                self._reject(*self._moving(node, is_station & (node > 0)))
            if not bool(self.going.any()):
                return

    def _moving(self, node: Int[Tensor, " B"], which: Tensor) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
        rows = (self.going & which & (node >= 0)).nonzero()[:, 0]
        return rows, node[rows]

    def _enter(self, rows: Int[Tensor, " N"], node: Int[Tensor, " N"]) -> None:
        if not len(rows):
            return
        slot, d = node - 1, self.depth[rows, node]
        drafted = self.draft.tokens[rows, slot]
        q = draft_prob_of(self.draft, rows, slot, drafted[:, None])[:, 0]
        wanted = self.weight[rows, d - 1] * self.law[rows, d - 1, drafted]
        self.weight[rows, d] = torch.where(wanted > 0, (wanted / q).clamp_max(1.0), 0.0)
        self.law[rows, d] = self.p.probs_at(rows, node)

    def _reject(self, rows: Int[Tensor, " N"], node: Int[Tensor, " N"]) -> None:
        if not len(rows):
            return
        d = self.depth[rows, node] - 1
        w, law = self.weight[rows, d], self.law[rows, d]
        spare = law * w.to(law.dtype)[:, None]
        spare.sub_(draft_probs(self.draft, rows, node - 1, law)).clamp_min_(0)
        mass = spare.double().sum(-1)
        self.weight[rows, d] = mass / (mass + (1 - w)).clamp_min(torch.finfo(mass.dtype).tiny)
        self.law[rows, d] = normalise(spare, law)


def check_parents(draft: Draft) -> None:
    """A slot comes after its parent: the order of the slots is the order in which they were drawn."""
    if draft.parents is None:
        return
    order = torch.arange(draft.tokens.shape[1], device=draft.parents.device)
    wrong = ((draft.parents >= order) | (draft.parents < ROOT)) & (order < draft.lengths[:, None])
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"parents[{b}, {i}] is {int(draft.parents[b, i])}: a slot's parent must be -1 (the root) or an earlier slot"
        )


def tours(draft: Draft) -> tuple[Int[Tensor, "B E"], Int[Tensor, "B J"]]:
    """Each row's depth-first tour, as events (`Walk.stations`) padded with -1, and the depth of its nodes."""
    B, K = draft.tokens.shape
    device = draft.tokens.device
    chain = torch.arange(-1, K - 1, device=device).expand(B, K)
    shapes = torch.cat([draft.lengths[:, None], chain if draft.parents is None else draft.parents], 1)
    if B > 1 and bool((shapes == shapes[:1]).all()):  # the usual batch: one shape for all
        tour, depth = _tour(shapes[0].tolist())
        return torch.tensor(tour, device=device).expand(B, -1), torch.tensor(depth, device=device).expand(B, -1)
    unique, which = shapes.unique(dim=0, return_inverse=True)
    each = [_tour(shape) for shape in unique.tolist()]
    return tuple(torch.tensor(part, device=device)[which] for part in zip(*each, strict=True))  # type: ignore[return-value]


def _tour(shape: list[int]) -> tuple[list[int], list[int]]:
    length, *parents = shape
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    depth = [0] * (len(parents) + 1)
    for slot, parent in enumerate(parents[:length]):
        children[parent + 1].append(slot + 1)
        depth[slot + 1] = depth[parent + 1] + 1
    events: list[int] = []
    stack = [1]  # the root's station: it is never entered
    stack += [2 * child for child in reversed(children[0])]
    while stack:
        event = stack.pop()
        events.append(event)
        if event % 2 == 0:
            node = event // 2
            stack.append(event + 1)
            stack += [2 * child for child in reversed(children[node])]
    return events + [-2] * (2 * len(parents) + 1 - len(events)), depth


def _verdict(draft: Draft, node: Int[Tensor, " B"], closing: Int[Tensor, " B"]) -> Verdict:
    """The tokens on the way from the root to the node each row stopped at, and the slots they stand in."""
    B, K = draft.tokens.shape
    rows = torch.arange(B, device=node.device)
    parents = torch.arange(-1, K - 1, device=node.device).expand(B, K) if draft.parents is None else draft.parents
    slots, slot = [], node - 1
    for _ in range(K):  # from the node up to the root
        slots.append(slot)
        slot = torch.where(slot == ROOT, ROOT, parents[rows, slot.clamp_min(0)])
    upward = torch.stack([*slots, torch.full_like(node, ROOT)], 1)
    accepted = (upward != ROOT).sum(1)
    order = accepted[:, None] - 1 - torch.arange(K, device=node.device)
    path = upward.gather(1, order.clamp_min(0)).masked_fill(order < 0, PAD)
    kept = draft.tokens.gather(1, path.clamp_min(0)).masked_fill(path == PAD, PAD)
    tokens = torch.nn.functional.pad(kept, (0, 1), value=PAD).scatter_(1, accepted[:, None], closing[:, None])
    return Verdict(tokens, accepted, path)
