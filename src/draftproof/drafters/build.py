"""Build drafts from guessed tokens.

`grow` and `chosen` make a draft of chosen tokens: a tree grown best first, of which a chain is the case of one child
per node. `Spine` collects drawn tokens, each with the distribution it was drawn from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import AsyncCopy, is_cpu, to_device
from draftproof.core.distribution import Distribution
from draftproof.core.types import PAD, ROOT, Draft

N = TypeVar("N")

AUTO_CONFIDENCE: Final = "auto"
"""The setting `confidence` with which a drafter chooses by itself how likely a greedy row's path must be."""

BACK_OFF: Final = 0.4
"""Factor on the estimate of a shorter context relative to a longer one ("stupid back-off", Brants et al. 2007)."""


class Guess(NamedTuple):
    """Chosen tokens for one row, each with its parent slot."""

    tokens: list[int]
    parents: list[int]


class Follower(NamedTuple):
    """A token that may come next, and its estimated probability."""

    token: int
    share: float


def grow(root: N, expand: Callable[[N], Iterable[tuple[Follower, N]]], slots: int, *, least: float = 0.0) -> Guess:
    """Choose up to `slots` tokens after `root`, most likely paths first; `expand` returns the followers of a node.

    The score of a path is the product of its shares; paths below `least` are left out. Children leave the heap after
    their parent and by falling score, which is the order that a draft requires.
    """
    tokens: list[int] = []
    parents: list[int] = []
    ticket = count()  # breaks ties in favour of the older path, so that nodes are never compared
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
    """Make a draft of one guess per row. It carries no distribution, because nothing in it was drawn."""
    lengths = [len(guess.tokens) for guess in guesses]
    K = max(lengths, default=0)
    shape = (len(guesses), K)
    if K == 0 and not tree:  # in most rounds of a busy server nobody guesses
        return Draft(
            torch.empty(shape, dtype=torch.long, device=device),
            torch.zeros(len(guesses), dtype=torch.long, device=device),
        )
    tokens = [guess.tokens + [PAD] * (K - len(guess.tokens)) for guess in guesses]
    parents = [guess.parents + [ROOT] * (K - len(guess.parents)) for guess in guesses] if tree else None
    return Draft(
        to_device(tokens, device).view(shape),
        to_device(lengths, device),
        parents=None if parents is None else to_device(parents, device).view(shape),
    )


@dataclass(slots=True)
class Spine:
    """The tokens drawn so far, one per row and step, with their distributions.

    With `branches` > 1 the draft is a tree: after each drawn token come its `branches - 1` most likely siblings, which
    are chosen. `lengths` counts the slots that each row is to have.
    """

    branches: int
    lengths: Int[Tensor, " B"]
    tokens: list[Int[Tensor, " B"]] = field(default_factory=list)
    _dists: list[Distribution] = field(default_factory=list)
    _log_paths: list[Float[Tensor, " B"]] = field(default_factory=list)
    _siblings: list[Int[Tensor, "B M"]] = field(default_factory=list)

    def add(self, dist: Distribution, token: Int[Tensor, " B"]) -> None:
        """Add each row's next token and its distribution; a row without a valid one (NaN logits) ends before it."""
        start = len(self.tokens) * self.branches
        self.lengths = torch.where(dist.lse.isnan(), self.lengths.clamp_max(start), self.lengths)
        self.tokens.append(token)
        self._dists.append(dist)
        if self.branches > 1:
            entry = token if dist.vocab is None else dist.vocab.entry[token]
            others = dist.logits.scatter(-1, entry[:, None], -torch.inf).topk(self.branches - 1).indices
            self._siblings.append(others if dist.vocab is None else dist.vocab.ids[others])

    def end_after_weak(self, confidence: float, log_prob: Float[Tensor, " B"] | None = None) -> bool:
        """End the rows whose tokens so far have a probability below `confidence`; return True if all rows have ended.

        `log_prob` is that of each row's last token, by default under the distribution it was drawn from. The
        probability of a path is the product of its tokens'. The decision depends on tokens that were drawn and are
        submitted, so the next token, if there is one, still has its declared distribution. On a GPU the answer would
        need a synchronisation, and is always False.
        """
        stop = len(self.tokens) * self.branches
        last = self._dists[-1].log_prob(self.tokens[-1]) if log_prob is None else log_prob
        log_path = sum(self._log_paths[-1:], last)
        self._log_paths.append(log_path)
        weak = log_path.exp() < confidence
        self.lengths = torch.where(weak, self.lengths.clamp_max(stop), self.lengths)
        return is_cpu(self.lengths.device) and bool((self.lengths <= stop).all())

    def rows(self) -> AsyncCopy:
        """Start copying each row's drawn tokens, [B, N], to the CPU."""
        return AsyncCopy(torch.stack(self.tokens, 1))

    def draft(self, *, shared_rng: bool) -> Draft:
        """Make the draft. On a CPU it is as wide as its longest row; on a GPU as wide as was drawn, to avoid a sync."""
        K = int(self.lengths.max()) if is_cpu(self.lengths.device) else len(self.tokens) * self.branches
        slot = torch.arange(K, device=self.lengths.device)
        levels = torch.stack(self.tokens, 1)[..., None]
        if self.branches > 1:
            levels = torch.cat([levels, torch.stack(self._siblings, 1)], -1)
        tokens = levels.flatten(1)[:, :K].masked_fill(slot >= self.lengths[:, None], PAD)
        dist = _stacked(self._dists, self.branches, K)
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


def _stacked(dists: list[Distribution], times: int, K: int) -> Distribution:
    """Stack [B] distributions into one of [B, K], each repeated for the `times` slots of its level."""

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


def check_count(name: str, value: int, least: int) -> None:
    """Refuse a setting that is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number ≥ {least}; got {value!r}")


def check_share(name: str, value: float) -> None:
    """Refuse a setting that is not a probability."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability in [0, 1]; got {value!r}")


def check_confidence(value: float | str) -> None:
    """Refuse a confidence that is neither a probability nor "auto"."""
    if not isinstance(value, str):
        check_share("confidence", value)
    elif value != AUTO_CONFIDENCE:
        raise ValueError(f'confidence must be a probability in [0, 1] or "{AUTO_CONFIDENCE}"; got {value!r}')


def least_path(confidence: float | str, automatic: float, device: torch.device) -> float:
    """Return the probability below which a path ends: the setting, or with "auto" `automatic` on a CPU.

    On a GPU a draft is as wide as its longest row could be, so that ending one earlier would save nothing.
    """
    if not isinstance(confidence, str):
        return confidence
    return automatic if is_cpu(device) else 0.0
