"""Seeded invariance: an engine whose texts depend on the seed alone, and decoders whose texts do not."""

import pytest
import torch

import draftproof as dp
from auditor.toy_decoder import pair
from draftproof.auditor.interface import Decoded
from draftproof.auditor.invariance import agreement
from draftproof.core.sampling import SamplingParams
from draftproof.models.toy import Toy
from engine.many_texts import unchecked

TARGET, DRAFT = pair(24)
PROMPTS = [[a, 1, a] for a in range(4)]


def engines(rule):
    lengths = {f"draft length {k}": dp.load(TARGET, DRAFT, rule=rule, num_draft_tokens=k, max_batch=4) for k in (1, 3)}
    return {**lengths, "copied": dp.load(TARGET, "prompt-lookup", rule=rule), "plain": dp.load(TARGET, None)}


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_coupled_and_greedy_texts_depend_on_the_seed_alone(temperature):
    with unchecked():
        found = agreement(
            engines("coupled"), TARGET, PROMPTS, sampling=SamplingParams(temperature=temperature), max_tokens=12
        )
    assert found.holds, str(found)
    assert len(found.runs) == 8
    assert found.tokens == 4 * 12


def test_under_the_token_rule_texts_depend_on_the_draft_and_that_is_seen():
    with unchecked():
        found = agreement(engines("token"), TARGET, PROMPTS, sampling=SamplingParams(), max_tokens=12)
    assert not found.holds
    assert "NOT the same" in str(found)


class Shared:
    """A decoder whose randomness depends on the row of the batch, not on the seed."""

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        return [Decoded(tuple((i + n) % 24 for n in range(max_tokens))) for i in range(len(prompts))]


def test_a_seed_tied_to_the_batch_slot_is_seen():
    found = agreement({"shared": Shared()}, TARGET, PROMPTS, sampling=SamplingParams(), max_tokens=4)
    assert not found.holds
    assert {p.run for p in found.differences} == {"shared, one at a time"}
    assert [p.position for p in found.differences] == [0] * 3


class Fixed:
    """A decoder that always emits the same tokens."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        return [Decoded(self.tokens)] * len(prompts)


def test_a_near_tie_is_shown_and_not_counted():
    toy = Toy(torch.tensor([[3.0, 3.0 - 1e-6, 0.0]]).repeat(3, 1))
    how = {"sampling": SamplingParams(temperature=0), "max_tokens": 2}
    near = agreement({"a": Fixed(0, 0), "b": Fixed(0, 1)}, toy, [[0]], **how)
    assert near.holds
    assert [p.near for p in near.differences] == [True, True]
    assert not agreement({"a": Fixed(0, 0), "b": Fixed(0, 2)}, toy, [[0]], **how).holds
    assert not agreement({"a": Fixed(0, 0), "b": Fixed(0)}, toy, [[0]], **how).holds


@pytest.mark.parametrize("texts", [((0, 0), (0, 99)), ((0, 0), (0, -1)), ((99, 0), (99, 1))])
def test_a_token_outside_the_vocabulary_is_a_difference_that_rounding_does_not_explain(texts):
    toy = Toy(torch.tensor([[3.0, 3.0 - 1e-6, 0.0]]).repeat(3, 1))
    one, other = (Fixed(*tokens) for tokens in texts)
    found = agreement({"a": one, "b": other}, toy, [[0]], sampling=SamplingParams(temperature=0), max_tokens=2)
    assert not found.holds
    assert not any(difference.near for difference in found.differences)


def test_an_empty_comparison_is_refused():
    with pytest.raises(ValueError, match="nothing to compare: 0 decoders"):
        agreement({}, TARGET, PROMPTS, sampling=SamplingParams())
