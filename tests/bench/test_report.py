"""Figures of a benchmark, from runs small enough to compute by hand."""

import json
from dataclasses import replace

import pytest

from draftproof.bench.measure import BenchPlan, Decoded, Run, measure
from draftproof.bench.prompts import Prompt
from draftproof.bench.report import Results, Spread, comparison, differences, read_results, summarise, table

PLAIN = Run("plain", "a", "chat", 0, 10, 10.0, 1.0, 10, 0, 0, 0, "x")
FAST = replace(PLAIN, contestant="fast", seconds=5.0, passes=4, drafts=3, drafted=12, accepted=6)


def runs():
    other = [replace(run, prompt="b", kind="code", seconds=run.seconds / n) for run, n in ((PLAIN, 1), (FAST, 2))]
    return [FAST, PLAIN, *other]


def test_plain_comes_first_and_is_its_own_measure():
    plain, fast = summarise(runs())
    assert plain.contestant == "plain"
    assert plain.speedup == Spread(1.0, 1.0, 1.0)
    assert plain.acceptance_length is None
    assert fast.speedup.middle == pytest.approx(3.0)  # 2 and 4


def test_figures_are_as_the_field_defines_them():
    fast = summarise(runs(), "chat")[1]
    assert fast.tokens_per_second == 2.0
    assert fast.acceptance_length == 1 + 6 / 3
    assert fast.tokens_per_pass == 10 / 4
    assert fast.same == 1


def test_a_speedup_is_of_the_same_prompt():
    slow_prompt = replace(PLAIN, prompt="c", seconds=100.0)
    assert summarise([*runs(), slow_prompt])[1].speedup.middle == pytest.approx(3.0)


def test_repeats_count_once_by_their_median():
    repeats = [replace(FAST, repeat=n, seconds=s) for n, s in enumerate((5.0, 5.0, 500.0))]
    assert summarise([PLAIN, *repeats])[1].speedup.middle == pytest.approx(2.0)


def test_tables_hold_every_decoder():
    shown = table(runs(), greedy=True)
    assert shown.row_count == 3 + 2 * 3
    assert comparison(runs(), runs()).row_count == 2


def test_results_are_read_as_they_were_saved(tmp_path):
    kept = Results({"target": "smollm2"}, {"cores": 2}, runs())
    file = tmp_path / "kept.json"
    file.write_text(kept.as_json())
    assert read_results(file) == kept
    assert differences(kept, Results({"target": "other"}, {"cores": 2}, [])) == ["target: smollm2 → other"]
    file.write_text(json.dumps({"runs": []}))
    with pytest.raises(ValueError, match="holds no results"):
        read_results(file)


def test_every_decoder_answers_every_prompt_and_they_take_turns_to_begin():
    order = []

    class Counting:
        def __init__(self, name):
            self.name = name

        def __call__(self, tokens, max_tokens, sampling):
            order.append((self.name, tokens[0], max_tokens))
            return Decoded(tokens * max_tokens, 0.0)

    prompts = [Prompt(str(n), "chat", str(n)) for n in range(3)]
    plan = BenchPlan([Counting("plain"), Counting("fast")], prompts, lambda text: [int(text)], 9, 2, {"temperature": 0})
    made = list(measure(plan))
    assert len(made) == plan.total == 12
    warm, counted = order[:2], order[2:]
    assert [entry[2] for entry in warm] == [4, 4]
    assert [entry[0] for entry in counted[:4]] == ["plain", "fast", "fast", "plain"]
    assert {(run.contestant, run.prompt, run.repeat) for run in made} == {
        (name, str(n), repeat) for name in ("plain", "fast") for n in range(3) for repeat in range(2)
    }
