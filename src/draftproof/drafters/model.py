"""Guess with a smaller model: its tokens are drawn, and the draft carries the very distribution they were drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import AsyncCopy, to_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft
from draftproof.drafters.build import Guess, Spine, check_count, check_share, chosen
from draftproof.drafters.interface import Context
from draftproof.drafters.sample import Draws, grown, seen
from draftproof.models.interface import Cache, Model

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
        self._coming: tuple[AsyncCopy, Sequence[int]] | None = None

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

    def stepped(self, drawn: AsyncCopy, kept: Sequence[int]) -> None:
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
        return to_device(rows, self._model.device)


class ModelDrafter:
    """Drafts by a model of the target's vocabulary.

    vocab_size   the target's, where one of the two is padded: what the target does not have is never drawn, what the
                 drafter does not have has probability 0
    temperature  the drafter's own, for requests that sample; None is the request's. Free: the draft says which it was
    confidence   end a draft behind a token that seemed less likely than this. The token itself is submitted: to drop
                 what was drawn would be a bias
    branches     candidates at a node, for rule="tree": the drawn token, from which the draft goes on, then the
                 likeliest others, chosen
    """

    def __init__(
        self,
        model: Model,
        *,
        vocab_size: int | None = None,
        temperature: float | None = None,
        confidence: float = 0.0,
        branches: int = 1,
    ) -> None:
        check_count("branches", branches, 1)
        check_share("confidence", confidence)
        if temperature is not None:
            SamplingParams(temperature=temperature)  # refuses what is no temperature
        V, R = vocab_size or model.vocab_size, model.vocab_size
        if branches > min(V, R):
            raise ValueError(f"branches={branches}, but drafter and target have only {min(V, R)} tokens in common")
        self._V = V
        self._vocab = DraftVocab.of(torch.arange(R, device=model.device), V) if R < V else None
        self._temperature, self._confidence, self._branches = temperature, confidence, branches
        self._limit = model.max_length
        self._reader = Reader(model)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Up to k[b] tokens, of a tree k[b] slots; see `Drafter`."""
        slots = [self._room(context, most) for context, most in zip(contexts, k, strict=True)]
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), rng.seeds.device, tree=self._branches > 1)
        samplings = [self._sampling(context.sampling) for context in contexts]
        histories = [seen(context, rng.seeds.device) for context in contexts]
        logits = self._reader.catch_up(contexts, [most > 0 for most in slots])
        spine = Spine(self._branches, to_device(slots, logits.device))
        draws = Draws(samplings, rng, self._vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                logits = self._reader.step(spine.tokens[-1], [start < most for most in slots])
            # to cut tokens off is to mask them: the distribution knows no others
            spine.add(*draws(logits[:, : self._V], grown(histories, samplings, spine.tokens), start))
            if self._confidence and spine.end_behind_weak(self._confidence):
                break
        steps = [-(-most // self._branches) - 1 for most in slots]
        self._reader.stepped(spine.rows(), [max(0, min(n, len(spine.tokens) - 1)) for n in steps])
        return spine.draft(shared_rng=rng.shared)

    def _room(self, context: Context, most: int) -> int:
        """As many slots as the model has positions for; none behind an empty text."""
        if not context.tokens:
            return 0
        return most if self._limit is None else max(0, min(most, self._limit - len(context.tokens)))

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        if self._temperature is None or sampling.temperature == 0:
            return sampling
        return replace(sampling, temperature=self._temperature)


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut after a layer."""

    def first_layers(self, count: int) -> Model: ...


def early_exit(target: Model, layers: int, *, confidence: float = 0.0, branches: int = 1) -> ModelDrafter:
    """A drafter of the target's first `layers` layers."""
    if not isinstance(target, Layered):
        raise ValueError(
            f"early-exit:{layers} needs a target with layers to leave early (first_layers), and a "
            f"{type(target).__name__} has none: use another drafter"
        )
    return ModelDrafter(
        target.first_layers(layers), vocab_size=target.vocab_size, confidence=confidence, branches=branches
    )
