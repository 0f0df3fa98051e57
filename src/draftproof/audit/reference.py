"""The judge: the target reads what a decoder said, and tells the law from which every token should have been drawn.

One pass over whole texts, no cache, no rounds, transformers' own processors: nothing that the decoder's result could
depend on is used a second time here.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.audit.positions import Positions, Text
from draftproof.audit.processors import tilted
from draftproof.audit.support import reachable, supported
from draftproof.core.sampling import Sampling
from draftproof.models import Model

TOLERANCE: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
)
"""By what factor of itself a probability may be off, where a pass over a whole text and a pass over a few tokens
compute the same logits in this type. A temperature below 1 magnifies it."""

ROOM: Final = 1 << 22
"""Numbers in one table of laws, of which some twenty are made: 16 MiB each in float32."""
ROWS: Final = 1 << 14
"""Positions at a time, however small the vocabulary."""
SMALL: Final = 4096
"""Vocabularies up to this size are judged in float64."""


@dataclass(frozen=True)
class Laws:
    """The target's law at each of N positions, after the sampling parameters.

    `clear`: no cutoff lies within rounding of a token. `impossible`: the emitted token cannot come, rounding granted.
    `scores` are the model's own, before any parameter.
    """

    positions: Positions
    scores: Float[Tensor, "N V"]
    log_p: Float[Tensor, "N V"]
    clear: Bool[Tensor, " N"]
    impossible: Bool[Tensor, " N"]

    @cached_property
    def p(self) -> Float[Tensor, "N V"]:
        return self.log_p.exp()

    @cached_property
    def log_p_said(self) -> Float[Tensor, " N"]:
        """The log-probability of the token that was emitted."""
        return self.log_p.gather(1, self.positions.token[:, None])[:, 0].double()


class Teacher:
    """A transformers causal language model, or any `Model`, as a judge."""

    def __init__(self, model: Any, *, tolerance: float | None = None) -> None:
        config = getattr(model, "config", None)
        if config is None and not isinstance(model, Model):
            raise ValueError(f"target must be a transformers model or a Model; got a {type(model).__name__}")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{type(model).__name__} has an encoder: the audit reads decoder-only models")
        self.model, self._config = model, config
        self._tolerance = tolerance
        self._vocab_size: int | None = None if config is not None else int(model.vocab_size)

    @property
    def vocab_size(self) -> int:
        if self._vocab_size is None:
            self._vocab_size = int(self._logits(torch.zeros(1, 1, dtype=torch.long), 1).shape[-1])
        return self._vocab_size

    def tolerance(self, sampling: Sampling) -> float:
        """What rounding may do to a probability under this sampling."""
        known = self._tolerance if self._tolerance is not None else TOLERANCE.get(self._dtype, 1e-1)
        return known / min(1.0, float(sampling.temperature) or 1.0)

    def chunks(self, texts: Sequence[Text]) -> Iterator[list[Text]]:
        """The texts, as many at a time as there is room for."""
        most, chunk, held = max(1, min(ROWS, ROOM // self.vocab_size)), list[Text](), 0
        for text in texts:
            if chunk and held + len(text.tokens) > most:
                yield chunk
                chunk, held = [], 0
            chunk.append(text)
            held += len(text.tokens)
        if chunk:
            yield chunk

    @torch.inference_mode()
    def scores(self, positions: Positions) -> Float[Tensor, "N V"]:
        """The model's own logits at every position, in one pass."""
        texts = positions.texts
        whole = [[*t.prompt, *t.tokens] for t in texts]
        longest = max(map(len, whole)) - 1  # behind the last token nothing is asked
        rows = torch.tensor([(row[:longest] + [row[0]] * longest)[:longest] for row in whole])
        first = min(len(t.prompt) for t in texts) - 1
        logits = self._logits(rows, longest - first)
        row = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(t.tokens) for t in texts]))
        made = logits[row.to(logits.device), (positions.length - 1 - first).to(logits.device)]
        return made.double() if made.shape[-1] <= SMALL else made.float()

    def laws(self, positions: Positions, sampling: Sampling) -> Laws:
        """What plain decoding under this sampling would draw each token from. Greedy sampling has no law to bet on:
        see `greedy.py`."""
        if sampling.temperature == 0:
            raise ValueError("temperature 0 draws nothing: a greedy audit compares tokens")
        scores = self.scores(positions)
        positions = positions.to(scores.device)
        warm, tolerance = tilted(scores, positions, sampling), self.tolerance(sampling)
        kept, clear = supported(warm, sampling, tolerance)
        log_p = kept.log_softmax(-1)
        impossible = log_p.gather(1, positions.token[:, None])[:, 0] == -torch.inf
        if bool(impossible.any()):
            some = impossible.nonzero()[:, 0]
            could = reachable(warm[some], positions.token[some], sampling, tolerance)
            impossible[some] = clear[some] | ~could
        return Laws(positions, scores, log_p, clear, impossible)

    def probs(self, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> Float[Tensor, "T V"]:
        """The law of every token of one text."""
        return self.laws(Positions.of([Text(tuple(prompt), tuple(tokens))]), sampling).p

    @property
    def _dtype(self) -> torch.dtype:
        table = getattr(self.model, "table", None)
        if isinstance(table, Tensor):
            return table.dtype
        weights = getattr(self.model, "parameters", None)
        return next(iter(weights())).dtype if weights is not None else torch.float32

    def _logits(self, tokens: Int[Tensor, "B T"], scored: int) -> Float[Tensor, "B J V"]:
        """Of the last `scored` positions. Rows are padded on the right, where a causal model does not look."""
        if self._config is None:
            tokens = tokens.to(self.model.device)
            logits: Tensor = self.model(tokens, self.model.new_cache(len(tokens), tokens.shape[1])).logits
            return logits[:, tokens.shape[1] - scored :]
        made: Tensor = self._pass(tokens, scored).logits
        return made[:, -scored:]

    def _pass(self, tokens: Int[Tensor, "B T"], scored: int, **wanted: Any) -> Any:
        """What a transformers model shows; where it can it scores the last `scored` positions only."""
        few = {"logits_to_keep": scored} if "logits_to_keep" in signature(self.model.forward).parameters else {}
        return self.model(input_ids=tokens.to(self.model.device), use_cache=False, **few, **wanted)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text, by the model's own generation settings; none where it has none."""
        settings = getattr(self.model, "generation_config", None)
        named = getattr(settings, "eos_token_id", None)
        return () if named is None else (named,) if isinstance(named, int) else tuple(named)

    def describe(self) -> dict[str, str]:
        """Which model this is, for a certificate: its kind, and a hash of its weights."""
        return {"model": type(self.model).__name__, "weights": fingerprint(self.model)}


SAMPLED: Final = 4096
"""Numbers of each weight that go into a fingerprint."""


def fingerprint(model: Any) -> str:
    """A hash over every weight's name, shape and type and evenly spaced numbers of it."""
    table = getattr(model, "table", None)
    weights = {"table": table} if isinstance(table, Tensor) else dict(getattr(model, "state_dict", dict)())
    digest = hashlib.sha256()
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.layout != torch.strided:
            continue
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLED)].double().cpu()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]
