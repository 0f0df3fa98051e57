"""Two drafters, one for each row: where the text repeats itself the one that copies, elsewhere the other."""

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

ENOUGH: Final = 16
"""Tokens that `Suffix` drafts behind a match of about a quarter as many."""


class Switch:
    """Drafts by `copying` where it would copy at least `enough` tokens, by `other` elsewhere.

    Which of the two drafts is decided from the context alone: what `copying` guesses must be chosen, never drawn, and
    depend on nothing else. Both are asked in every round, so that both can follow the text.
    """

    def __init__(self, copying: Drafter, other: Drafter, *, enough: int = ENOUGH) -> None:
        check_count("enough", enough, 1)
        one, two = features_of(copying), features_of(other)
        if one.layers and one.layers != two.layers:
            raise ValueError(f"copying and other ask for different layers: {one.layers} and {two.layers}")
        self.features = TargetFeatures(layers=two.layers, top=max(one.top, two.top))
        self._copying, self._other, self._enough = copying, other, enough

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Up to k[b] tokens; see `Drafter`."""
        # more than is wanted is asked for: how much it would copy shows how long the match is
        wide = [max(most, self._enough) if most else 0 for most in k]
        copied = self._copying.propose(contexts, wide, _on_host(rng, contexts))
        if copied.q is not None:
            raise ValueError(f"{type(self._copying).__name__} draws its tokens: only what is chosen may be left out")
        copies = (copied.lengths.numpy() >= self._enough).tolist()
        drafted = self._other.propose(contexts, [0 if mine else n for mine, n in zip(copies, k, strict=True)], rng)
        if not any(copies):
            return drafted
        wanted = torch.tensor([most if mine else 0 for mine, most in zip(copies, k, strict=True)])
        return merged(_sent(_cut(copied, wanted), drafted.tokens.device), drafted)


def merged(one: Draft, other: Draft) -> Draft:
    """One draft of two, at least one of which is empty in every row. What `one` has was chosen."""
    K = max(one.tokens.shape[1], other.tokens.shape[1])
    first = one.lengths > 0
    parents = None
    if one.parents is not None or other.parents is not None:
        parents = torch.where(first[:, None], _wide(_parents(one), K), _wide(_parents(other), K))
    tokens = torch.where(first[:, None], _wide(one.tokens, K), _wide(other.tokens, K))
    made = Draft(tokens, one.lengths + other.lengths, parents=parents, shared_rng=other.shared_rng)
    if other.q is None:
        return made
    drawn = torch.ones_like(other.tokens, dtype=torch.bool) if other.drawn is None else other.drawn
    if is_cpu(first.device) and not bool(first.any()):  # elsewhere looking would be waiting
        return replace(made, q=other.q, drawn=other.drawn)
    return replace(made, q=_longer(other.q, K), drawn=_mask(drawn, K) & ~first[:, None])


def _on_host(rng: Philox, contexts: Sequence[Context]) -> Philox:
    """The same noise where its numbers can be looked at: a draft that is made of it lies there too."""
    if is_cpu(rng.seeds.device):
        return rng
    seeds = torch.tensor([context.sampling.seed or 0 for context in contexts])
    return Philox(seeds, torch.tensor([len(context.tokens) for context in contexts]), rng.shared)


def _cut(draft: Draft, lengths: Int[Tensor, " B"]) -> Draft:
    """The first so many slots of each row, on the host: of what was chosen any part may be left out."""
    lengths = draft.lengths.minimum(lengths)
    K = int(lengths.numpy().max())
    beyond = torch.arange(K, device=lengths.device) >= lengths[:, None]
    parents = None if draft.parents is None else draft.parents[:, :K]
    return Draft(draft.tokens[:, :K].masked_fill(beyond, PAD), lengths, parents=parents)


def _sent(draft: Draft, device: torch.device) -> Draft:
    """What was chosen, on the device."""
    tokens, lengths = (part.to(device, non_blocking=True) for part in (draft.tokens, draft.lengths))
    parents = None if draft.parents is None else draft.parents.to(device, non_blocking=True)
    return Draft(tokens, lengths, parents=parents)


def _parents(draft: Draft) -> Int[Tensor, "B K"]:
    B, K = draft.tokens.shape
    return torch.arange(-1, K - 1, device=draft.tokens.device).expand(B, K) if draft.parents is None else draft.parents


def _wide(slots: Int[Tensor, "B k"], K: int) -> Int[Tensor, "B K"]:
    return torch.nn.functional.pad(slots, (0, K - slots.shape[1]), value=PAD)


def _mask(drawn: Bool[Tensor, "B k"], K: int) -> Bool[Tensor, "B K"]:
    return torch.nn.functional.pad(drawn, (0, K - drawn.shape[1]))


def _longer(dist: Distribution, K: int) -> Distribution:
    """The same distributions, with any behind them: slots that nothing was drawn for want a distribution that is one."""
    more = K - dist.lse.shape[1]
    if more == 0:
        return dist
    parts = (dist.scale, dist.cutoff, dist.lse, dist.point)
    scale, cutoff, lse, point = (torch.cat([part, part[:, :1].expand(-1, more)], 1) for part in parts)
    logits = torch.cat([dist.logits, dist.logits[:, :1].expand(-1, more, -1)], 1)
    return Distribution(logits, scale, cutoff, lse, point, dist.vocab, dist.plain)
