"""The target as a teacher: for its own texts, the states that a head reads and the law that it should have."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.models.door import head_size
from draftproof.models.tapped import embeddings, output_rows
from draftproof.train.lockstep import Texts

CHUNK: Final = 8192
"""Positions whose whole law exists at the same time."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch of texts for a head: position n reads the states there and token n + 1, and should say token n + 2.

    at    the positions that count, in the texts laid end to end: those whose token the target drew as an answer
    p     the target's law there, on the head's vocabulary
    best  the index of the target's likeliest token there; -1 where the vocabulary does not have it
    """

    embedded: Float[Tensor, "B N H"]
    states: tuple[Float[Tensor, "B N H"], ...]
    at: Int[Tensor, " M"]
    p: Float[Tensor, "M R"]
    best: Int[Tensor, " M"]


class Teacher:
    """Runs the target on texts. `ids` are the tokens a head can say."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], ids: Int[Tensor, " R"]) -> None:
        self._model, self._taps = model, taps
        self._embeddings = embeddings(model)
        self.ids = ids.to(model.device)
        self.vocab_size = head_size(model)
        self._index = torch.full((self.vocab_size,), -1, device=model.device)
        self._index[self.ids] = torch.arange(len(ids), device=model.device)
        self.rows = output_rows(model, self.ids).contiguous()

    @torch.no_grad()
    def lessons(self, texts: Texts, batch: int, skip: int) -> list[Lesson]:
        """One for each `batch` texts, all out of one pass: a pass over few texts is bound by its launches on a GPU.
        The first `skip` positions of a text do not count."""
        tokens = _sent(texts.tokens, self._model.device).long()
        shown = self._model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        made = []
        for first in range(0, len(texts), batch):
            some = slice(first, first + batch)
            at = _sent(counted(Texts(texts.tokens[some], texts.spoken[some]), skip), self._model.device)
            made.append(self._lesson(tokens[some], shown, some, at))
        return made

    def _lesson(self, tokens: Int[Tensor, "B T"], shown: Any, some: slice, at: Int[Tensor, " M"]) -> Lesson:
        N = tokens.shape[1] - 2
        p, best = self._laws(shown.logits[some].flatten(0, 1), at + 2 * (at // N) + 1)
        states = tuple(shown.hidden_states[tap][some, :N] for tap in self._taps)
        return Lesson(self._embeddings[tokens[:, 1:-1]].float(), states, at, p, best)

    def _laws(
        self, logits: Float[Tensor, "P V"], at: Int[Tensor, " M"]
    ) -> tuple[Float[Tensor, "M R"], Int[Tensor, " M"]]:
        laws, best = [logits.new_zeros(0, len(self.ids))], [at[:0]]
        for part in at.split(CHUNK):
            scores = logits[part].float()
            top, argmax = scores.max(-1)
            scores -= top[:, None]
            reduced = scores[:, self.ids].exp_()
            laws.append(reduced.div_(scores.exp_().sum(-1, keepdim=True)).to(logits.dtype))
            best.append(self._index[argmax])
        return torch.cat(laws), torch.cat(best)


def counted(texts: Texts, skip: int) -> Int[Tensor, " M"]:
    """The positions of a lesson that count; worked out where the texts lie, so that no device is waited for."""
    counts = texts.spoken[:, 2:].clone()
    counts[:, :skip] = False
    return counts.flatten().nonzero().squeeze(1)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
