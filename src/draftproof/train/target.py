"""The target as a teacher: for its own texts, the states that a head reads and the distribution that it should have."""

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

CHUNK: Final = 8192
"""Positions whose whole distribution exists at the same time."""

SAME: Final = 0.01
"""How far apart logits may be on average, as a share of their standard deviation, and the distributions they make, in total
variation, if only their rounding differs."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch of texts for a head: position n reads the states there and token n + 1, and should say token n + 2.

    at      the positions that count, in the texts laid end to end: those whose token the target drew as an answer
    scores  the target's logits there, of the head's vocabulary
    lse     log Σ exp of all its logits there: its distribution is exp(scores - lse), and what that leaves out is out of reach
    best    the index of the target's likeliest token there; -1 where the vocabulary does not have it
    """

    embedded: Float[Tensor, "B N H"]
    states: tuple[Float[Tensor, "B N H"], ...]
    at: Int[Tensor, " M"]
    scores: Float[Tensor, "M R"]
    lse: Float[Tensor, " M"]
    best: Int[Tensor, " M"]


@dataclass(frozen=True, slots=True)
class Taught:
    """What a target showed of texts, at all of their positions: its states after each tap, and of its distributions what cannot
    be told from the last of these."""

    states: tuple[Float[Tensor, "B T H"], ...]
    lse: Float[Tensor, "B T"]
    best: Int[Tensor, "B T"]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return *self.states, self.lse, self.best

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor]) -> "Taught":
        *states, lse, best = parts
        return cls(tuple(states), lse, best)


class TargetSignals:
    """Runs the target on texts. `ids` are the tokens a head can say.

    `tells`: whether the last tap tells the distribution, being what the output rows score and nothing else done to the scores.
    A target that caps or scales its logits, or adds a bias, has to show them each time.
    """

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], ids: Int[Tensor, " R"]) -> None:
        self._model, self._taps = model, taps
        self._embeddings = embeddings(model)
        self.ids = ids.to(model.device)
        self.vocab_size = head_size(model)
        self._index = torch.full((self.vocab_size,), -1, dtype=torch.int32, device=model.device)
        self._index[self.ids] = torch.arange(len(ids), dtype=torch.int32, device=model.device)
        self.rows = output_rows(model, self.ids).contiguous()
        self.tells = taps[-1] == decoder_config(model).num_hidden_layers and self._told()

    def needs(self, positions: int) -> int:
        """Bytes of a pass over so many positions, nearly all of them logits: the target's, and a chunk in float32."""
        return self.vocab_size * (positions * self.rows.dtype.itemsize + 3 * 4 * min(positions, CHUNK))

    @torch.no_grad()
    def lesson(self, texts: Texts, skip: int) -> Lesson:
        """A pass of the target over these texts. The first `skip` positions of each do not count."""
        if self.tells:
            return self.repeated(texts, self.taught(texts), skip)
        tokens, shown = self._shown(texts)
        at = self._at(texts, skip)
        which = _behind(at, texts)
        dists = [self._dist(shown.logits.flatten(0, 1)[part]) for part in which.split(CHUNK)]
        lse, best = (torch.cat(part) for part in zip(*dists, strict=True))
        scores = shown.logits.flatten(0, 1)[which[:, None], self.ids]
        return self._lesson(tokens, tuple(shown.hidden_states[tap] for tap in self._taps), at, scores, lse, best)

    @torch.no_grad()
    def taught(self, texts: Texts) -> Taught:
        """What need not be asked twice: all that `repeated` makes a lesson of."""
        _, shown = self._shown(texts)
        B, T = texts.tokens.shape
        dists = [self._dist(part) for part in shown.logits.flatten(0, 1).split(CHUNK)]
        lse, best = (torch.cat(part).view(B, T) for part in zip(*dists, strict=True))
        return Taught(tuple(shown.hidden_states[tap] for tap in self._taps), lse, best)

    @torch.no_grad()
    def repeated(self, texts: Texts, taught: Taught, skip: int) -> Lesson:
        """A lesson without a pass of the target."""
        tokens, at = sent(texts.tokens, self._model.device).long(), self._at(texts, skip)
        which = _behind(at, texts)
        scores = self._scores(taught.states[-1].flatten(0, 1).index_select(0, which))
        lse, best = (part.flatten().index_select(0, which) for part in (taught.lse, taught.best))
        return self._lesson(tokens, taught.states, at, scores, lse, best)

    def _shown(self, texts: Texts) -> tuple[Int[Tensor, "B T"], Any]:
        tokens = sent(texts.tokens, self._model.device).long()
        return tokens, self._model(input_ids=tokens, use_cache=False, output_hidden_states=True)

    def _at(self, texts: Texts, skip: int) -> Int[Tensor, " M"]:
        return sent(counted(texts, skip), self._model.device)

    def _scores(self, states: Float[Tensor, "*m H"]) -> Float[Tensor, "*m R"]:
        return states.to(self.rows.dtype) @ self.rows.T

    def _dist(self, logits: Float[Tensor, "m V"]) -> tuple[Float[Tensor, " m"], Int[Tensor, " m"]]:
        """What is to be known of a distribution besides the scores: log Σ exp, and the index of the likeliest token."""
        top, best = logits.max(-1)
        log_p = logits.log_softmax(-1, dtype=torch.float32)  # one pass, where a log-sum-exp of its own takes several
        return top.float() - log_p.gather(-1, best[:, None]).squeeze(1), self._index[best]

    def _lesson(
        self,
        tokens: Int[Tensor, "B T"],
        states: Sequence[Float[Tensor, "B T H"]],
        at: Int[Tensor, " M"],
        *dist: Tensor,
    ) -> Lesson:
        """The first positions of the texts, all but two; `distribution` as a lesson has it."""
        N = tokens.shape[1] - 2
        embedded = self._embeddings[tokens[:, 1:-1]].float()
        return Lesson(embedded, tuple(part[:, :N] for part in states), at, *dist)

    @torch.no_grad()
    def _told(self) -> bool:
        """Asks the target itself, with a few tokens: there are more ways to make logits than names for them."""
        tokens = torch.arange(64).view(4, 16) % self.vocab_size
        _, shown = self._shown(Texts(tokens, torch.ones_like(tokens, dtype=torch.bool)))
        wanted = shown.logits[..., self.ids].float()
        told = self._scores(shown.hidden_states[self._taps[-1]]).float()
        apart = (told.softmax(-1) - wanted.softmax(-1)).abs().sum(-1).mean() / 2  # a cap bends only what is likely
        return bool(((told - wanted).abs().mean() < SAME * wanted.std()) & (apart < SAME))


