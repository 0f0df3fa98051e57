"""Estimated costs of passes and drafts start from assumptions, follow measurements, and resist single slow rounds."""

import random

import numpy as np
import pytest

from draftproof.engine.draft_length import BLOCK, Costs, DecayingRate, DraftRecord, _best_together, best_lengths

TRUE = {1: 40e-3, 3: 41e-3, 5: 42e-3, 9: 48e-3}


def measured(rounds: int, disturbed: float = 0.0, seed: int = 0) -> Costs:
    rng, costs = random.Random(seed), Costs()
    for i in range(rounds):
        width = list(TRUE)[i % len(TRUE)]
        seconds = TRUE[width] * rng.lognormvariate(0, disturbed)
        costs.update({"score": seconds, "draft": 1e-4 * (width - 1)}, width, width - 1)
    return costs


def test_before_anything_is_measured_costs_are_assumed():
    costs = Costs(pass_growth=0.1, draft_cost=0.05)
    assert costs.of_round(0) == 1
    assert costs.of_round(4) == pytest.approx(1.6)
    assert costs.of_round(2.5) == pytest.approx(1.375)


def test_a_single_pass_costs_what_it_costs_among_others():
    """`of_pass` is `of_passes` without numpy: before, between and after measured widths, few or many positions."""
    wide = Costs(pass_growth=0.1, block_cost=0.3)
    for width in (2, 7, 40):
        wide.update({"score": 1.0 + 0.1 * width}, width, width - 1)
    widths = np.array([1, 1.5, 2, 3, 5, 7, 8, 9, 16, 17, 18, 30, 40, 64])
    for costs in (Costs(), Costs(pass_growth=0.11, block_cost=0.5), measured(20), wide):
        assert [costs.of_pass(float(width)) for width in widths] == pytest.approx(costs.of_passes(widths).tolist())


@pytest.mark.parametrize("width", [1, 5])
def test_a_single_width_does_not_change_the_cost_of_others(width):
    costs = Costs()
    costs.update({"score": 1.0}, width, 0)
    assert [costs.of_pass(n) for n in range(1, 9)] == pytest.approx([Costs().of_pass(n) for n in range(1, 9)])


def test_drafting_is_measured_even_if_no_pass_was_over_one_position():
    """If every round drafts. Otherwise a drafter that costs half a pass per token would seem cheap."""
    costs = Costs()
    for _ in range(20):
        costs.update({"score": 1.2, "draft": 4 * 0.5}, 5, 4)
    assert costs.of_draft() == pytest.approx(0.5 * costs.of_pass(5) / 1.2)


def test_what_a_drafter_reads_after_a_pause_is_not_the_cost_of_its_tokens():
    """At first it reads the prompt, later what was emitted without it. That cost would keep it from drafting again."""
    costs = Costs()
    for drafted in (2, 2, 0, 2, 2, 0, 2):
        missed = 0.0 if costs.drafting else 0.8
        costs.update({"score": 1.0, "draft": missed + 0.1 * drafted}, 1 + drafted, drafted)
    assert costs.of_draft() == pytest.approx(0.1)


def test_beginning_a_draft_costs_as_much_as_tokens_of_it():
    costs = Costs(draft_start=1.0)
    for _ in range(20):
        costs.update({"score": 1.0}, 1, 0)
        costs.update({"score": 1.0, "draft": 0.4}, 2, 1)
        costs.update({"score": 1.0, "draft": 0.4}, 2, 1)
    assert [costs.of_drafting(n) for n in (0, 1, 2)] == pytest.approx([0.0, 0.4, 0.6])


def test_measured_costs_are_found_and_lie_on_a_line_between():
    costs = measured(400)
    for width, seconds in TRUE.items():
        assert costs.of_pass(width) == pytest.approx(seconds / TRUE[1], abs=0.01)
    assert costs.of_pass(7) == pytest.approx(45 / 40, abs=0.01)
    assert costs.of_pass(11) == pytest.approx(costs.of_pass(9) + 2 * costs.pass_growth)
    assert costs.of_draft() == pytest.approx(1e-4 / 40e-3)


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_machine_does_not_change_much(seed):
    """Each pass takes e^±0.3 of its time. An error of a quarter would make drafting seem a loss where it is a gain."""
    costs = measured(200, 0.3, seed)
    assert all(abs(costs.of_pass(width) - seconds / TRUE[1]) < 0.25 for width, seconds in TRUE.items())


def test_one_slow_round_does_not_count_for_more_than_half_a_round():
    costs, calm = measured(40), measured(40)
    costs.update({"score": 100.0}, 5, 0)
    assert costs.of_pass(5) - calm.of_pass(5) < 0.15


def test_no_pass_costs_more_than_a_wider_one():
    costs = measured(40)
    for _ in range(9):
        costs.update({"score": 90e-3}, 2, 0)
    costs.update({"score": 30e-3}, 9, 0)
    prices = [costs.of_pass(1 + i / 4) for i in range(60)]
    assert prices == sorted(prices)
    assert prices[0] == 1


def test_a_clock_too_coarse_to_measure_a_stage_is_no_error():
    costs = Costs()
    for width in (1, 3, 1, 3):
        costs.update({"score": 0.0, "draft": 0.0}, width, width - 1)
    assert costs.of_round(4) > 0


def test_a_kernel_of_blocks_makes_the_next_block_dear():
    costs = Costs(pass_growth=0.1, block_cost=0.5)
    assert [costs.of_pass(n) for n in (1, 4, 5, 8, 9)] == pytest.approx([1, 1.3, 1.9, 2.2, 2.8])
    record = DraftRecord(DecayingRate(8.5, 10.0), DecayingRate(8.5, 10.0), DecayingRate(10.0, 10.0))
    assert max(best_lengths([record], costs)) == BLOCK - 1 < max(best_lengths([record], Costs(pass_growth=0.1)))


def test_the_length_of_one_row_is_that_of_a_batch_of_one():
    """Alone it is computed without numpy. Some of these records and costs draft nothing, some as much as there is."""
    rng, found = random.Random(3), set()
    for _ in range(300):
        rates = [DecayingRate(rng.random() ** power * 2, 2.0) for power in (0.7, 1, 0.3)]
        costs = Costs(0.2 * rng.random(), 0.2 * rng.random(), draft_start=2 * rng.random(), block_cost=rng.random() / 3)
        for width in rng.sample(range(1, 20), rng.randrange(4)):
            costs.update({"score": 1 + 0.1 * width}, width, width - 1)
        record, others = DraftRecord(*rates), rng.choice([0, 0, 3, 20])
        [length] = best_lengths([record], costs, others)
        assert [length] == _best_together([record], costs, others)
        found.add(length)
    assert {0, 1, 2, 16} <= found
