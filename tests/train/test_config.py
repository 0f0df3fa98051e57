"""A time budget that is kept over several runs, and a folder that knows what it was begun for."""

import dataclasses

import pytest

from draftproof.train.config import SINGLE, Budget, PausedError, Plan, workplace
from draftproof.train.trainer import LEAST_RATE, WARM, rate


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
    assert rate(0, 0.0) == pytest.approx(1 / WARM)
    assert rate(WARM, 0.0) == pytest.approx(1.0)
    assert rate(10_000, 1.0) == pytest.approx(LEAST_RATE)


@pytest.mark.parametrize(
    ("wrong", "said"),
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
def test_a_plan_that_cannot_be_is_refused(tmp_path, wrong, said):
    with pytest.raises(ValueError, match=said):
        Plan(target="smollm2", out=tmp_path, **wrong)


def test_the_command_that_makes_it_again_names_no_folder_of_this_machine(tmp_path):
    plan = Plan(target=str(tmp_path), out=tmp_path / "head", minutes=2.5, vocab=64)
    wanted = f"draftproof train --target {tmp_path.name} --out head --minutes 2.5 --vocab 64 --depth 5 --seed 0 "
    assert plan.command == wanted + "--length 642 --batch 24 --learning-rate 0.001"


def test_a_head_that_goes_on_learns_at_half_the_rate_unless_told(tmp_path):
    new = Plan(target="smollm2", out=tmp_path / "head")
    started = dataclasses.replace(new, start=tmp_path / "old")
    assert (new.course.learning_rate, new.course.single) == (1e-3, SINGLE)
    assert (started.course.learning_rate, started.course.single) == (5e-4, 0.0)
    assert dataclasses.replace(started, learning_rate=2e-4).course.learning_rate == 2e-4
    assert started.as_json()["learning_rate"] == 5e-4
    assert "--minutes 30 --start old --depth 5" in started.command


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is not empty: give --resume"):
        workplace(Plan(target="smollm2", out=tmp_path), resume=False)
    with pytest.raises(ValueError, match="exists and is not empty"):
        workplace(Plan(target="smollm2", out=tmp_path / "thesis.txt"), resume=False)


def test_there_must_be_something_to_go_on_with(tmp_path):
    with pytest.raises(ValueError, match="nothing to go on with"):
        workplace(Plan(target="smollm2", out=tmp_path), resume=True)


def test_a_run_goes_on_with_its_own_plan_only(tmp_path):
    plan = Plan(target="smollm2", out=tmp_path / "head")
    workplace(plan, resume=False).spend(17.0)
    assert workplace(dataclasses.replace(plan, minutes=60.0, counts=False), resume=True).spent == 17.0
    with pytest.raises(ValueError, match="begun with depth=5, and now it is 3"):
        workplace(dataclasses.replace(plan, depth=3), resume=True)
