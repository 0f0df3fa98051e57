"""Sampling inside transformers' generate: the joint distribution of three tokens under transformers' own processors, by G-test.

2,000 texts from one call, 8 tokens, the distribution found by whole forwards of every prefix (engine/distributions.py): a total variation
of 0.17 shows with power 0.9 where it is spread over all 512 texts, of 0.1 where filters leave 64 of them. False alarms:
α = 1e-6 a test, seeds fixed. The control, processors that are not told of the draft, fails with as many.
"""

import pytest
import torch
import transformers as tf

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.integrations import transformers_rows as sheet
from engine.many_texts import unchecked
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama, neighbour
from g_test import g_test

pytestmark = pytest.mark.statistical

ALPHA = 1e-6
N = 2000
FILTERS = {"temperature": 1.2, "top_k": 6, "top_p": 0.95, "min_p": 0.02}
ALL = {**FILTERS, "repetition_penalty": 1.6}
CASES = [("ngram", "block"), ("model", "block"), ("model", "token"), ("model", "coupled"), ("model", "tree")]


def p_value(drafter: str, rule: str, padding: int = 0, **options: float) -> float:
    """`padding` rows of tokens to the left of the prompt, masked. They count as seen, here as in plain generate."""
    ids = torch.tensor([[0] * padding + list(PROMPT)])
    with unchecked():
        made = llama().generate(
            ids,
            attention_mask=(torch.arange(ids.shape[1]) >= padding).long()[None],
            custom_generate=dp.transformers.generate,
            drafter=neighbour() if drafter == "model" else drafter,
            rule=rule,
            num_draft_tokens=4 if rule == "tree" else 2,
            seed=5,
            num_return_sequences=N,
            do_sample=True,
            max_new_tokens=3,
            pad_token_id=0,
            **options,
        )
    assert made.shape == (N, ids.shape[1] + 3)
    dist = joint_distribution(llama(), PROMPT, SamplingParams(**options), 3)
    return g_test(counts(made[:, -3:], V), dist)


@pytest.mark.parametrize(("drafter", "rule"), CASES)
def test_texts_have_the_distribution_of_plain_generate(drafter, rule):
    assert p_value(drafter, rule, **ALL) > ALPHA


def test_padded_texts_have_it_too():
    assert p_value("model", "block", padding=3, **ALL) > ALPHA


def test_processors_that_are_not_told_of_the_draft_are_caught(monkeypatch):
    monkeypatch.setattr(sheet.Line, "at", lambda line, node, scores: line.text if node <= len(line.tokens) else None)
    assert p_value("model", "block", **ALL) < ALPHA


def test_the_distribution_is_that_of_plain_generate_itself():
    """The judge is judged: transformers' own loop passes the same test."""
    torch.manual_seed(0)
    ids = torch.tensor([PROMPT])
    made = llama().generate(ids, num_return_sequences=N, do_sample=True, max_new_tokens=3, **ALL)
    assert g_test(counts(made[:, -3:], V), joint_distribution(llama(), PROMPT, SamplingParams(**ALL), 3)) > ALPHA


def test_nothing_is_left_of_tokens_that_a_processor_rules_out():
    made = llama().generate(
        torch.tensor([PROMPT]),
        custom_generate=dp.transformers.generate,
        logits_processor=tf.LogitsProcessorList([tf.SuppressTokensLogitsProcessor([1, 4, 6])]),
        num_return_sequences=50,
        do_sample=True,
        max_new_tokens=8,
    )
    assert not torch.isin(made[:, len(PROMPT) :], torch.tensor([1, 4, 6])).any()