def counted(texts: Texts, skip: int) -> Int[Tensor, " M"]:
    """The positions of a lesson that count; worked out where the texts lie, so that no device is waited for."""
    counts = texts.spoken[:, 2:].clone()
    counts[:, :skip] = False
    return counts.flatten().nonzero().squeeze(1)


def _behind(at: Int[Tensor, " M"], texts: Texts) -> Int[Tensor, " M"]:
    """Where the target has the distribution of the token to be guessed, in all positions of the texts laid end to end."""
    return at + 2 * (at // (texts.tokens.shape[1] - 2)) + 1


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


GPU_SHARE: Final = 0.8
"""Of a GPU's free memory, for notes and training together."""

CPU_BYTES: Final = 4 << 30


class Notes:
    """Lessons on these texts. `limit`: bytes that may be kept; what does not fit is asked of the teacher each time."""

    def __init__(self, teacher: TargetSignals, texts: Texts, limit: int) -> None:
        self._teacher, self._texts, self._limit = teacher, texts, limit
        self._known = torch.zeros(len(texts), dtype=torch.bool)
        self._kept: Taught | None = None

    @property
    def texts(self) -> int:
        return len(self._texts)

    @property
    def remembered(self) -> int:
        """Texts that the teacher need not read again."""
        return int(self._known.sum())

    @torch.no_grad()
    def lesson(self, rows: Int[Tensor, " n"], skip: int) -> Lesson:
        """On the texts in these rows, in any order; the first `skip` positions of each do not count."""
        if not self._teacher.tells:
            return self._teacher.lesson(self._texts.of(rows), skip)
        known = self._known[rows]
        old, new = rows[known], rows[~known]
        both = [self._recalled(old)] if len(old) else []
        if len(new):
            both.append(self._noted(new))
        taught = both[0] if len(both) == 1 else _joined(*both)
        return self._teacher.repeated(self._texts.of(torch.cat([old, new])), taught, skip)

    def _recalled(self, rows: Int[Tensor, " n"]) -> Taught:
        assert self._kept is not None
        at = sent(rows, self._kept.lse.device)
        return Taught.of_parts([part.index_select(0, at) for part in self._kept.parts])

    def _noted(self, rows: Int[Tensor, " n"]) -> Taught:
        """Taught anew, and kept where there is room: a text's place is its row."""
        made = self._teacher.taught(self._texts.of(rows))
        if self._kept is None:
            self._kept = self._empty(made)
        fits = rows < len(self._kept.lse)
        if fits.any():
            device = made.lse.device
            places, which = sent(rows[fits], device), sent(fits.nonzero().squeeze(1), device)
            for kept, part in zip(self._kept.parts, made.parts, strict=True):
                kept.index_copy_(0, places, part.index_select(0, which))
            self._known[rows[fits]] = True
        return made

    def _empty(self, like: Taught) -> Taught:
        """Room for as many texts as the limit allows."""
        of_one = sum(part[0].numel() * part.dtype.itemsize for part in like.parts)
        room = min(len(self._texts), self._limit // of_one)
        return Taught.of_parts([part.new_empty(room, *part.shape[1:]) for part in like.parts])


def room_on(device: torch.device, training: int) -> int:
    """Bytes for notes there, beside a training that needs so many."""
    if device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()  # what was allocated for the data is free, but no one else could see it
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(GPU_SHARE * free) - training)


def _joined(first: Taught, second: Taught) -> Taught:
    return Taught.of_parts([torch.cat(parts) for parts in zip(first.parts, second.parts, strict=True)])
