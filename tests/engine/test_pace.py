"""How long drafts are: never past the room there is, the same for a seed on any machine, short where they fail."""

import itertools

import pytest

import draftproof as dp
from draftproof.core.sampling import Sampling
from draftproof.engine import clock
from draftproof.engine.engine import Engine, Limits
from draftproof.engine.pace import LONGEST, PROBE, Auto, Costs, Record, best_length
from engine.stage import Knowing, cycle
from engine.tiny import PROMPT, llama, neighbour

ROUND = [1, 2, 3, 4, 5]


def speaker(text, **options) -> Engine:
    return Engine(cycle(*ROUND), None, Knowing(text), num_draft_tokens="auto", **options)


@pytest.mark.parametrize("budget", [1, 2, 3, 10, 40])
def test_auto_never_drafts_past_the_budget(budget):
    engine = speaker(ROUND * 20)
    output = engine.generate([1], max_tokens=budget)
    assert len(output.tokens) == budget
    assert all(said + asked < budget for said, asked in engine.drafter.asked)


def test_auto_never_drafts_past_the_last_position():
    engine = speaker(ROUND * 20, limits=Limits(max_length=20))
    assert len(engine.generate([1], max_tokens=90).tokens) == 19
    assert all(1 + said + asked <= 20 for said, asked in engine.drafter.asked)


def test_auto_grows_with_a_drafter_that_is_always_right():
    engine = speaker(ROUND * 80)
    output = engine.generate([1], max_tokens=300, seed=0)
    assert max(asked for _, asked in engine.drafter.asked) == LONGEST
    assert output.stats.tokens_per_pass > LONGEST / 2


def test_auto_gives_up_on_a_drafter_that_is_never_right():
    """After a few tries one round in PROBE drafts, two tokens: a thirtieth of what a fixed length of 4 would draft."""
    output = speaker([0] * 900).generate([1], max_tokens=480, seed=0)
    assert output.stats.accepted == 0
    assert output.stats.rounds == 480
    assert output.stats.drafts <= 10 + 480 // PROBE
    assert output.stats.drafted <= 24 + 2 * 480 // PROBE


def test_auto_tries_again_and_finds_out_when_a_drafter_gets_better():
    text = [0] * 200 + (ROUND * 80)[200:]
    output = speaker(text).generate([1], max_tokens=380, seed=0)
    assert output.stats.tokens_per_pass > 1.5


def ticking(*steps):
    """A clock that always goes on by the next of these steps."""
    times = itertools.accumulate(itertools.cycle(steps))
    return lambda: next(times)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_seeded_text_does_not_depend_on_how_busy_the_machine_is(rule, monkeypatch):
    made = []
    for steps in ((1e-3,), (1.0, 1e-3), (1e-6, 5.0, 1e-3, 1e-3, 1e-1)):
        monkeypatch.setattr(clock.time, "perf_counter", ticking(*steps))
        engine = dp.load(llama(), neighbour(), rule=rule, num_draft_tokens="auto")
        outputs = engine.generate([list(PROMPT), [1, 2]], [Sampling(seed=1), Sampling(seed=2)], max_tokens=40)
        made.append([(output.tokens, output.stats.drafted) for output in outputs])
    assert made[0] == made[1] == made[2]


def test_without_a_seed_the_measured_costs_decide(monkeypatch):
    """The clock of the test above does matter where it may: the control."""
    drafted = []
    for draft in (1e-4, 3.0):
        auto = Auto()
        for width in (1, 3, 1, 5):
            auto.timed({"draft": draft * (width - 1), "score": 1.0}, width, width - 1)
        drafted.append(best_length(0.7, auto.measured))
    assert drafted[0] > drafted[1] == 0


def test_a_longer_draft_is_asked_for_where_more_is_kept():
    lengths = [best_length(rate, Costs()) for rate in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == LONGEST


def test_a_record_follows_what_happens_lately():
    record = Record()
    for _ in range(30):
        record.note(4, 4)
    assert record.rate > 0.95
    for _ in range(30):
        record.note(4, 0)
    assert record.rate < 0.05
