"""Compute the distribution of plain decoding without draftproof's code: full forward passes of every prefix, and
transformers' own logits processors.

Presence and frequency penalties, which transformers does not have, are written out here.
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
import transformers as tf
from torch import Tensor

from draftproof.core.sampling import SamplingParams


class PresenceFrequencyPenalty(tf.LogitsProcessor):
    """Presence and frequency penalties over the output, by their definition."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.start = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.stack([row.bincount(minlength=scores.shape[-1]) for row in input_ids[:, self.start :]])
        return scores - self.presence * (counts > 0) - self.frequency * counts


Allowed = Callable[[list[int]], Tensor]


class GrammarMask(tf.LogitsProcessor):
    """A grammar's mask of the tokens that may follow the output."""

    def __init__(self, allowed: Allowed, prompt_length: int) -> None:
        self.allowed, self.start = allowed, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masks = torch.stack([self.allowed(row[self.start :].tolist()) for row in input_ids])
        return scores.masked_fill(~masks, -torch.inf)


def processors(sampling: SamplingParams, prompt_length: int, allowed: Allowed | None = None) -> tf.LogitsProcessorList:
    """Return the processors in transformers' order. Temperature 0 is left to the caller."""
    steps: list[tf.LogitsProcessor] = []
    if sampling.logit_bias:
        steps.append(tf.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        steps.append(tf.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.presence_penalty or sampling.frequency_penalty:
        steps.append(PresenceFrequencyPenalty(sampling.presence_penalty, sampling.frequency_penalty, prompt_length))
    if allowed is not None:
        steps.append(GrammarMask(allowed, prompt_length))
    if sampling.temperature not in (0, 1):
        steps.append(tf.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        steps.append(tf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(tf.TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        steps.append(tf.MinPLogitsWarper(float(sampling.min_p)))
    return tf.LogitsProcessorList(steps)


@torch.no_grad()
def next_distributions(
    model: tf.PreTrainedModel,
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    prompt_length: int,
    allowed: Allowed | None = None,
) -> Tensor:
    """Return the distribution of the token after each of these texts, all of one length; float64."""
    ids = torch.tensor([list(text) for text in texts])
    logits = model(ids, use_cache=False).logits[:, -1].float()
    scores = processors(sampling, prompt_length, allowed)(ids, logits)
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).double()
    return scores.double().softmax(-1)


def joint_distribution(
    model: tf.PreTrainedModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    length: int,
    allowed: Allowed | None = None,
) -> Tensor:
    """Return the joint distribution of the next `length` tokens, flat; the last token varies fastest."""
    V = model.config.vocab_size
    dist = torch.ones(1, dtype=torch.float64)
    for n in range(length):
        texts = [[*prompt, *prefix] for prefix in product(range(V), repeat=n)]
        dist = (dist[:, None] * next_distributions(model, texts, sampling, len(prompt), allowed)).flatten()
    return dist


def counts(texts: Tensor, V: int) -> Tensor:
    """Count each text, in the order of `joint_distribution`."""
    length = texts.shape[1]
    code = texts @ torch.tensor([V**i for i in reversed(range(length))])
    return torch.bincount(code, minlength=V**length)
