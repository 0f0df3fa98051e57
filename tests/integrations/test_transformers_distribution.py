"""Sampling inside transformers' generate has the joint distribution of plain generate, by G-test on three tokens.

2,000 texts from one call over 8 tokens; the exact distribution comes from full forwards of every prefix
(engine/plain_distribution.py). A total variation of 0.17 is detected with power 0.9 if it is spread over all 512 texts,
of 0.1 if filters leave 64 of them. False alarms: α = 1e-6 per test, fixed seeds. The control, processors called without
the draft tokens, fails with as many texts.
"""

import pytest
import torch
import transformers as tf

import draftproof as dp
from budget import budgeted
from draftproof.core.sampling import SamplingParams
from draftproof.integrations import transformers_rows
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
    """Return the p-value of the G-test. The masked `padding` tokens count as seen, as in plain generate."""
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


@pytest.mark.parametrize(
    ("drafter", "rule"), budgeted(CASES, ["ngram-block", "model-tree"], [f"{name}-{rule}" for name, rule in CASES])
)
def test_texts_have_the_distribution_of_plain_generate(drafter, rule):
    assert p_value(drafter, rule, **ALL) > ALPHA


def test_padded_texts_have_the_distribution_of_plain_generate():
    assert p_value("model", "block", padding=3, **ALL) > ALPHA


def test_processors_called_without_the_draft_tokens_are_detected(monkeypatch):
    def without_draft(prefixes, node, scores):
        return prefixes.text if node <= len(prefixes.tokens) else None

    monkeypatch.setattr(transformers_rows.DraftPrefixes, "at", without_draft)
    assert p_value("model", "block", **ALL) < ALPHA


def test_the_distribution_is_that_of_plain_generate_itself():
    """A control of the test itself: transformers' own loop passes it."""
    torch.manual_seed(0)
    ids = torch.tensor([PROMPT])
    made = llama().generate(ids, num_return_sequences=N, do_sample=True, max_new_tokens=3, **ALL)
    assert g_test(counts(made[:, -3:], V), joint_distribution(llama(), PROMPT, SamplingParams(**ALL), 3)) > ALPHA


def test_tokens_that_a_processor_rules_out_are_never_generated():
    made = llama().generate(
        torch.tensor([PROMPT]),
        custom_generate=dp.transformers.generate,
        logits_processor=tf.LogitsProcessorList([tf.SuppressTokensLogitsProcessor([1, 4, 6])]),
        num_return_sequences=50,
        do_sample=True,
        max_new_tokens=8,
    )
    assert not torch.isin(made[:, len(PROMPT) :], torch.tensor([1, 4, 6])).any()
