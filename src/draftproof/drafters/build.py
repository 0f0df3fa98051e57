"""From what may follow to a draft: a tree grown best first, of which a chain is the case of one follower a node."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.core.device import AsyncCopy, is_cpu, to_device
from draftproof.core.distribution import Distribution
from draftproof.core.types import PAD, ROOT, Draft

N = TypeVar("N")


class Guess(NamedTuple):
    """Chosen tokens for one row, each with its parent slot."""

    tokens: list[int]
    parents: list[int]


class Follower(NamedTuple):
    """A token that may come next, and how likely that seems."""

    token: int
    share: float


BACK_OFF = 0.4
"""What a shorter context's word is worth beside a longer one's (Brants et al. 2007, "stupid back-off")."""


def grow(root: N, expand: Callable[[N], Iterable[tuple[Follower, N]]], slots: int, *, least: float = 0.0) -> Guess:
    """Up to `slots` tokens behind `root`, the likeliest paths first; `expand` gives the followers of a node.

    A path is as likely as the product of its shares; those below `least` are left out. Children leave the heap after
    their parent and in falling order, which is the order in which a draft wants them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    ticket = count()  # of two equal paths the older one: nodes are never compared
    heap = [(-f.share, next(ticket), f.token, ROOT, node) for f, node in expand(root) if slots and f.share >= least]
    heapify(heap)
    while heap and len(tokens) < slots:
        score, _, token, parent, node = heappop(heap)
        slot = len(tokens)
        tokens.append(token)
        parents.append(parent)
        if slot + 1 == slots:
            break
        for follower, child in expand(node):
            if -score * follower.share >= least:
                heappush(heap, (score * follower.share, next(ticket), follower.token, slot, child))
    return Guess(tokens, parents)


def chosen(guesses: Sequence[Guess], device: torch.device, *, tree: bool = False) -> Draft:
    """The draft that these guesses make: nothing in it was drawn, so it carries no distribution."""
    lengths = [len(guess.tokens) for guess in guesses]
    K = max(lengths, default=0)
    shape = (len(guesses), K)
    tokens = [guess.tokens + [PAD] * (K - len(guess.tokens)) for guess in guesses]
    parents = [guess.parents + [ROOT] * (K - len(guess.parents)) for guess in guesses] if tree else None
    return Draft(
        to_device(tokens, device).view(shape),
        to_device(lengths, device),
        parents=None if parents is None else to_device(parents, device).view(shape),
    )


def check_count(name: str, value: int, least: int) -> None:
    """Refuse a setting that is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number ≥ {least}; got {value!r}")


def check_share(name: str, value: float) -> None:
    """Refuse a setting that is no probability."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability in [0, 1]; got {value!r}")


@dataclass(slots=True)
class Spine:
    """What has been drawn so far, for all rows in step. `lengths` counts the slots that each row is to have."""

    branches: int
    lengths: Int[Tensor, " B"]
    tokens: list[Int[Tensor, " B"]] = field(default_factory=list)
    _dists: list[Distribution] = field(default_factory=list)
    _siblings: list[Int[Tensor, "B M"]] = field(default_factory=list)

    def add(self, dist: Distribution, token: Int[Tensor, " B"]) -> None:
        """A token and the distribution it was drawn from. Where that is no distribution (NaN logits) the row's draft ends before it."""
        start = len(self.tokens) * self.branches
        self.lengths = torch.where(dist.lse.isnan(), self.lengths.clamp_max(start), self.lengths)
        self.tokens.append(token)
        self._dists.append(dist)
        if self.branches > 1:
            entry = token if dist.vocab is None else dist.vocab.entry[token]
            others = dist.logits.scatter(-1, entry[:, None], -torch.inf).topk(self.branches - 1).indices
            self._siblings.append(others if dist.vocab is None else dist.vocab.ids[others])

    def end_behind_weak(self, confidence: float) -> bool:
        """End the rows whose last token seemed less likely than this; are all rows known to be at their end?"""
        stop = len(self.tokens) * self.branches
        weak = self._dists[-1].log_prob(self.tokens[-1]).exp() < confidence
        self.lengths = torch.where(weak, self.lengths.clamp_max(stop), self.lengths)
        return is_cpu(self.lengths.device) and bool((self.lengths <= stop).all())

    def rows(self) -> AsyncCopy:
        """Each row's drawn tokens, [B, N], on their way to the host."""
        return AsyncCopy(torch.stack(self.tokens, 1))

    def draft(self, *, shared_rng: bool) -> Draft:
        """As many slots as the longest row has; elsewhere than on the host, where asking would be waiting, as were
        drawn."""
        K = int(self.lengths.max()) if is_cpu(self.lengths.device) else len(self.tokens) * self.branches
        slot = torch.arange(K, device=self.lengths.device)
        levels = torch.stack(self.tokens, 1)[..., None]
        if self.branches > 1:
            levels = torch.cat([levels, torch.stack(self._siblings, 1)], -1)
        tokens = levels.flatten(1)[:, :K].masked_fill(slot >= self.lengths[:, None], PAD)
        dist = _side_by_side(self._dists, self.branches, K)
        if self.branches == 1:
            return Draft(tokens, self.lengths, dist, shared_rng=shared_rng)
        parents = torch.where(slot < self.branches, ROOT, (slot // self.branches - 1) * self.branches)
        return Draft(
            tokens,
            self.lengths,
            dist,
            (slot % self.branches == 0).expand(tokens.shape),
            parents.expand(tokens.shape),
            shared_rng=shared_rng,
        )


def _side_by_side(dists: list[Distribution], times: int, K: int) -> Distribution:
    """[B] distributions as one of [B, K], each for as many slots as a node has."""

    def column(parts: list[Tensor]) -> Tensor:
        stacked = torch.stack(parts, 1)
        return (stacked if times == 1 else stacked.repeat_interleave(times, 1))[:, :K]

    return Distribution(
        column([dist.logits for dist in dists]),
        column([dist.scale for dist in dists]),
        column([dist.cutoff for dist in dists]),
        column([dist.lse for dist in dists]),
        column([dist.point for dist in dists]),
        dists[0].vocab,
        all(dist.plain for dist in dists),
    )
