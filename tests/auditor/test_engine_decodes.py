"""The engine as a decoder: one seed per text, rounds that add up, and failures that raise."""

import pytest
import torch

import draftproof as dp
from auditor.toy_decoder import pair
from draftproof.auditor.interface import Sample
from draftproof.core.sampling import SamplingParams
from draftproof.models.toy import Toy

TARGET, DRAFT = pair(12)
WARM = SamplingParams(temperature=0.9)


@pytest.fixture(scope="module")
def engine():
    return dp.load(TARGET, DRAFT, num_draft_tokens=3, max_batch=3)


def test_a_text_is_a_function_of_its_seed(engine):
    prompts, seeds = [[1, 2], [3], [1, 2], [1, 2]], [5, 6, 5, 7]
    samples = engine.decode(prompts, WARM, max_tokens=9, seeds=seeds)
    assert samples[0].tokens == samples[2].tokens != samples[3].tokens
    alone = engine.decode(prompts[:1], WARM, max_tokens=9, seeds=seeds[:1])
    assert alone[0].tokens == samples[0].tokens == engine.generate([1, 2], temperature=0.9, seed=5, max_tokens=9).tokens


def test_rounds_are_reported_and_cover_the_text(engine):
    [sample] = engine.decode([[1, 2]], WARM, max_tokens=9, seeds=[1])
    assert isinstance(sample, Sample)
    assert sample.stats.rounds == len(sample.rounds)
    assert sum(r.accepted for r in sample.rounds) == sample.stats.accepted
    assert sum(r.accepted + 1 for r in sample.rounds) >= len(sample.tokens) == 9
    assert all(0 <= r.accepted <= r.drafted <= 3 for r in sample.rounds)


def test_it_describes_itself(engine):
    assert engine.name == "draftproof"
    assert engine.description == {"rule": "block", "drafter": "ModelDrafter", "draft length": "3"}


def test_no_prompts_give_no_texts_and_seeds_must_match(engine):
    assert engine.decode([], WARM, max_tokens=4, seeds=[]) == []
    with pytest.raises(ValueError, match="2 prompts, 1 seeds"):
        engine.decode([[1], [2]], WARM, max_tokens=4, seeds=[1])


def test_a_request_that_fails_raises():
    table = torch.zeros(3, 3)
    table[1] = torch.nan
    broken = dp.load(Toy(table), None)
    with pytest.raises(RuntimeError, match="not a distribution"):
        broken.decode([[1]], WARM, max_tokens=4, seeds=[0])
