"""Greedy text is transformers' own greedy text, in every family, whoever drafts.

The only excuse is a top-2 margin below 1e-4, counted; behind it the comparison starts again from what was said.
"""

import copy

import pytest
import torch
import transformers as tf

import draftproof as dp
from engine.near_ties import excused
from models.families import CONFIGS, family
from models.test_encoder_decoder import SOURCES, pair

PROMPTS = [[5, 9, 4, 8, 5, 9, 4], [11, 12], [7, 7, 20, 31, 12, 6, 7, 7, 20]]
LENGTH = 16


def noisy(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """A drafter beside the model: right often, and not always."""
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weight in twin.parameters():
            weight += torch.randn_like(weight) * weight.std() * 0.05 if weight.numel() > 1 else 0
    return twin


def plain_text(model, prompt, length):
    """Nothing but transformers."""
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return made[0, len(prompt) :].tolist()


@torch.no_grad()
def margin(model, text):
    best = model(torch.tensor([text]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def differences(model, outputs, prompts=PROMPTS):
    return sum(
        excused(
            output.tokens,
            lambda said, prompt=prompt: plain_text(model, [*prompt, *said], LENGTH - len(said)),
            lambda said, prompt=prompt: margin(model, [*prompt, *said]),
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
def test_an_encoder_decoder_says_transformers_greedy_text(name, drafter):
    model, _ = pair(name)
    model.generation_config.forced_eos_token_id = None  # BART's own: a processor, which an engine does not take over
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
        excused([3, 4], lambda said: [3, 4, 5][len(said) :], lambda said: 1.0)


def test_a_level_difference_is_excused_once_and_the_rest_is_compared():
    def plain(said):
        return [3, 4, 5, 6][len(said) :]

    assert excused([3, 9, 5, 6], plain, lambda said: 0.0) == 1
    assert excused([3, 9, 5, 7], plain, lambda said: 0.0) == 2
