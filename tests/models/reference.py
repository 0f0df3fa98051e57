"""Run rounds over a model and its cache, and compare their logits with a plain forward of each row's whole text."""

from collections.abc import Callable, Sequence

import torch

from draftproof.models.interface import Cache, Forward, Model

V = 61
TOLERANCE = 1e-4


class Rows:
    """Texts, and a cache that holds all but the last token of each."""

    def __init__(self, model: Model, cache: Cache, texts: Sequence[list[int]]) -> None:
        self.model, self.cache = model, cache
        self.texts = [list(text) for text in texts]
        self.generator = torch.Generator().manual_seed(1)
        width = max(len(text) for text in texts)
        padded = torch.tensor([text + self.draw(width - len(text)) for text in self.texts])
        model(padded, cache, scored=1)
        cache.keep(torch.tensor([len(text) - 1 for text in self.texts]))

    def draw(self, count: int) -> list[int]:
        return torch.randint(3, V, (count,), generator=self.generator).tolist()

    def score(self, width: int, parents: list[int] | None = None) -> tuple[list[list[int]], Forward]:
        """Score the last token of each row and `width` random ones; return the random ones and the result."""
        drafts = [self.draw(width) for _ in self.texts]
        tokens = torch.tensor([[text[-1], *draft] for text, draft in zip(self.texts, drafts, strict=True)])
        tree = None if parents is None else torch.tensor([parents] * len(drafts))
        return drafts, self.model(tokens, self.cache, parents=tree)

    def extend(self, tokens: Sequence[list[int]], path: torch.Tensor | None = None) -> None:
        """Keep the last token and the accepted ones of each row, and append a random token, not cached yet."""
        self.cache.keep(torch.tensor([len(kept) + 1 for kept in tokens]), path)
        self.texts = [[*text, *kept, *self.draw(1)] for text, kept in zip(self.texts, tokens, strict=True)]

    def chain_round(
        self, width: int, accepted: Sequence[int], plain: Callable[[int, list[int]], torch.Tensor]
    ) -> float:
        """Run one round; return the largest error of its logits. `plain(row, text)` gives the right ones, [T, V]."""
        drafts, forward = self.score(width)
        off = [
            float((plain(row, text + draft)[-width - 1 :] - forward.logits[row]).abs().max())
            for row, (text, draft) in enumerate(zip(self.texts, drafts, strict=True))
        ]
        self.extend([draft[:count] for draft, count in zip(drafts, accepted, strict=True)])
        return max(off)


def branch(parents: list[int], slot: int) -> list[int]:
    """Return the slots from the root down to this one."""
    return [] if slot < 0 else [*branch(parents, parents[slot]), slot]
