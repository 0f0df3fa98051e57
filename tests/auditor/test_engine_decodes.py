"""The engine as a decoder: a seed for each text, rounds that add up, no text cut short in silence."""

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
    said = engine.decode(prompts, WARM, max_tokens=9, seeds=seeds)
    assert said[0].tokens == said[2].tokens != said[3].tokens
    alone = engine.decode(prompts[:1], WARM, max_tokens=9, seeds=seeds[:1])
    assert alone[0].tokens == said[0].tokens == engine.generate([1, 2], temperature=0.9, seed=5, max_tokens=9).tokens


def test_rounds_are_told_and_cover_the_text(engine):
    [said] = engine.decode([[1, 2]], WARM, max_tokens=9, seeds=[1])
    assert isinstance(said, Sample)
    assert said.stats.rounds == len(said.rounds)
    assert sum(r.accepted for r in said.rounds) == said.stats.accepted
    assert sum(r.accepted + 1 for r in said.rounds) >= len(said.tokens) == 9
    assert all(0 <= r.accepted <= r.drafted <= 3 for r in said.rounds)


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
    with pytest.raises(RuntimeError, match="no distribution"):
        broken.decode([[1]], WARM, max_tokens=4, seeds=[0])
