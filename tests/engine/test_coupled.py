"""Under `coupled` a text is a function of seed and target alone: it equals plain seeded decoding, token for token.

This holds for every drafter, draft length and batch. Only near ties may differ: races whose first two are within 1e-4
of each other. They are counted, and the comparison continues after them (near_ties.py).
"""

from dataclasses import replace

import pytest
import torch

import draftproof as dp
from draftproof.core.rng import Philox, Purpose
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.model import ModelDrafter
from draftproof.models.hf import HFModel
from engine.near_ties import count_near_ties
from engine.plain_distribution import next_distributions
from engine.tiny import PROMPT, V, llama, neighbour
from models.test_encoder_decoder import SOURCES, pair

PROMPTS = [list(PROMPT), [3, 4, 3, 4, 3], [6], [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]]
KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.3),
    SamplingParams(temperature=1.4, top_p=0.9, min_p=0.03),
    SamplingParams(temperature=0),
]  # without penalties on the output alone: a comparison that continues counts earlier output as prompt
SAMPLINGS = [replace(kind, seed=900 + i) for i, kind in enumerate(KINDS)]
LENGTH = 24
DRAFTERS = {
    "ngram": lambda: "ngram",
    "suffix": lambda: "suffix",
    "prompt-lookup": lambda: "prompt-lookup",
    "model": neighbour,
    "model, own temperature": lambda: ModelDrafter(HFModel(neighbour()), temperature=0.4),
    "model, confidence": lambda: ModelDrafter(HFModel(neighbour()), confidence=0.4),
    "model, smaller vocabulary": lambda: neighbour(V - 2),
    "model, larger vocabulary": lambda: neighbour(V + 3),
    "early-exit": lambda: "early-exit:1",
}


def plain_text(prompt, sampling, length):
    if length == 0:
        return []
    return dp.load(llama(), None).generate([prompt], sampling, max_tokens=length)[0].tokens


def margin(text, sampling):
    """Return the relative margin between the first two of the race for the next token."""
    dist = next_distributions(llama(), [text], sampling, 0)
    rng = Philox(torch.tensor([sampling.seed]), torch.tensor([len(text)]))
    best = (dist / rng.exponential(Purpose.POSITION, torch.arange(V), 1))[0].topk(2).values
    return float(1 - best[1] / best[0])


def differences(outputs):
    return sum(
        count_near_ties(
            output.tokens,
            lambda prefix, p=prompt, s=sampling: plain_text([*p, *prefix], s, LENGTH - len(prefix)),
            lambda prefix, p=prompt, s=sampling: margin([*p, *prefix], s),
        )
        for output, prompt, sampling in zip(outputs, PROMPTS, SAMPLINGS, strict=True)
    )


@pytest.mark.parametrize("length", [1, 4, "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_is_plain_seeded_decoding_token_for_token(drafter, length):
    engine = dp.load(llama(), DRAFTERS[drafter](), rule="coupled", num_draft_tokens=length, max_batch=3)
    outputs = engine.generate(PROMPTS, SAMPLINGS, max_tokens=LENGTH)
    assert sum(output.stats.drafted for output in outputs) > 0
    assert differences(outputs) <= 1, "rounding explains one difference here, not several"


def test_the_same_seed_under_another_rule_is_another_text():
    """Control: otherwise equality would show nothing about `coupled`."""
    outputs = dp.load(llama(), neighbour(), rule="block", num_draft_tokens=4).generate(
        PROMPTS[:3], SAMPLINGS[:3], max_tokens=LENGTH
    )
    for output, prompt, sampling in zip(outputs, PROMPTS, SAMPLINGS, strict=False):
        assert output.tokens != plain_text(prompt, sampling, LENGTH)


def test_the_margin_is_that_of_the_race_which_is_run():
    """The winner of the race computed for the margin is the token that plain decoding emits."""
    for prompt, sampling in zip(PROMPTS[:3], SAMPLINGS[:3], strict=True):
        dist = next_distributions(llama(), [prompt], sampling, 0)
        rng = Philox(torch.tensor([sampling.seed]), torch.tensor([len(prompt)]))
        winner = (dist / rng.exponential(Purpose.POSITION, torch.arange(V), 1)).argmax()
        assert plain_text(prompt, sampling, 1) == [int(winner)]
        assert margin(prompt, sampling) > 1e-4


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_under_coupled_is_its_plain_seeded_decoding(name):
    model, _ = pair(name)
    samplings = [SamplingParams(temperature=0.8, seed=i) for i in range(len(SOURCES))]
    texts = [
        dp.load(model, drafter, rule="coupled", num_draft_tokens=3, max_batch=size).generate(
            SOURCES, samplings, max_tokens=12
        )
        for drafter, size in ((None, 1), ("ngram", 3), ("prompt-lookup", 2))
    ]
    assert len({tuple(tuple(output.tokens) for output in outputs) for outputs in texts}) == 1
