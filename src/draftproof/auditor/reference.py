"""Compute the distribution that each emitted token should have been drawn from, with the target as the reference.

The target reads whole texts in one pass, without a cache and without rounds, and through transformers' own logits
processors. The audit shares no code with the decoder that could give both the same error.
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
from torch import Tensor, nn

from draftproof.auditor.arguments import tolerance_or_none
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import PAD
from draftproof.models.int4_linear import runs_int4
from draftproof.models.interface import Model

Scores = Float[Tensor, "N V"]

FILTERING: Final = ("top_k", "top_p", "min_p")
"""Parameters that make tokens impossible."""
TILTING: Final = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""Parameters that make tokens more or less likely."""
NEUTRAL: Final = SamplingParams()

TOLERANCE: Final[Mapping[torch.dtype, float]] = MappingProxyType(
    {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
)
"""Relative error of a probability, by dtype: a pass over a whole text and a pass over a few tokens round differently.
A temperature below 1 magnifies it."""

INT4_PAYOFF_ERROR: Final = 2e-2
"""Relative error of a bet's expected payoff on four-bit weights, as a mean over positions and not at each of them.

Their products round to bfloat16, so passes of other widths, and transformers' modules, change a token's probability by
1 % (median), 9 % (99 % of tokens) or 30 % (the largest). A bet pays the mean of these errors over its own distribution,
and their signs change from position to position: over 240 positions of the bundled model, the mean payoff of ten kinds
of bets was off by 0.005 at most (docs/decisions.md)."""

TABLE_ELEMENTS: Final = 1 << 22
"""Elements of one [positions, vocabulary] table: 16 MiB in float32, and about twenty such tables exist at a time."""
MAX_POSITIONS: Final = 1 << 14
"""Positions per table, however small the vocabulary."""
SMALL_VOCABULARY: Final = 4096
"""Vocabulary size up to which float64 is affordable."""
FINGERPRINT_SAMPLES: Final = 4096
"""Elements of each weight that are hashed, about; hashing all would take too long."""


@dataclass(frozen=True)
class TargetDistributions:
    """The target's distribution at each of N positions, after the sampling parameters.

    scores      the model's logits, before any parameter
    clear       whether no filter's cutoff lies within rounding of a token
    impossible  whether the emitted token is filtered out, even if every cutoff is moved by rounding
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
    def log_p_token(self) -> Float[Tensor, " N"]:
        """Return the log-probability of the emitted token."""
        return self.log_p.gather(1, self.positions.token[:, None])[:, 0].double()


class ReferenceModel:
    """A transformers causal language model, or any `Model`, whose distribution is the reference of an audit."""

    def __init__(self, model: Any, *, tolerance: float | None = None) -> None:
        config = getattr(model, "config", None)
        if config is None and not isinstance(model, Model):
            raise ValueError(f"target must be a transformers model or a Model; got a {type(model).__name__}")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{type(model).__name__} has an encoder: the audit reads decoder-only models")
        self.model, self._config = model, config
        self._tolerance = tolerance_or_none(tolerance)
        self._vocab_size: int | None = None if config is not None else int(model.vocab_size)

    @property
    def vocab_size(self) -> int:
        if self._vocab_size is None:
            self._vocab_size = int(self._logits(torch.zeros(1, 1, dtype=torch.long), 1).shape[-1])
        return self._vocab_size

    def tolerance(self, sampling: SamplingParams) -> float:
        """Return the relative error that rounding may cause in a probability under this sampling."""
        tolerance = self._tolerance if self._tolerance is not None else TOLERANCE.get(self._dtype, 1e-1)
        return tolerance / min(1.0, float(sampling.temperature) or 1.0)

    def payoff_error(self, sampling: SamplingParams) -> float:
        """Return the relative error that rounding may cause in the expected payoff of a bet under this sampling."""
        if self._tolerance is not None or not self._runs_int4:
            return self.tolerance(sampling)
        return INT4_PAYOFF_ERROR / min(1.0, float(sampling.temperature) or 1.0)

    def chunks(self, texts: Sequence[Text]) -> Iterator[list[Text]]:
        """Split the texts into chunks whose tables fit in memory."""
        most, chunk, held = max(1, min(MAX_POSITIONS, TABLE_ELEMENTS // self.vocab_size)), list[Text](), 0
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
        """Return the model's logits at every position, in one forward pass."""
        texts = positions.texts
        whole = [[*t.prompt, *t.tokens] for t in texts]
        longest = max(map(len, whole)) - 1  # the logits after the last token are not needed
        rows = torch.tensor([(row[:longest] + [row[0]] * longest)[:longest] for row in whole])
        first = min(len(t.prompt) for t in texts) - 1
        logits = self._logits(rows, longest - first)
        row = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(t.tokens) for t in texts]))
        scores = logits[row.to(logits.device), (positions.length - 1 - first).to(logits.device)]
        return scores.double() if scores.shape[-1] <= SMALL_VOCABULARY else scores.float()

    def dists(self, positions: Positions, sampling: SamplingParams) -> TargetDistributions:
        """Return the distribution that plain decoding under this sampling draws each token from.

        Greedy decoding has no distribution to bet on: see `greedy.py`.
        """
        if sampling.temperature == 0:
            raise ValueError('temperature 0 draws nothing: audit with method="greedy", which compares tokens')
        scores = self.scores(positions)
        positions = positions.to(scores.device)
        tilted_scores, tolerance = tilted(scores, positions, sampling), self.tolerance(sampling)
        kept, clear = supported(tilted_scores, sampling, tolerance)
        log_p = kept.log_softmax(-1)
        impossible = log_p.gather(1, positions.token[:, None])[:, 0] == -torch.inf
        if bool(impossible.any()):
            some = impossible.nonzero()[:, 0]
            could = reachable(tilted_scores[some], positions.token[some], sampling, tolerance)
            impossible[some] = clear[some] | ~could
        return TargetDistributions(positions, scores, log_p, clear, impossible)

    def probs(self, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams) -> Float[Tensor, "T V"]:
        """Return the distribution of every token of one text."""
        return self.dists(Positions.of([Text(tuple(prompt), tuple(tokens))]), sampling).p

    @property
    def _runs_int4(self) -> bool:
        return isinstance(self.model, nn.Module) and runs_int4(self.model)

    @property
    def _dtype(self) -> torch.dtype:
        table = getattr(self.model, "table", None)
        if isinstance(table, Tensor):
            return table.dtype
        if self._runs_int4:
            return torch.bfloat16  # what its products return
        weights = getattr(self.model, "parameters", None)
        return next(iter(weights())).dtype if weights is not None else torch.float32

    def _logits(self, tokens: Int[Tensor, "B T"], scored: int) -> Float[Tensor, "B J V"]:
        """Return logits of the last `scored` positions. Rows are padded on the right, which a causal model ignores."""
        if self._config is None:
            tokens = tokens.to(self.model.device)
            logits: Tensor = self.model(tokens, self.model.new_cache(len(tokens), tokens.shape[1])).logits
            return logits[:, tokens.shape[1] - scored :]
        scores: Tensor = self._pass(tokens, scored).logits
        return scores[:, -scored:]

    def _pass(self, tokens: Int[Tensor, "B T"], scored: int, **outputs: Any) -> Any:
        """Run a transformers model; compute logits of the last `scored` positions only, if it supports that."""
        keep = {"logits_to_keep": scored} if "logits_to_keep" in signature(self.model.forward).parameters else {}
        return self.model(input_ids=tokens.to(self.model.device), use_cache=False, **keep, **outputs)

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the end-of-text tokens of the model's generation config; none if it has none."""
        config = getattr(self.model, "generation_config", None)
        eos = getattr(config, "eos_token_id", None)
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def describe(self) -> dict[str, str]:
        """Identify the model for a certificate: its class and a hash of its weights."""
        return {"model": type(self.model).__name__, "weights": fingerprint(self.model)}


