"""Texts are generated while there is time, saved wave by wave, and determine the head's vocabulary."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from draftproof.train import data as corpora
from draftproof.train.chat_template import turns_of
from draftproof.train.config import Budget, PausedError, TrainConfig, open_run_folder
from draftproof.train.data import TEMPERATURES, all_subjects, frequent_tokens, load_texts, make_corpus, text_starts
from draftproof.train.evaluate import held_out_prompts
from draftproof.train.generate import Texts
from models.tiny_tokenizers import byte_fallback, byte_level
from train.tiny_target import Ticks, tiny_llama


def folder_in(folder: Path, **options):
    return open_run_folder(TrainConfig(target="tiny-llama", out=folder / "head", length=40, **options), resume=False)


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(corpora, "CPU_ROWS", 8)


def silent(stage: str, share: float) -> None:
    pass


def test_waves_go_on_until_the_time_for_data_is_over(tmp_path, few_rows):
    run_folder, budget = folder_in(tmp_path), Budget(60.0, clock=Ticks(0.5))
    made = make_corpus(run_folder, tiny_llama(), byte_level(), budget, silent)
    waves = len(list(run_folder.folder.glob("texts-*")))
    assert waves >= 2
    assert len(made.train) + len(made.held_out) == 8 * waves
    assert len(made.held_out) == -(-8 * waves // 32)
    assert budget.spent < budget.data_ends + 5
    assert run_folder.spent == pytest.approx(budget.spent, abs=5)


def test_a_first_wave_that_takes_too_long_is_cut_and_not_thrown_away(tmp_path, few_rows):
    made = make_corpus(folder_in(tmp_path), tiny_llama(), byte_level(), Budget(8.0, clock=Ticks(0.5)), silent)
    assert 24 <= made.train.tokens.shape[1] < 40


def test_a_pause_keeps_what_was_made_and_other_texts_follow(tmp_path, few_rows):
    run_folder = folder_in(tmp_path)
    with pytest.raises(PausedError, match="--resume"):
        make_corpus(run_folder, tiny_llama(), byte_level(), Budget(600.0, pause=1.0, clock=Ticks(0.5)), silent)
    before = load_texts(run_folder.folder)
    make_corpus(run_folder, tiny_llama(), byte_level(), Budget(30.0, clock=Ticks(0.5)), silent)
    after = load_texts(run_folder.folder)
    assert len(before) == 8
    assert len(after) > 8
    assert torch.equal(after.tokens[:8], before.tokens)
    assert not torch.equal(after.tokens[8:16], before.tokens)


def test_runs_with_other_seeds_have_other_texts(tmp_path, few_rows):
    """In every wave: a head continued with the next seed must see new texts."""
    made = []
    for seed in (0, 1):
        run_folder = folder_in(tmp_path / str(seed), seed=seed)
        make_corpus(run_folder, tiny_llama(), byte_level(), Budget(60.0, clock=Ticks(0.5)), silent)
        made.append({tuple(wave.flatten().tolist()) for wave in load_texts(run_folder.folder).tokens.split(8)})
    assert min(map(len, made)) >= 2
    assert not made[0] & made[1]


def test_after_training_has_begun_no_texts_are_added(tmp_path, few_rows):
    run_folder = folder_in(tmp_path)
    make_corpus(run_folder, tiny_llama(), byte_level(), Budget(4.0, clock=Ticks(0.5)), silent)
    run_folder.checkpoint.touch()
    before = len(load_texts(run_folder.folder))
    make_corpus(run_folder, tiny_llama(), byte_level(), Budget(600.0, clock=Ticks(0.5)), silent)
    assert len(load_texts(run_folder.folder)) == before


def test_a_vocabulary_is_the_frequent_tokens_of_answers_and_the_ends():
    tokens = torch.tensor([[1, 1, 1, 4, 4, 2, 7, 7, 7, 7]], dtype=torch.int32)
    is_answer = torch.tensor([[True, True, True, True, True, True, False, False, False, False]])
    assert frequent_tokens(Texts(tokens, is_answer), 10, 4, always=[9]).tolist() == [9, 1, 4, 2]


@pytest.mark.parametrize("count", [0, 11])
def test_a_vocabulary_that_the_target_does_not_have_is_refused(count):
    texts = Texts(torch.zeros(1, 3, dtype=torch.int32), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"vocab={count}: the target has 10 tokens"):
        frequent_tokens(texts, 10, count, always=[])


def test_beginnings_have_their_shares():
    begun = text_starts(turns_of(byte_level()), byte_level(), 2_000, random.Random(0))
    seen = Counter(start.temperature for start in begun)
    for temperature, share in TEMPERATURES:
        assert abs(seen[temperature] / 2_000 - share) < 0.05
    assert 0.15 < sum(start.assistant_next for start in begun) / 2_000 < 0.35
    assert len({start.tokens for start in begun}) > 300


def test_without_a_chat_template_the_target_answers_from_the_first_token():
    begun = text_starts(turns_of(byte_fallback()), byte_fallback(), 50, random.Random(0))
    assert all(start.assistant_next and start.tokens for start in begun)


def test_no_subject_of_the_training_occurs_in_the_held_out_prompts():
    prompts = held_out_prompts()
    assert not [(s, p.text) for s in all_subjects() for p in prompts if s.lower() in p.text.lower()]


def test_held_out_prompts_are_eight_of_eight_kinds_taking_turns():
    prompts = held_out_prompts()
    kinds = [prompt.kind for prompt in prompts]
    assert set(Counter(kinds).values()) == {8}
    assert len(set(kinds[:8])) == 8
    assert len({prompt.text for prompt in prompts}) == 64
