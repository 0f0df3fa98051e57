"""Texts are made while there is time, kept as they come, and name the head's vocabulary."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from draftproof.train import data as corpora
from draftproof.train.chat_template import turns_of
from draftproof.train.config import Budget, PausedError, Plan, workplace
from draftproof.train.data import TEMPERATURES, corpus, every_subject, frequent, kept, starts
from draftproof.train.evaluate import held_out
from draftproof.train.generate import Texts
from models.tiny_tokenizers import byte_fallback, byte_level
from train.tiny_target import Ticks, pupil


def place_in(folder: Path, **options):
    return workplace(Plan(target="pupil", out=folder / "head", length=40, **options), resume=False)


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(corpora, "CPU_ROWS", 8)


def silent(stage: str, share: float) -> None:
    pass


def test_waves_go_on_until_the_time_for_data_is_over(tmp_path, few_rows):
    place, budget = place_in(tmp_path), Budget(60.0, clock=Ticks(0.5))
    made = corpus(place, pupil(), byte_level(), budget, silent)
    waves = len(list(place.folder.glob("texts-*")))
    assert waves >= 2
    assert len(made.train) + len(made.held_out) == 8 * waves
    assert len(made.held_out) == -(-8 * waves // 32)
    assert budget.spent < budget.data_ends + 5
    assert place.spent == pytest.approx(budget.spent, abs=5)


def test_a_first_wave_that_takes_too_long_is_cut_and_not_thrown_away(tmp_path, few_rows):
    made = corpus(place_in(tmp_path), pupil(), byte_level(), Budget(8.0, clock=Ticks(0.5)), silent)
    assert 24 <= made.train.tokens.shape[1] < 40


def test_a_pause_keeps_what_was_made_and_other_texts_follow(tmp_path, few_rows):
    place = place_in(tmp_path)
    with pytest.raises(PausedError, match="--resume"):
        corpus(place, pupil(), byte_level(), Budget(600.0, pause=1.0, clock=Ticks(0.5)), silent)
    before = kept(place.folder)
    corpus(place, pupil(), byte_level(), Budget(30.0, clock=Ticks(0.5)), silent)
    after = kept(place.folder)
    assert len(before) == 8
    assert len(after) > 8
    assert torch.equal(after.tokens[:8], before.tokens)
    assert not torch.equal(after.tokens[8:16], before.tokens)


def test_plans_with_other_seeds_have_other_texts(tmp_path, few_rows):
    """In every wave: a head that goes on with the next seed is to read something new."""
    made = []
    for seed in (0, 1):
        place = place_in(tmp_path / str(seed), seed=seed)
        corpus(place, pupil(), byte_level(), Budget(60.0, clock=Ticks(0.5)), silent)
        made.append({tuple(wave.flatten().tolist()) for wave in kept(place.folder).tokens.split(8)})
    assert min(map(len, made)) >= 2
    assert not made[0] & made[1]


def test_a_student_that_has_begun_keeps_its_texts(tmp_path, few_rows):
    place = place_in(tmp_path)
    corpus(place, pupil(), byte_level(), Budget(4.0, clock=Ticks(0.5)), silent)
    place.checkpoint.touch()
    before = len(kept(place.folder))
    corpus(place, pupil(), byte_level(), Budget(600.0, clock=Ticks(0.5)), silent)
    assert len(kept(place.folder)) == before


def test_a_vocabulary_is_the_frequent_tokens_of_answers_and_the_ends():
    tokens = torch.tensor([[1, 1, 1, 4, 4, 2, 7, 7, 7, 7]], dtype=torch.int32)
    spoken = torch.tensor([[True, True, True, True, True, True, False, False, False, False]])
    assert frequent(Texts(tokens, spoken), 10, 4, always=[9]).tolist() == [9, 1, 4, 2]


@pytest.mark.parametrize("count", [0, 11])
def test_a_vocabulary_that_the_target_does_not_have_is_refused(count):
    texts = Texts(torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"vocab={count}: the target has 10 tokens"):
        frequent(texts, 10, count, always=[])


def test_beginnings_have_their_shares():
    begun = starts(turns_of(byte_level()), byte_level(), 2_000, random.Random(0))
    seen = Counter(start.temperature for start in begun)
    for temperature, share in TEMPERATURES:
        assert abs(seen[temperature] / 2_000 - share) < 0.05
    assert 0.15 < sum(start.answers for start in begun) / 2_000 < 0.35
    assert len({start.tokens for start in begun}) > 300


def test_without_a_chat_template_the_target_writes_from_the_first_word():
    begun = starts(turns_of(byte_fallback()), byte_fallback(), 50, random.Random(0))
    assert all(start.answers and start.tokens for start in begun)


def test_no_subject_of_the_training_occurs_in_the_held_out_prompts():
    prompts = held_out()
    assert not [(s, p.text) for s in every_subject() for p in prompts if s.lower() in p.text.lower()]


def test_held_out_prompts_are_eight_of_eight_kinds_taking_turns():
    prompts = held_out()
    kinds = [prompt.kind for prompt in prompts]
    assert set(Counter(kinds).values()) == {8}
    assert len(set(kinds[:8])) == 8
    assert len({prompt.text for prompt in prompts}) == 64
