"""Targets with a known text, and drafters that are given it: for tests of rounds in which nothing is random."""

from collections.abc import Sequence

import torch

from draftproof.core.rng import Philox
from draftproof.core.types import PAD, Draft
from draftproof.drafters.interface import Context
from draftproof.models.interface import Cache, Forward
from draftproof.models.toy import Toy

V = 8


def cycle(*tokens: int, vocab_size: int = V) -> Toy:
    """Make a target that repeats these tokens for ever: each is followed by the next, with probability 1 in float32."""
    table = torch.zeros(vocab_size, vocab_size)
    for token, follower in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
        table[token, follower] = 200.0
    return Toy(table)


class ScriptedDrafter:
    """Drafts the continuation of a context in `text`, by position alone. `asked` lists (output length, k) of calls."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.asked = list(text), []

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        self.asked += [(len(c.tokens) - c.prompt_length, most) for c, most in zip(contexts, k, strict=True)]
        rows = [self.text[len(c.tokens) : len(c.tokens) + most] for c, most in zip(contexts, k, strict=True)]
        K = max(map(len, rows))
        tokens = torch.tensor([row + [PAD] * (K - len(row)) for row in rows], dtype=torch.long).view(len(rows), K)
        return Draft(tokens, torch.tensor([len(row) for row in rows]))


class CountingTarget:
    """A target that counts its passes."""

    def __init__(self, model: Toy) -> None:
        self.model, self.passes = model, 0
        self.vocab_size, self.max_length, self.device = model.vocab_size, model.max_length, model.device

    def new_cache(self, rows: int, capacity: int = 0) -> Cache:
        return self.model.new_cache(rows, capacity)

    def __call__(self, tokens, cache, *, parents=None, scored=None, layers=()) -> Forward:
        self.passes += 1
        return self.model(tokens, cache, parents=parents, scored=scored, layers=layers)
