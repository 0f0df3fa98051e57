"""A tree of a head's likeliest paths, level by level, after EAGLE-2 (Li et al. 2024, arXiv 2406.16858).

Of each level the best few nodes are followed, together in one pass; of all that was seen the likeliest are submitted. A
path is at most as likely as its beginning, so the likeliest nodes are a tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu, to_device
from draftproof.core.types import PAD, ROOT, Draft

Score = Callable[[Float[Tensor, "B w H"]], tuple[Int[Tensor, "B w c"], Float[Tensor, "B w c"]]]
"""The likeliest tokens behind each state, and their log-probabilities."""

Follow = Callable[[Int[Tensor, "B w"], Float[Tensor, "B w H"], Bool[Tensor, "B w M"]], Float[Tensor, "B w H"]]
"""The states behind the nodes of a level; see `HeadReader.branch`."""


def grow_levels(h: Float[Tensor, "B H"], slots: Sequence[int], width: int, score: Score, follow: Follow) -> Draft:
    """Up to slots[b] nodes for each row; `width` nodes of a level are followed.

    Where a level can add nothing more the growth ends. Elsewhere than on the host asking would be waiting, so as many
    levels are followed as a chain of so many slots would take steps: the tree is the same.
    """
    seen = Seen.start(*score(h[:, None]))
    level = Level.start(h)
    for _ in range(1, max(slots)):
        best = seen.best_of_level(width)
        if is_cpu(h.device) and not seen.may_gain(best, slots):
            break
        level = level.behind(seen.tokens.gather(1, best), seen.place(best), follow)
        seen.add(best, *score(level.states))
    return seen.likeliest(slots)


@dataclass(slots=True)
class Seen:
    """All candidates so far: token, log-probability of the path, and the candidate before it."""

    tokens: Int[Tensor, "B P"]
    paths: Float[Tensor, "B P"]
    parents: Int[Tensor, "B P"]
    width: int
    """How many of the last belong to the present level."""
    places: Int[Tensor, "B L"]
    """For each of those, which of the followed nodes it stands behind."""

    @classmethod
    def start(cls, tokens: Int[Tensor, "B 1 c"], log_p: Float[Tensor, "B 1 c"]) -> "Seen":
        root = torch.zeros_like(tokens[:, 0])
        return cls(tokens[:, 0], log_p[:, 0].clamp_max(0.0), root + ROOT, tokens.shape[2], root)

    def best_of_level(self, width: int) -> Int[Tensor, "B w"]:
        """The best candidates of the present level."""
        before = self.paths.shape[1] - self.width
        return before + self.paths[:, before:].topk(min(width, self.width)).indices

    def may_gain(self, best: Int[Tensor, "B w"], slots: Sequence[int]) -> bool:
        """Might what stands behind the best still be among a row's likeliest?"""
        hopes = self.paths.gather(1, best[:, :1])[:, 0].tolist()
        for row, hope, most in zip(self.paths.tolist(), hopes, slots, strict=True):
            if most and (len(row) < most or sorted(row, reverse=True)[most - 1] < hope):
                return True
        return False

    def add(self, behind: Int[Tensor, "B w"], tokens: Int[Tensor, "B w c"], log_p: Float[Tensor, "B w c"]) -> None:
        """A level more, behind the candidates that were followed. No path is likelier than its beginning, whatever
        rounding says."""
        B, w, c = tokens.shape
        paths = self.paths.gather(1, behind)[..., None] + log_p.clamp_max(0.0)
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], 1)
        self.paths = torch.cat([self.paths, paths.flatten(1)], 1)
        self.parents = torch.cat([self.parents, behind.repeat_interleave(c, 1)], 1)
        self.width = w * c
        self.places = torch.arange(w, device=tokens.device).repeat_interleave(c).expand(B, -1)

    def place(self, candidates: Int[Tensor, "B w"]) -> Int[Tensor, "B w"]:
        """Which of the nodes followed last these candidates of the present level stand behind."""
        return self.places.gather(1, candidates - (self.paths.shape[1] - self.width))

    def likeliest(self, slots: Sequence[int]) -> Draft:
        """The best nodes, parents first: no path is likelier than its beginning, and of two equal ones the older comes
        first. What cannot be said at all is left out."""
        possible = self.paths > -torch.inf
        order = self.paths.where(possible, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        lengths = possible.sum(1).minimum(to_device(slots, order.device))
        K = int(lengths.max()) if is_cpu(lengths.device) else min(max(slots), order.shape[1])
        beyond = torch.arange(K, device=lengths.device) >= lengths[:, None]
        slot = order.argsort(1)  # of every candidate
        parents = self.parents.gather(1, order[:, :K])
        parents = torch.where(parents == ROOT, ROOT, slot.gather(1, parents.clamp_min(0)))
        tokens = self.tokens.gather(1, order[:, :K]).masked_fill(beyond, PAD)
        return Draft(tokens, lengths, parents=parents.masked_fill(beyond, ROOT))


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes followed last: their states, and which of all followed nodes are on their path."""

    states: Float[Tensor, "B w H"]
    lineage: Bool[Tensor, "B w M"]

    @classmethod
    def start(cls, h: Float[Tensor, "B H"]) -> "Level":
        return cls(h[:, None], torch.zeros((len(h), 1, 0), dtype=torch.bool, device=h.device))

    def behind(self, tokens: Int[Tensor, "B w"], parents: Int[Tensor, "B w"], follow: Follow) -> "Level":
        """The next nodes: these tokens, each behind one of the present nodes."""
        place = parents[..., None]
        B, w, _ = place.shape
        own = torch.eye(w, dtype=torch.bool, device=place.device).expand(B, w, w)
        above = self.lineage.gather(1, place.expand(B, w, self.lineage.shape[2]))
        lineage = torch.cat([above, own], 2)
        states = self.states.gather(1, place.expand(B, w, self.states.shape[2]))
        return Level(follow(tokens, states, lineage), lineage)
