"""Draft with a smaller model, or with the target's first layers (`early_exit`).

The tokens are drawn, and the draft carries exactly the distribution they were drawn from.
"""

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
from draftproof.drafters.sample import Draws, penalty_history, with_drafted
from draftproof.models.interface import Cache, Model

MAX_SCORED: Final = 8
"""Tokens up to which a pass scores every position; above that the last token is read in a pass of its own, because the
logits of a whole prompt could be larger than the model."""


class ModelDrafter:
    """Drafter that draws from a model with the target's vocabulary.

    vocab_size   the target's vocabulary size, if one of the two is padded: tokens that the target does not have are
                 never drawn, tokens that the draft model does not have get probability 0
    temperature  the drafter's own temperature for requests that sample; None uses the request's. Any value is exact,
                 because the draft carries the distribution that was used
    confidence   end a draft after the token at which the probability of all its tokens falls below this. That token is
                 still submitted: dropping a drawn token would be a bias
    branches     candidates per node, for rule="tree": the drawn token, from which the draft continues, then the most
                 likely others, which are chosen
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
            SamplingParams(temperature=temperature)  # refuses an invalid temperature
        V, R = vocab_size or model.vocab_size, model.vocab_size
        if branches > min(V, R):
            raise ValueError(f"branches={branches}, but drafter and target have only {min(V, R)} tokens in common")
        self._V = V
        self._vocab = DraftVocab.of(torch.arange(R, device=model.device), V) if R < V else None
        self._temperature, self._confidence, self._branches = temperature, confidence, branches
        self._max_length = model.max_length
        self._model = model
        self._reader = Reader(model)

    def fork(self) -> "ModelDrafter":
        """Return a drafter on the same model with a cache of its own."""
        return ModelDrafter(
            self._model,
            vocab_size=self._V,
            temperature=self._temperature,
            confidence=self._confidence,
            branches=self._branches,
        )

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens for each row, or k[b] slots of a tree; see `Drafter`."""
        slots = [self._room(context, most) for context, most in zip(contexts, k, strict=True)]
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), rng.seeds.device, tree=self._branches > 1)
        samplings = [self._sampling(context.sampling) for context in contexts]
        histories = [penalty_history(context, rng.seeds.device) for context in contexts]
        logits = self._reader.catch_up(contexts, [most > 0 for most in slots])
        spine = Spine(self._branches, to_device(slots, logits.device))
        draws = Draws(samplings, rng, self._vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                logits = self._reader.step(spine.tokens[-1], [start < most for most in slots])
            # Slicing the logits masks the tokens that the target does not have.
            spine.add(*draws(logits[:, : self._V], with_drafted(histories, samplings, spine.tokens), start))
            if self._confidence and spine.end_after_weak(self._confidence):
                break
        steps = [-(-most // self._branches) - 1 for most in slots]
        self._reader.record_drafted(spine.rows(), [max(0, min(n, len(spine.tokens) - 1)) for n in steps])
        return spine.draft(shared_rng=rng.shared)

    def truncate(self, request: int, length: int) -> None:
        """Forget what was read of a request after its first `length` tokens: the others have changed.

        A context of the engine only grows. One that is encoded again in another vocabulary may end differently.
        """
        self._reader.truncate(request, length)

    def _room(self, context: Context, most: int) -> int:
        """Limit the slots to the positions that the model has left; an empty text gets none."""
        if not context.tokens:
            return 0
        return most if self._max_length is None else max(0, min(most, self._max_length - len(context.tokens)))

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        if self._temperature is None or sampling.temperature == 0:
            return sampling
        return replace(sampling, temperature=self._temperature)


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut after a layer."""

    def first_layers(self, count: int) -> Model: ...


def early_exit(target: Model, layers: int, *, confidence: float = 0.0, branches: int = 1) -> ModelDrafter:
    """Make a drafter from the target's first `layers` layers."""
    if not isinstance(target, Layered):
        raise ValueError(
            f"early-exit:{layers} needs a target with layers to leave early (first_layers), and a "
            f"{type(target).__name__} has none: use another drafter"
        )
    return ModelDrafter(
        target.first_layers(layers), vocab_size=target.vocab_size, confidence=confidence, branches=branches
    )


class Reader:
    """The draft model's cache: one row per context, in the contexts' order."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ids: list[int] = []
        self._rows: list[Row] = []
        self._cache: Cache | None = None
        self._pending: tuple[AsyncCopy, Sequence[int]] | None = None

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Float[Tensor, "B R"]:
        """Read the contexts' new tokens and return the logits after each last one; unwanted rows are undefined."""
        self._receive_drafted()
        cache = self._arrange(contexts, wanted)
        known = [row.common_prefix(context.tokens) for row, context in zip(self._rows, contexts, strict=True)]
        cache.lengths = torch.tensor(known)  # caches keep their lengths on the CPU
        rest = [list(c.tokens[n:]) if want else [] for c, n, want in zip(contexts, known, wanted, strict=True)]
        self._rows = [Row(n + len(tokens)) for n, tokens in zip(known, rest, strict=True)]
        return self._read(cache, rest)

    def step(self, tokens: Int[Tensor, " B"], wanted: Sequence[bool]) -> Float[Tensor, "B R"]:
        """Read one more drafted token per row and return the logits after it; unwanted rows do not keep theirs."""
        assert self._cache is not None
        logits = self._model(tokens[:, None], self._cache).logits[:, 0]
        self._cache.keep(torch.tensor(wanted).long())
        return logits

    def truncate(self, request: int, length: int) -> None:
        """Forget a request's tokens after the first `length`; see `ModelDrafter.truncate`."""
        self._receive_drafted()
        if request in self._ids:
            row = self._rows[self._ids.index(request)]
            if length < row.read:
                row.read, row.drafted = length, []

    def record_drafted(self, drawn: AsyncCopy, kept: Sequence[int]) -> None:
        """Record the drawn tokens, of which the cache holds the first kept[b].

        The copy is read when the next round begins, so that no step needs a synchronisation.
        """
        self._pending = drawn, kept

    def _receive_drafted(self) -> None:
        if self._pending is None:
            return
        drawn, kept = self._pending
        for row, tokens, n in zip(self._rows, drawn.read().tolist(), kept, strict=True):
            row.drafted = tokens[:n]
        self._pending = None

    def _arrange(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Cache:
        """Give the cache one row for each context and no others.

        New contexts are prefilled in a pass of their own: in a joint pass the other rows would be mostly padding.
        """
        ids = [context.id for context in contexts]
        if self._cache is not None and ids == self._ids:
            return self._cache
        row_of = {name: row for row, name in enumerate(self._ids)}
        old = [b for b, name in enumerate(ids) if name in row_of]
        new = [b for b, name in enumerate(ids) if name not in row_of]
        texts = [list(contexts[b].tokens[:-1]) if wanted[b] else [] for b in new]
        rows = {b: self._rows[row_of[ids[b]]] for b in old} | {b: Row(len(t)) for b, t in zip(new, texts, strict=True)}
        cache = self._prefilled(texts) if texts else None
        if old:
            assert self._cache is not None
            staying = self._cache.take([row_of[ids[b]] for b in old])
            cache = staying if cache is None else staying.join(cache)
        assert cache is not None
        order = [list(rows).index(b) for b in range(len(ids))]
        self._cache = cache if order == sorted(order) else cache.take(order)
        self._ids, self._rows = ids, [rows[b] for b in range(len(ids))]
        return self._cache

    def _prefilled(self, texts: list[list[int]]) -> Cache:
        cache = self._model.new_cache(len(texts), max(map(len, texts)) + MAX_SCORED)
        if any(texts):
            self._model(self._padded(texts), cache, scored=1)
            cache.keep(torch.tensor([len(text) for text in texts]))
        return cache

    def _read(self, cache: Cache, rest: list[list[int]]) -> Float[Tensor, "B R"]:
        """Read these tokens and return the logits after the last of each row."""
        if max(map(len, rest)) > MAX_SCORED:
            self._model(self._padded([tokens[:-1] for tokens in rest]), cache, scored=1)
            cache.keep(torch.tensor([max(len(tokens) - 1, 0) for tokens in rest]))
            rest = [tokens[-1:] for tokens in rest]
        logits = self._model(self._padded(rest), cache).logits
        counts = torch.tensor([len(tokens) for tokens in rest])
        cache.keep(counts)
        last = (counts - 1).clamp_min(0).to(logits.device, non_blocking=True)
        return logits[torch.arange(len(rest), device=logits.device), last]

    def _padded(self, texts: list[list[int]]) -> Int[Tensor, "B T"]:
        """Pad the texts on the right. Tokens outside the model's vocabulary become 0, which only worsens the guess."""
        width, R = max(map(len, texts)), self._model.vocab_size
        rows = [[t if t < R else 0 for t in text] + [0] * (width - len(text)) for text in texts]
        return to_device(rows, self._model.device)


@dataclass(slots=True)
class Row:
    """Tokens of one request in the cache: the first `read` of its context, then drafted ones that may be rejected."""

    read: int = 0
    drafted: list[int] = field(default_factory=list)

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """Count the cached tokens that agree with the context, without its last token, whose logits are needed."""
        most = max(len(tokens) - 1, 0)
        n = min(self.read, most)
        for token in self.drafted[: most - n]:
            if token != tokens[n]:
                break
            n += 1
        return n
