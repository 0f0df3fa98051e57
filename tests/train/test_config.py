"""The time budget over several processes, and the folder that a run resumes from."""

import dataclasses

import pytest

from draftproof.train.config import SINGLE_STEP_SHARE, Budget, PausedError, TrainConfig, open_run_folder
from draftproof.train.trainer import LEAST_RATE, WARMUP_STEPS, learning_rate_factor


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_data_training_and_evaluation_share_the_whole():
    budget = Budget(600.0, evaluation=45.0)
    assert budget.data_ends == 150.0
    assert budget.training_ends == 555.0
    assert Budget(100.0).training_ends == 90.0
    assert Budget(600.0, data=0.4).data_ends == 240.0


def test_what_earlier_runs_spent_is_spent():
    clock = Clock()
    budget = Budget(100.0, before=30.0, clock=clock)
    clock.now = 12.0
    assert budget.spent == 42.0
    assert budget.left_until(budget.training_ends) == 48.0


def test_a_run_pauses_when_its_own_time_is_over_or_would_be():
    clock = Clock()
    budget = Budget(100.0, before=30.0, pause=10.0, clock=clock)
    clock.now = 9.0
    budget.check_pause()
    with pytest.raises(PausedError):
        budget.check_pause(needed=5.0)
    clock.now = 11.0
    with pytest.raises(PausedError):
        budget.check_pause()


def test_the_learning_rate_warms_up_and_cools_down():
    assert learning_rate_factor(0, 0.0) == pytest.approx(1 / WARMUP_STEPS)
    assert learning_rate_factor(WARMUP_STEPS, 0.0) == pytest.approx(1.0)
    assert learning_rate_factor(10_000, 1.0) == pytest.approx(LEAST_RATE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"minutes": 0.0}, "minutes must be more than 0"),
        ({"length": 8}, "length=8"),
        ({"depth": 0}, "depth and batch"),
        ({"batch": 0}, "depth and batch"),
        ({"learning_rate": 2.0}, "learning_rate"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"data": 1.0}, "data=1.0: a share of the time"),
    ],
)
def test_impossible_options_are_refused(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(target="smollm2", out=tmp_path, **wrong)


def test_the_command_to_repeat_a_run_contains_no_path_of_this_machine(tmp_path):
    config = TrainConfig(target=str(tmp_path), out=tmp_path / "head", minutes=2.5, vocab=64)
    wanted = f"draftproof train --target {tmp_path.name} --out head --minutes 2.5 --vocab 64 --depth 5 --seed 0 "
    assert config.command == wanted + "--length 642 --batch 24 --learning-rate 0.001"


def test_a_continued_head_trains_at_half_the_rate_by_default(tmp_path):
    new = TrainConfig(target="smollm2", out=tmp_path / "head")
    started = dataclasses.replace(new, start=tmp_path / "old")
    assert (new.schedule.learning_rate, new.schedule.single_step_share) == (1e-3, SINGLE_STEP_SHARE)
    assert (started.schedule.learning_rate, started.schedule.single_step_share) == (5e-4, 0.0)
    assert dataclasses.replace(started, learning_rate=2e-4).schedule.learning_rate == 2e-4
    assert started.as_json()["learning_rate"] == 5e-4
    assert "--minutes 30 --start old --depth 5" in started.command


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is not empty: give --resume"):
        open_run_folder(TrainConfig(target="smollm2", out=tmp_path), resume=False)
    with pytest.raises(ValueError, match="exists and is not empty"):
        open_run_folder(TrainConfig(target="smollm2", out=tmp_path / "thesis.txt"), resume=False)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        open_run_folder(TrainConfig(target="smollm2", out=tmp_path), resume=True)


def test_a_run_resumes_with_its_own_options_only(tmp_path):
    config = TrainConfig(target="smollm2", out=tmp_path / "head")
    open_run_folder(config, resume=False).save_spent(17.0)
    assert open_run_folder(dataclasses.replace(config, minutes=60.0, counts=False), resume=True).spent == 17.0
    with pytest.raises(ValueError, match="begun with depth=5, and now it is 3"):
        open_run_folder(dataclasses.replace(config, depth=3), resume=True)
