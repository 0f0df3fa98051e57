"""Run the target on its own texts for the training signals: the hidden states a head reads, and its distributions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.head.taps import embeddings, output_rows
from draftproof.train.generate import Texts

FULL_VOCAB_CHUNK: Final = 8192
"""Positions whose distribution over the whole vocabulary exists in float32 at the same time; bounds the memory."""

ROUNDING_TOLERANCE: Final = 0.01
"""Largest difference between logits that are equal up to rounding: the mean absolute difference as a share of their
standard deviation, and the total variation of their distributions."""

CACHE_MEMORY_SHARE: Final = 0.8
"""Share of a GPU's free memory for cached target states and the training step together."""

CPU_CACHE_BYTES: Final = 4 << 30
"""Bytes of cached target states on a CPU."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of texts as a head is trained on it: position n reads its states and token n + 1, and drafts token n + 2.

    at      the trained positions, as indices into the flattened batch: those whose draft token is part of an answer
    scores  the target's logits at these positions, for the head's vocabulary
    lse     log Σ exp of all the target's logits there. Its distribution is exp(scores - lse); the mass outside the
            head's vocabulary is missing from it
    best    the index of the target's likeliest token there; -1 if the head's vocabulary lacks it
    """

    embedded: Float[Tensor, "B N H"]
    states: tuple[Float[Tensor, "B N H"], ...]
    at: Int[Tensor, " M"]
    scores: Float[Tensor, "M R"]
    lse: Float[Tensor, " M"]
    best: Int[Tensor, " M"]


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The target's hidden states after each tap, at all positions of some texts.

    `lse` and `best` are the parts of the distributions that cannot be computed from the states and the head's
    vocabulary alone.
    """

    states: tuple[Float[Tensor, "B T H"], ...]
    lse: Float[Tensor, "B T"]
    best: Int[Tensor, "B T"]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return *self.states, self.lse, self.best

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor]) -> "TargetStates":
        *states, lse, best = parts
        return cls(tuple(states), lse, best)


class TargetSignals:
    """The target as the source of training batches. `ids` is the head's vocabulary.

    `states_give_logits` tells whether the last tap times the output rows gives the logits, so that cached states
    suffice. A target that caps or scales its logits, or adds a bias, has to be run each time.
    """

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], ids: Int[Tensor, " R"]) -> None:
        self._model, self._taps = model, taps
        self._embeddings = embeddings(model)
        self.ids = ids.to(model.device)
        self.vocab_size = head_size(model)
        self._index = torch.full((self.vocab_size,), -1, dtype=torch.int32, device=model.device)
        self._index[self.ids] = torch.arange(len(ids), dtype=torch.int32, device=model.device)
        self.rows = output_rows(model, self.ids).contiguous()
        last_tap_is_final = taps[-1] == decoder_config(model).num_hidden_layers
        self.states_give_logits = last_tap_is_final and self._states_match_logits()

    def bytes_needed(self, positions: int) -> int:
        """Return the bytes of a pass over this many positions: nearly all are logits, and a float32 chunk of them."""
        return self.vocab_size * (positions * self.rows.dtype.itemsize + 3 * 4 * min(positions, FULL_VOCAB_CHUNK))

    @torch.no_grad()
    def batch(self, texts: Texts, skip: int) -> TrainingBatch:
        """Run the target on these texts and return a training batch without the first `skip` positions of each."""
        if self.states_give_logits:
            return self.batch_from_states(texts, self.states(texts), skip)
        tokens, output = self._run(texts)
        at = self._trained(texts, skip)
        predicting = _predicting_positions(at, texts)
        dists = [self._lse_and_best(output.logits.flatten(0, 1)[part]) for part in predicting.split(FULL_VOCAB_CHUNK)]
        lse, best = (torch.cat(part) for part in zip(*dists, strict=True))
        scores = output.logits.flatten(0, 1)[predicting[:, None], self.ids]
        return self._batch(tokens, tuple(output.hidden_states[tap] for tap in self._taps), at, scores, lse, best)

    @torch.no_grad()
    def states(self, texts: Texts) -> TargetStates:
        """Run the target on these texts and return what `batch_from_states` needs."""
        _, output = self._run(texts)
        B, T = texts.tokens.shape
        dists = [self._lse_and_best(part) for part in output.logits.flatten(0, 1).split(FULL_VOCAB_CHUNK)]
        lse, best = (torch.cat(part).view(B, T) for part in zip(*dists, strict=True))
        return TargetStates(tuple(output.hidden_states[tap] for tap in self._taps), lse, best)

    @torch.no_grad()
    def batch_from_states(self, texts: Texts, target: TargetStates, skip: int) -> TrainingBatch:
        """Return the training batch of these texts from their states, without running the target."""
        tokens, at = to_device(texts.tokens, self._model.device).long(), self._trained(texts, skip)
        predicting = _predicting_positions(at, texts)
        scores = self._scores(target.states[-1].flatten(0, 1).index_select(0, predicting))
        lse, best = (part.flatten().index_select(0, predicting) for part in (target.lse, target.best))
        return self._batch(tokens, target.states, at, scores, lse, best)

    def _run(self, texts: Texts) -> tuple[Int[Tensor, "B T"], Any]:
        tokens = to_device(texts.tokens, self._model.device).long()
        return tokens, self._model(input_ids=tokens, use_cache=False, output_hidden_states=True)

    def _trained(self, texts: Texts, skip: int) -> Int[Tensor, " M"]:
        return to_device(trained_positions(texts, skip), self._model.device)

    def _scores(self, states: Float[Tensor, "*m H"]) -> Float[Tensor, "*m R"]:
        return states.to(self.rows.dtype) @ self.rows.T

    def _lse_and_best(self, logits: Float[Tensor, "m V"]) -> tuple[Float[Tensor, " m"], Int[Tensor, " m"]]:
        """Return log Σ exp of each row and the vocabulary index of its likeliest token."""
        top, best = logits.max(-1)
        log_p = logits.log_softmax(-1, dtype=torch.float32)  # one pass over the logits; logsumexp takes several
        return top.float() - log_p.gather(-1, best[:, None]).squeeze(1), self._index[best]

    def _batch(
        self,
        tokens: Int[Tensor, "B T"],
        states: Sequence[Float[Tensor, "B T H"]],
        at: Int[Tensor, " M"],
        *distribution: Tensor,
    ) -> TrainingBatch:
        """Build a batch of all positions but the last two. `distribution` is (scores, lse, best)."""
        N = tokens.shape[1] - 2
        embedded = self._embeddings[tokens[:, 1:-1]].float()
        return TrainingBatch(embedded, tuple(part[:, :N] for part in states), at, *distribution)

    @torch.no_grad()
    def _states_match_logits(self) -> bool:
        """Compare the scores of the last tap with the target's logits on a few tokens.

        Models transform their logits under many names, so the configuration cannot tell.
        """
        tokens = torch.arange(64).view(4, 16) % self.vocab_size
        _, output = self._run(Texts(tokens, torch.ones_like(tokens, dtype=torch.bool)))
        wanted = output.logits[..., self.ids].float()
        found = self._scores(output.hidden_states[self._taps[-1]]).float()
        # total variation as well: a cap changes only the likeliest logits, which a mean over all hardly shows
        apart = (found.softmax(-1) - wanted.softmax(-1)).abs().sum(-1).mean() / 2
        close = (found - wanted).abs().mean() < ROUNDING_TOLERANCE * wanted.std()
        return bool(close & (apart < ROUNDING_TOLERANCE))


def trained_positions(texts: Texts, skip: int) -> Int[Tensor, " M"]:
    """Return the positions of a batch that are trained. Computed on the CPU, where the texts are: no device sync."""
    trained = texts.is_answer[:, 2:].clone()
    trained[:, :skip] = False
    return trained.flatten().nonzero().squeeze(1)


def _predicting_positions(at: Int[Tensor, " M"], texts: Texts) -> Int[Tensor, " M"]:
    """Return, for positions of a batch, the positions of the texts where the target predicts the draft token."""
    return at + 2 * (at // (texts.tokens.shape[1] - 2)) + 1


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without a sync."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class SignalCache:
    """Training batches of these texts, from target states cached up to `limit` bytes.

    Texts that do not fit are run through the target each time.
    """

    def __init__(self, signals: TargetSignals, texts: Texts, limit: int) -> None:
        self._signals, self._texts, self._limit = signals, texts, limit
        self._is_cached = torch.zeros(len(texts), dtype=torch.bool)
        self._cached: TargetStates | None = None

    @property
    def texts(self) -> int:
        return len(self._texts)

    @property
    def cached_texts(self) -> int:
        return int(self._is_cached.sum())

    @torch.no_grad()
    def batch(self, rows: Int[Tensor, " n"], skip: int) -> TrainingBatch:
        """Return the training batch of these rows without the first `skip` positions of each; cached texts first."""
        if not self._signals.states_give_logits:
            return self._signals.batch(self._texts.select(rows), skip)
        is_cached = self._is_cached[rows]
        old, new = rows[is_cached], rows[~is_cached]
        parts = [self._load(old)] if len(old) else []
        if len(new):
            parts.append(self._compute(new))
        states = parts[0] if len(parts) == 1 else _joined(*parts)
        return self._signals.batch_from_states(self._texts.select(torch.cat([old, new])), states, skip)

    def _load(self, rows: Int[Tensor, " n"]) -> TargetStates:
        assert self._cached is not None
        at = to_device(rows, self._cached.lse.device)
        return TargetStates.of_parts([part.index_select(0, at) for part in self._cached.parts])

    def _compute(self, rows: Int[Tensor, " n"]) -> TargetStates:
        """Run the target on these rows, and cache the rows that have a place: row r is stored at index r."""
        states = self._signals.states(self._texts.select(rows))
        if self._cached is None:
            self._cached = self._allocate(states)
        fits = rows < len(self._cached.lse)
        if fits.any():
            device = states.lse.device
            places, which = to_device(rows[fits], device), to_device(fits.nonzero().squeeze(1), device)
            for cached, part in zip(self._cached.parts, states.parts, strict=True):
                cached.index_copy_(0, places, part.index_select(0, which))
            self._is_cached[rows[fits]] = True
        return states

    def _allocate(self, like: TargetStates) -> TargetStates:
        """Allocate the states of as many texts as the limit allows."""
        text_bytes = sum(part[0].numel() * part.dtype.itemsize for part in like.parts)
        count = min(len(self._texts), self._limit // text_bytes)
        return TargetStates.of_parts([part.new_empty(count, *part.shape[1:]) for part in like.parts])


def cache_limit(device: torch.device, training_bytes: int) -> int:
    """Return the bytes for a `SignalCache` on the device, beside a training step that needs `training_bytes`."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    torch.cuda.empty_cache()  # memory that PyTorch holds from generating the texts does not count as free
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(CACHE_MEMORY_SHARE * free) - training_bytes)


def _joined(first: TargetStates, second: TargetStates) -> TargetStates:
    return TargetStates.of_parts([torch.cat(parts) for parts in zip(first.parts, second.parts, strict=True)])
