"""Sampling parameters as transformers' own processors: the judge must not share a line with what it judges.

transformers has no presence and frequency penalty; they are written out here, by their definition.
"""

from dataclasses import fields, replace
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.audit.positions import Positions
from draftproof.core.sampling import Sampling
from draftproof.core.types import PAD

CUTTING: Final = ("top_k", "top_p", "min_p")
"""Parameters that make tokens impossible."""
TILTING: Final = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""Parameters that make tokens more or less likely."""

NEUTRAL: Final = Sampling()


def without(sampling: Sampling, *names: str) -> Sampling:
    """The same with these parameters off."""
    return replace(sampling, **{name: getattr(NEUTRAL, name) for name in names})


def in_use(sampling: Sampling) -> list[str]:
    """The parameters that are on."""
    names = [f.name for f in fields(sampling) if f.name != "seed"]
    return [name for name in names if getattr(sampling, name) != getattr(NEUTRAL, name)]


def tilted(logits: Float[Tensor, "N V"], positions: Positions, sampling: Sampling) -> Float[Tensor, "N V"]:
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


def cut(scores: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
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
