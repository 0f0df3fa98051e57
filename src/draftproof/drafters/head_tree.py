"""Grow a tree of a head's most likely paths, level by level, after EAGLE-2 (Li et al. 2024, arXiv 2406.16858).

The best few nodes of each level are expanded together in one pass. Of all candidates seen, the most likely are
submitted. A path is at most as likely as its prefix, so these form a tree.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu, to_device
from draftproof.core.types import PAD, ROOT, Draft

Score = Callable[[Float[Tensor, "B w H"]], tuple[Int[Tensor, "B w c"], Float[Tensor, "B w c"]]]
"""Returns the most likely tokens after each state, and their log-probabilities."""

Follow = Callable[[Int[Tensor, "B w"], Float[Tensor, "B w H"], Bool[Tensor, "B w M"]], Float[Tensor, "B w H"]]
"""Returns the states after the nodes of a level; see `HeadReader.branch`."""


def grow_levels(
    h: Float[Tensor, "B H"], slots: Sequence[int], width: int, score: Score, follow: Follow, *, least: float = 0.0
) -> Draft:
    """Grow a tree of up to slots[b] nodes for each row, expanding `width` nodes of every level.

    Paths less likely than `least` are left out, except the likeliest first token: nodes are chosen, so any may be left
    out.

    On a CPU, growth stops at the first level that cannot add a node. On a GPU that test would need a synchronisation,
    so max(slots) - 1 levels are expanded, as many as a chain takes steps. The tree is the same.
    """
    candidates = Candidates.start(*score(h[:, None]))
    level = Level.start(h)
    for _ in range(1, max(slots)):
        best = candidates.best_of_level(width)
        if is_cpu(h.device) and not candidates.may_gain(best, slots, least):
            break
        level = level.next(candidates.tokens.gather(1, best), candidates.expanded_parent(best), follow)
        candidates.add(best, *score(level.states))
    return candidates.likeliest(slots, least)


@dataclass(slots=True)
class Candidates:
    """All candidates so far: token, log-probability of the path, and index of the parent candidate."""

    tokens: Int[Tensor, "B P"]
    paths: Float[Tensor, "B P"]
    parents: Int[Tensor, "B P"]
    level_size: int
    """Number of candidates of the current level; they are the last ones."""
    expanded_parents: Int[Tensor, "B L"]
    """For each candidate of the current level, its parent's index among the nodes expanded last."""

    @classmethod
    def start(cls, tokens: Int[Tensor, "B 1 c"], log_p: Float[Tensor, "B 1 c"]) -> "Candidates":
        """Start with the candidates after the root."""
        root = torch.zeros_like(tokens[:, 0])
        return cls(tokens[:, 0], log_p[:, 0].clamp_max(0.0), root + ROOT, tokens.shape[2], root)

    def best_of_level(self, width: int) -> Int[Tensor, "B w"]:
        """Return the indices of the best candidates of the current level."""
        before = self.paths.shape[1] - self.level_size
        return before + self.paths[:, before:].topk(min(width, self.level_size)).indices

    def may_gain(self, best: Int[Tensor, "B w"], slots: Sequence[int], least: float = 0.0) -> bool:
        """Tell whether a child of the best candidates may still be among the slots[b] most likely of some row."""
        bounds = self.paths.gather(1, best[:, :1])[:, 0].tolist()
        for row, bound, most in zip(self.paths.tolist(), bounds, slots, strict=True):
            likely = math.exp(bound) >= least
            if most and likely and (len(row) < most or sorted(row, reverse=True)[most - 1] < bound):
                return True
        return False

    def add(self, parents: Int[Tensor, "B w"], tokens: Int[Tensor, "B w c"], log_p: Float[Tensor, "B w c"]) -> None:
        """Add a level of children. Log-probabilities are clamped to 0: rounding must not make a path gain."""
        B, w, c = tokens.shape
        paths = self.paths.gather(1, parents)[..., None] + log_p.clamp_max(0.0)
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], 1)
        self.paths = torch.cat([self.paths, paths.flatten(1)], 1)
        self.parents = torch.cat([self.parents, parents.repeat_interleave(c, 1)], 1)
        self.level_size = w * c
        self.expanded_parents = torch.arange(w, device=tokens.device).repeat_interleave(c).expand(B, -1)

    def expanded_parent(self, candidates: Int[Tensor, "B w"]) -> Int[Tensor, "B w"]:
        """Return the index of each candidate's parent among the nodes expanded last."""
        return self.expanded_parents.gather(1, candidates - (self.paths.shape[1] - self.level_size))

    def likeliest(self, slots: Sequence[int], least: float = 0.0) -> Draft:
        """Make a draft of each row's slots[b] most likely candidates; those of probability 0 are left out.

        So are those below `least`, except the likeliest of all.
        Parents come before their children: no path is likelier than its prefix, and the sort is stable.
        """
        top = self.paths == self.paths.amax(1, keepdim=True)
        possible = (self.paths > -torch.inf) & ((self.paths.exp() >= least) | top)
        order = self.paths.where(possible, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        lengths = possible.sum(1).minimum(to_device(slots, order.device))
        K = int(lengths.max()) if is_cpu(lengths.device) else min(max(slots), order.shape[1])
        beyond = torch.arange(K, device=lengths.device) >= lengths[:, None]
        slot = order.argsort(1)  # the slot of every candidate
        parents = self.parents.gather(1, order[:, :K])
        parents = torch.where(parents == ROOT, ROOT, slot.gather(1, parents.clamp_min(0)))
        tokens = self.tokens.gather(1, order[:, :K]).masked_fill(beyond, PAD)
        return Draft(tokens, lengths, parents=parents.masked_fill(beyond, ROOT))


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes expanded last: their states, and which of all expanded nodes lie on their path."""

    states: Float[Tensor, "B w H"]
    lineage: Bool[Tensor, "B w M"]

    @classmethod
    def start(cls, h: Float[Tensor, "B H"]) -> "Level":
        """Start with the root."""
        return cls(h[:, None], torch.zeros((len(h), 1, 0), dtype=torch.bool, device=h.device))

    def next(self, tokens: Int[Tensor, "B w"], parents: Int[Tensor, "B w"], follow: Follow) -> "Level":
        """Expand the next nodes: these tokens, each a child of one of the current nodes."""
        index = parents[..., None]
        B, w, _ = index.shape
        own = torch.eye(w, dtype=torch.bool, device=index.device).expand(B, w, w)
        above = self.lineage.gather(1, index.expand(B, w, self.lineage.shape[2]))
        lineage = torch.cat([above, own], 2)
        states = self.states.gather(1, index.expand(B, w, self.states.shape[2]))
        return Level(follow(tokens, states, lineage), lineage)
