"""The judge: the target reads what a decoder said, and tells the distribution from which every token should have been drawn.

One pass over whole texts, no cache, no rounds, transformers' own processors: nothing that the decoder's result could
depend on is used a second time here.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import PAD
from draftproof.models.interface import Model

CUTTING: Final = ("top_k", "top_p", "min_p")
"""Parameters that make tokens impossible."""
TILTING: Final = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""Parameters that make tokens more or less likely."""

NEUTRAL: Final = SamplingParams()


def without(sampling: SamplingParams, *names: str) -> SamplingParams:
    """The same with these parameters off."""
    return replace(sampling, **{name: getattr(NEUTRAL, name) for name in names})


def in_use(sampling: SamplingParams) -> list[str]:
    """The parameters that are on."""
    names = [f.name for f in fields(sampling) if f.name != "seed"]
    return [name for name in names if getattr(sampling, name) != getattr(NEUTRAL, name)]


def tilted(logits: Float[Tensor, "N V"], positions: Positions, sampling: SamplingParams) -> Float[Tensor, "N V"]:
    """Bias, penalties and temperature, in transformers' order; every position with the tokens before it."""
    import transformers as tf

    steps: list[Any] = []
    if sampling.logit_bias:
        steps.append(tf.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        steps.append(tf.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    ids = _filled(positions).to(logits.device)
    for step in steps:
        logits = step(ids, logits)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = output_counts(positions, logits.shape[-1]).to(logits.device)
        logits = logits - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
    if sampling.temperature not in (0, 1):
        logits = tf.TemperatureLogitsWarper(float(sampling.temperature))(ids, logits)
    return logits


def cut(scores: Float[Tensor, "N V"], sampling: SamplingParams) -> Float[Tensor, "N V"]:
    """Top-k, top-p and min-p, in transformers' order: −inf where a token cannot come."""
    import transformers as tf

    steps: list[Any] = []
    if sampling.top_k is not None:
        steps.append(tf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(tf.TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        steps.append(tf.MinPLogitsWarper(float(sampling.min_p)))
    for step in steps:
        scores = step(None, scores)
    return scores


def output_counts(positions: Positions, V: int) -> Float[Tensor, "N V"]:
    """How often each token was said before each position."""
    counts = torch.zeros(len(positions), V, device=positions.before.device)
    return counts.scatter_add_(1, positions.before.clamp_min(0), positions.in_output.float())


def _filled(positions: Positions) -> Int[Tensor, "N L"]:
    """The texts before each position, their padding filled with a token of theirs: who asks only which tokens have
    been seen gets the right answer, and the repetition penalty asks nothing else."""
    before = positions.before
    return torch.where(before == PAD, before[:, :1], before)


Scores = Float[Tensor, "N V"]


def supported(scores: Scores, sampling: SamplingParams, tolerance: float) -> tuple[Scores, Bool[Tensor, " N"]]:
    """The scores with −inf where a token cannot come, and whether each row's cutoffs are clear of rounding."""
    clear = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    for name, others in (("top_k", ("top_p", "min_p")), ("top_p", ("top_k", "min_p")), ("min_p", ("top_k", "top_p"))):
        step = without(sampling, *others)
        if getattr(step, name) in (None, 1, 1.0, 0, 0.0):
            continue
        after = cut(scores, step)
        clear &= _clear(scores, after, step, tolerance)
        scores = after
    return scores, clear


def _clear(before: Scores, after: Scores, step: SamplingParams, tolerance: float) -> Bool[Tensor, " N"]:
    kept = after > -math.inf
    lowest = before.masked_fill(~kept, math.inf).amin(-1)
    highest = before.masked_fill(kept, -math.inf).amax(-1)  # of those cut off
    clear = lowest - highest > _margin(tolerance)
    if step.top_p < 1:
        probs = before.softmax(-1)
        mass = probs.masked_fill(~kept, 0.0).sum(-1)
        last = probs.masked_fill(~kept, 1.0).amin(-1)
        room = _mass_margin(step.top_p, tolerance)
        clear &= (mass - step.top_p > room) & (step.top_p - (mass - last) > room)
    if step.min_p > 0:
        edge = before.amax(-1) + math.log(step.min_p)
        clear &= (lowest - edge > _margin(tolerance)) & (edge - highest > _margin(tolerance))
    return clear


def reachable(
    scores: Scores, token: Int[Tensor, " N"], sampling: SamplingParams, tolerance: float
) -> Bool[Tensor, " N"]:
    """Whether each token can come if every cutoff gives way by the tolerance."""
    margin = 2 * _margin(tolerance)
    own = scores.gather(1, token[:, None])[:, 0]
    possible = own > -math.inf
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        floor = scores.topk(sampling.top_k).values[:, -1] - margin
        possible &= own >= floor
        scores = scores.masked_fill(scores < floor[:, None], -math.inf)
    if sampling.top_p < 1:
        likelier = scores.softmax(-1).masked_fill(scores <= own[:, None] + margin, 0.0).sum(-1)
        possible &= likelier < sampling.top_p + 2 * _mass_margin(sampling.top_p, tolerance)
    if sampling.min_p > 0:
        possible &= own >= scores.amax(-1) + math.log(sampling.min_p) - margin
    return possible


def _mass_margin(top_p: int | float, tolerance: float) -> float:
    """By how much a nucleus' mass may be off: a set of mass m gains at most 2·δ·m·(1 − m) if its tokens are all too
    likely by a factor 1 + δ and the others too unlikely; and sums in float32 round."""
    return 2 * tolerance * top_p * (1 - top_p) + 1e-6


def _margin(tolerance: float) -> float:
    """Probabilities within a factor 1 ± tolerance: their scores within this of one another."""
    return 2 * math.log1p(tolerance)


TOLERANCE: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
)
"""By what factor of itself a probability may be off, where a pass over a whole text and a pass over a few tokens
compute the same logits in this type. A temperature below 1 magnifies it."""

ROOM: Final = 1 << 22
"""Numbers in one table of distributions, of which some twenty are made: 16 MiB each in float32."""
ROWS: Final = 1 << 14
"""Positions at a time, however small the vocabulary."""
SMALL: Final = 4096
"""Vocabularies up to this size are judged in float64."""


@dataclass(frozen=True)
class TargetDistributions:
    """The target's distribution at each of N positions, after the sampling parameters.

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


class ReferenceModel:
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

    def tolerance(self, sampling: SamplingParams) -> float:
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

    def dists(self, positions: Positions, sampling: SamplingParams) -> TargetDistributions:
        """What plain decoding under this sampling would draw each token from. Greedy sampling has no distribution to bet on:
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
        return TargetDistributions(positions, scores, log_p, clear, impossible)

    def probs(self, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> Float[Tensor, "T V"]:
        """The distribution of every token of one text."""
        return self.dists(Positions.of([Text(tuple(prompt), tuple(tokens))]), sampling).p

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
