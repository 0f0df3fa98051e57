"""A model's cache that follows the contexts: what it read and they do not say is forgotten, what they say and it has
not read is read.

The context is the truth. After a rejection the cache holds drafted tokens that were never emitted, and after any round
it lacks the closing token, and the last drafted one where all were kept: keeping the common prefix settles both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.host import Fetch, sent
from draftproof.drafters import Context
from draftproof.models import Cache, Model

WIDE: Final = 8
"""Tokens up to which a pass scores every position. Past that the last one is read in a pass of its own: logits for a
whole prompt could be larger than the model."""


@dataclass(slots=True)
class Row:
    """What the cache holds of a request: `sure` tokens of its context, then drafted ones that may have been kept."""

    sure: int = 0
    drafted: list[int] = field(default_factory=list)

    def shared(self, tokens: Sequence[int]) -> int:
        """How much of it the context says too; never its last token, whose logits are what is wanted."""
        most = max(len(tokens) - 1, 0)
        n = min(self.sure, most)
        for token in self.drafted[: most - n]:
            if token != tokens[n]:
                break
            n += 1
        return n


class Reader:
    """One row of cache for each context, in their order."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ids: list[int] = []
        self._rows: list[Row] = []
        self._cache: Cache | None = None
        self._coming: tuple[Fetch, Sequence[int]] | None = None

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Float[Tensor, "B R"]:
        """The logits behind the last token of every wanted context; the other rows hold anything."""
        self._arrive()
        cache = self._seat(contexts, wanted)
        known = [row.shared(context.tokens) for row, context in zip(self._rows, contexts, strict=True)]
        cache.lengths = torch.tensor(known)  # on the host, where our caches like to know them
        rest = [list(c.tokens[n:]) if want else [] for c, n, want in zip(contexts, known, wanted, strict=True)]
        self._rows = [Row(n + len(tokens)) for n, tokens in zip(known, rest, strict=True)]
        return self._read(cache, rest)

    def step(self, tokens: Int[Tensor, " B"], wanted: Sequence[bool]) -> Float[Tensor, "B R"]:
        """The logits behind one drafted token more; rows that are not wanted do not keep theirs."""
        assert self._cache is not None
        logits = self._model(tokens[:, None], self._cache).logits[:, 0]
        self._cache.keep(torch.tensor(wanted).long())
        return logits

    def stepped(self, drawn: Fetch, kept: Sequence[int]) -> None:
        """The drawn tokens, of which the steps have kept the first few: told at the end, so that no step waits for the
        device, and read when the next round begins, when they have long arrived."""
        self._coming = drawn, kept

    def _arrive(self) -> None:
        if self._coming is None:
            return
        drawn, kept = self._coming
        for row, tokens, n in zip(self._rows, drawn.read().tolist(), kept, strict=True):
            row.drafted = tokens[:n]
        self._coming = None

    def _seat(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Cache:
        """Rows for these contexts and no others. New ones are read apart: the others would be padded beside them."""
        ids = [context.id for context in contexts]
        if self._cache is not None and ids == self._ids:
            return self._cache
        seat = {name: row for row, name in enumerate(self._ids)}
        old = [b for b, name in enumerate(ids) if name in seat]
        new = [b for b, name in enumerate(ids) if name not in seat]
        texts = [list(contexts[b].tokens[:-1]) if wanted[b] else [] for b in new]
        rows = {b: self._rows[seat[ids[b]]] for b in old} | {b: Row(len(t)) for b, t in zip(new, texts, strict=True)}
        cache = self._entered(texts) if texts else None
        if old:
            assert self._cache is not None
            staying = self._cache.take([seat[ids[b]] for b in old])
            cache = staying if cache is None else staying.join(cache)
        assert cache is not None
        order = [list(rows).index(b) for b in range(len(ids))]
        self._cache = cache if order == sorted(order) else cache.take(order)
        self._ids, self._rows = ids, [rows[b] for b in range(len(ids))]
        return self._cache

    def _entered(self, texts: list[list[int]]) -> Cache:
        cache = self._model.new_cache(len(texts), max(map(len, texts)) + WIDE)
        if any(texts):
            self._model(self._padded(texts), cache, scored=1)
            cache.keep(torch.tensor([len(text) for text in texts]))
        return cache

    def _read(self, cache: Cache, rest: list[list[int]]) -> Float[Tensor, "B R"]:
        """Read these tokens; the logits behind the last of each row."""
        if max(map(len, rest)) > WIDE:
            self._model(self._padded([tokens[:-1] for tokens in rest]), cache, scored=1)
            cache.keep(torch.tensor([max(len(tokens) - 1, 0) for tokens in rest]))
            rest = [tokens[-1:] for tokens in rest]
        logits = self._model(self._padded(rest), cache).logits
        counts = torch.tensor([len(tokens) for tokens in rest])
        cache.keep(counts)
        last = (counts - 1).clamp_min(0).to(logits.device, non_blocking=True)
        return logits[torch.arange(len(rest), device=logits.device), last]

    def _padded(self, texts: list[list[int]]) -> Int[Tensor, "B T"]:
        """Side by side, padded on the right. What this model has no name for it reads as token 0: a worse guess."""
        width, R = max(map(len, texts)), self._model.vocab_size
        rows = [[t if t < R else 0 for t in text] + [0] * (width - len(text)) for text in texts]
        return sent(rows, self._model.device)
