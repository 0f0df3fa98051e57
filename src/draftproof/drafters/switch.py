"""Choose one of two drafters for each row: the one that copies where the text repeats itself, otherwise the other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.types import PAD, Draft
from draftproof.drafters.build import check_count
from draftproof.drafters.interface import Context, Drafter, TargetFeatures, features_of
from draftproof.drafters.pooling import CachingDrafter, DrafterState

MIN_COPIED: Final = 16
"""Tokens that `copying` must be able to copy to be chosen; `Suffix` copies them after a match of about a quarter."""


class Switch:
    """Drafter that uses `copying` where it would copy at least `enough` tokens, and `other` otherwise.

    The choice must depend on the context alone. So the tokens of `copying` must be chosen and not drawn, and be a
    function of the context. Both drafters are called in every round, so that both can follow the text.
    """

    def __init__(self, copying: Drafter, other: Drafter, *, enough: int = MIN_COPIED) -> None:
        check_count("enough", enough, 1)
        one, two = features_of(copying), features_of(other)
        if one.layers and one.layers != two.layers:
            raise ValueError(f"copying and other ask for different layers: {one.layers} and {two.layers}")
        self.features = TargetFeatures(layers=two.layers, top=max(one.top, two.top))
        self._copying, self._other, self._enough = copying, other, enough

    def kv_bytes(self) -> int:
        """Return the bytes that a token takes in the pools of both drafters."""
        return sum(drafter.kv_bytes() for drafter in self._both if isinstance(drafter, CachingDrafter))

    def open_pool(self, pages: int) -> None:
        for drafter in self._both:
            if isinstance(drafter, CachingDrafter):
                drafter.open_pool(pages)

    def follow(self, context: Context, length: int) -> bool:
        taken = [DrafterState(drafter).follow(context, length) for drafter in self._both]
        return all(took or not features_of(d).layers for took, d in zip(taken, self._both, strict=True))

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        return all(DrafterState(drafter).adopt(context, holder, length) for drafter in self._both)

    def suspend(self, request: int) -> None:
        for drafter in self._both:
            DrafterState(drafter).suspend(request)

    def rest(self, request: int) -> None:
        for drafter in self._both:
            DrafterState(drafter).rest(request)

    def forget(self, requests: Sequence[int]) -> None:
        for drafter in self._both:
            DrafterState(drafter).forget(requests)

    @property
    def _both(self) -> tuple[Drafter, Drafter]:
        return self._copying, self._other

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens for each row; see `Drafter`."""
        # At least `enough` tokens are requested, because the length of the copy tells the length of the match.
        requested = [max(most, self._enough) if most else 0 for most in k]
        copied = self._copying.propose(contexts, requested, _on_cpu(rng, contexts))
        if copied.q is not None:
            raise ValueError(f"{type(self._copying).__name__} draws its tokens: only chosen tokens may be dropped")
        copies = (copied.lengths.numpy() >= self._enough).tolist()
        drafted = self._other.propose(contexts, [0 if copy else n for copy, n in zip(copies, k, strict=True)], rng)
        if not any(copies):
            return drafted
        wanted = torch.tensor([n if copy else 0 for copy, n in zip(copies, k, strict=True)])
        return merged(_to_device(_truncated(copied, wanted), drafted.tokens.device), drafted)


def merged(one: Draft, other: Draft) -> Draft:
    """Merge two drafts row by row; in every row at least one must be empty, and the tokens of `one` must be chosen."""
    K = max(one.tokens.shape[1], other.tokens.shape[1])
    first = one.lengths > 0
    parents = None
    if one.parents is not None or other.parents is not None:
        parents = torch.where(first[:, None], padded_tokens(_parents(one), K), padded_tokens(_parents(other), K))
    tokens = torch.where(first[:, None], padded_tokens(one.tokens, K), padded_tokens(other.tokens, K))
    made = Draft(tokens, one.lengths + other.lengths, parents=parents, shared_rng=other.shared_rng)
    if other.q is None:
        return made
    drawn = torch.ones_like(other.tokens, dtype=torch.bool) if other.drawn is None else other.drawn
    if is_cpu(first.device) and not bool(first.any()):  # on a GPU this test would need a synchronisation
        return replace(made, q=other.q, drawn=other.drawn)
    return replace(made, q=padded_distribution(other.q, K), drawn=_padded_mask(drawn, K) & ~first[:, None])


def _on_cpu(rng: Philox, contexts: Sequence[Context]) -> Philox:
    """Return the same random numbers on the CPU, so that the copied draft can be read without a synchronisation."""
    if is_cpu(rng.seeds.device):
        return rng
    seeds = torch.tensor([context.sampling.seed or 0 for context in contexts])
    return Philox(seeds, torch.tensor([len(context.tokens) for context in contexts]), rng.shared)


def _truncated(draft: Draft, lengths: Int[Tensor, " B"]) -> Draft:
    """Keep the first lengths[b] slots of each row of a draft on the CPU; chosen tokens may be dropped freely."""
    lengths = draft.lengths.minimum(lengths)
    K = int(lengths.numpy().max())
    beyond = torch.arange(K, device=lengths.device) >= lengths[:, None]
    parents = None if draft.parents is None else draft.parents[:, :K]
    return Draft(draft.tokens[:, :K].masked_fill(beyond, PAD), lengths, parents=parents)


def _to_device(draft: Draft, device: torch.device) -> Draft:
    """Copy a draft of chosen tokens to the device."""
    tokens, lengths = (part.to(device, non_blocking=True) for part in (draft.tokens, draft.lengths))
    parents = None if draft.parents is None else draft.parents.to(device, non_blocking=True)
    return Draft(tokens, lengths, parents=parents)


def _parents(draft: Draft) -> Int[Tensor, "B K"]:
    """Return the parent of every slot, also for a chain."""
    B, K = draft.tokens.shape
    return torch.arange(-1, K - 1, device=draft.tokens.device).expand(B, K) if draft.parents is None else draft.parents


def padded_tokens(slots: Int[Tensor, "B k"], K: int) -> Int[Tensor, "B K"]:
    """Pad rows of slots to K."""
    return torch.nn.functional.pad(slots, (0, K - slots.shape[1]), value=PAD)


def _padded_mask(drawn: Bool[Tensor, "B k"], K: int) -> Bool[Tensor, "B K"]:
    return torch.nn.functional.pad(drawn, (0, K - drawn.shape[1]))


def padded_distribution(dist: Distribution, K: int) -> Distribution:
    """Pad to K positions by repeating position 0, so that every slot holds a valid distribution."""
    more = K - dist.lse.shape[1]
    if more == 0:
        return dist
    parts = (dist.scale, dist.cutoff, dist.lse, dist.point)
    scale, cutoff, lse, point = (torch.cat([part, part[:, :1].expand(-1, more)], 1) for part in parts)
    logits = torch.cat([dist.logits, dist.logits[:, :1].expand(-1, more, -1)], 1)
    return Distribution(logits, scale, cutoff, lse, point, dist.vocab, dist.plain)