def tilted(logits: Float[Tensor, "N V"], positions: Positions, sampling: SamplingParams) -> Float[Tensor, "N V"]:
    """Apply bias, penalties and temperature in transformers' order, each position with the tokens before it."""
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


def filtered(scores: Float[Tensor, "N V"], sampling: SamplingParams) -> Float[Tensor, "N V"]:
    """Apply top-k, top-p and min-p in transformers' order; tokens filtered out get −inf."""
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
    """Count how often each token was emitted before each position."""
    counts = torch.zeros(len(positions), V, device=positions.before.device)
    return counts.scatter_add_(1, positions.before.clamp_min(0), positions.in_output.float())


def _filled(positions: Positions) -> Int[Tensor, "N L"]:
    """Return the tokens before each position, with padding replaced by the first of them.

    The repetition penalty depends only on which tokens occur, so a repeated token changes nothing.
    """
    before = positions.before
    return torch.where(before == PAD, before[:, :1], before)


def supported(scores: Scores, sampling: SamplingParams, tolerance: float) -> tuple[Scores, Bool[Tensor, " N"]]:
    """Return the scores after the filters, and whether each row's cutoffs are further than rounding from any token."""
    clear = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    for name, others in (("top_k", ("top_p", "min_p")), ("top_p", ("top_k", "min_p")), ("min_p", ("top_k", "top_p"))):
        step = without(sampling, *others)
        if getattr(step, name) in (None, 1, 1.0, 0, 0.0):
            continue
        after = filtered(scores, step)
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
    """Return whether each token passes the filters if every cutoff is loosened by the tolerance."""
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
    """Return the possible error of a nucleus' mass.

    A set of mass m gains at most 2·δ·m·(1 − m) if its tokens are all too likely by a factor 1 + δ and the others too
    unlikely; the constant covers rounding of float32 sums.
    """
    return 2 * tolerance * top_p * (1 - top_p) + 1e-6


def _margin(tolerance: float) -> float:
    """Return the largest difference of two scores whose probabilities are equal up to the tolerance."""
    return 2 * math.log1p(tolerance)


def without(sampling: SamplingParams, *names: str) -> SamplingParams:
    """Return the sampling parameters with these turned off."""
    return replace(sampling, **{name: getattr(NEUTRAL, name) for name in names})


def in_use(sampling: SamplingParams) -> list[str]:
    """List the names of the parameters that have an effect."""
    names = [f.name for f in fields(sampling) if f.name != "seed"]
    return [name for name in names if getattr(sampling, name) != getattr(NEUTRAL, name)]


def fingerprint(model: Any) -> str:
    """Hash every weight's name, shape, dtype and evenly spaced elements."""
    table = getattr(model, "table", None)
    weights = {"table": table} if isinstance(table, Tensor) else dict(getattr(model, "state_dict", dict)())
    digest = hashlib.sha256()
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.layout != torch.strided:
            continue
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // FINGERPRINT_SAMPLES)].double().cpu()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
