"""Greedy text equals transformers' own greedy text, in every family and with every drafter.

Only near ties may differ: top-2 margins below 1e-4. They are counted, and the comparison continues after them
(near_ties.py).
"""

import copy

import pytest
import torch
import transformers as tf

import draftproof as dp
from engine.near_ties import count_near_ties
from models.families import CONFIGS, family
from models.test_encoder_decoder import SOURCES, pair

PROMPTS = [[5, 9, 4, 8, 5, 9, 4], [11, 12], [7, 7, 20, 31, 12, 6, 7, 7, 20]]
LENGTH = 16


def noisy(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """Make a drafter from the model with noise in its weights: often right, but not always."""
    drafter = copy.deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weight in drafter.parameters():
            weight += torch.randn_like(weight) * weight.std() * 0.05 if weight.numel() > 1 else 0
    return drafter


def plain_text(model, prompt, length):
    """Return transformers' own greedy text."""
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return made[0, len(prompt) :].tolist()


@torch.no_grad()
def margin(model, text):
    best = model(torch.tensor([text]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def differences(model, outputs, prompts=PROMPTS):
    return sum(
        count_near_ties(
            output.tokens,
            lambda prefix, prompt=prompt: plain_text(model, [*prompt, *prefix], LENGTH - len(prefix)),
            lambda prefix, prompt=prompt: margin(model, [*prompt, *prefix]),
        )
        for output, prompt in zip(outputs, prompts, strict=True)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_transformers_greedy_text(name):
    model = family(name)
    drafts = 0
    for drafter, rule in (("ngram", "block"), ("suffix", "tree"), (noisy(model), "token"), ("early-exit:1", "block")):
        engine = dp.load(model, drafter, rule=rule, num_draft_tokens=4)
        outputs = engine.generate(PROMPTS, temperature=0, max_tokens=LENGTH)
        assert differences(model, outputs) <= 1, "rounding explains one difference here, not several"
        drafts += sum(output.stats.accepted for output in outputs)
    assert drafts > 0


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("drafter", ["ngram", "prompt-lookup", None])
def test_an_encoder_decoder_gives_transformers_greedy_text(name, drafter):
    model, _ = pair(name)
    model.generation_config.forced_eos_token_id = None  # BART's own logits processor, which the engine does not apply
    engine = dp.load(model, drafter, num_draft_tokens=3, max_batch=2)
    outputs = engine.generate(SOURCES, temperature=0, max_tokens=LENGTH)
    for source, output in zip(SOURCES, outputs, strict=True):
        made = model.generate(torch.tensor([source]), max_new_tokens=LENGTH, do_sample=False)
        assert output.tokens == made[0, 1:].tolist()


def test_a_difference_that_is_not_rounding_is_caught():
    model = family("llama")
    [output] = dp.load(model, "ngram").generate(PROMPTS[:1], temperature=0, max_tokens=LENGTH)
    output.tokens[5] = (output.tokens[5] + 1) % 61
    with pytest.raises(AssertionError, match="token 5 differs"):
        differences(model, [output], PROMPTS[:1])


def test_a_text_that_ends_too_early_is_caught():
    with pytest.raises(AssertionError, match="token 2 differs"):
        count_near_ties([3, 4], lambda prefix: [3, 4, 5][len(prefix) :], lambda prefix: 1.0)


def test_near_ties_are_counted_and_the_rest_is_compared():
    def plain(prefix):
        return [3, 4, 5, 6][len(prefix) :]

    assert count_near_ties([3, 9, 5, 6], plain, lambda prefix: 0.0) == 1
    assert count_near_ties([3, 9, 5, 7], plain, lambda prefix: 0.0) == 2
