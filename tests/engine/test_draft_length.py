"""How long drafts are: never past the room there is, the same for a seed on any machine, short where they fail."""

import itertools

import pytest

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.engine import batch as clock
from draftproof.engine.draft_length import LONGEST, PROBE, SPENT, AutoLength, Costs, Record, Share, best_length
from draftproof.engine.engine import Engine, Limits
from draftproof.engine.request import Request, Session
from engine.scripted import Knowing, cycle
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
    """After a few tries drafts are short and so far apart that they cost a hundredth, by the costs it assumes."""
    engine = speaker([0] * 900)
    output = engine.generate([1], max_tokens=480, seed=0)
    assert output.stats.accepted == 0
    assert output.stats.rounds == 480
    asked = [length for _, length in engine.drafter.asked]
    tries = [i for i, length in enumerate(asked) if length]
    begin = next(i for i, length in enumerate(asked) if not length)
    assert begin <= 8
    assert {asked[i] for i in tries if begin < i < 480 - PROBE} == {PROBE}  # at the end there is less room
    assert sum(Costs().of(length) - 1 for length in asked[begin:]) <= SPENT * 480
    assert sum(Costs().of(length) - 1 for length in asked) <= 0.02 * 480


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
        outputs = engine.generate(
            [list(PROMPT), [1, 2]], [SamplingParams(seed=1), SamplingParams(seed=2)], max_tokens=40
        )
        made.append([(output.tokens, output.stats.drafted) for output in outputs])
    assert made[0] == made[1] == made[2]


def test_without_a_seed_the_measured_costs_decide(monkeypatch):
    """The clock of the test above does matter where it may: the control."""
    drafted = []
    for draft in (1e-4, 3.0):
        auto = AutoLength()
        for width in (1, 3, 1, 5):
            auto.timed({"draft": draft * (width - 1), "score": 1.0}, width, width - 1)
        drafted.append(best_length(faring(0.7, 0.7), auto.measured))
    assert drafted[0] > drafted[1] == 0


def faring(first: float, later: float, going: float = 1.0) -> Record:
    return Record(Share(first, 1.0), Share(later, 1.0), Share(going, 1.0))


def test_a_longer_draft_is_asked_for_where_more_is_kept():
    lengths = [best_length(faring(rate, rate), Costs()) for rate in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == LONGEST


def test_a_drafter_that_ends_its_drafts_itself_may_be_asked_for_more():
    """It draws the line where it is unsure; one that goes on to the end has to be held."""
    assert best_length(faring(0.3, 0.4, going=0.5), Costs()) > best_length(faring(0.3, 0.4, going=1.0), Costs())


def test_a_first_token_that_fails_mostly_is_no_reason_for_short_drafts():
    assert best_length(faring(0.3, 0.95), Costs()) > best_length(faring(0.8, 0.3), Costs())


def test_a_record_follows_what_happens_lately():
    record = Record()
    for _ in range(30):
        record.note(4, 4)
    assert record.first.value > 0.95
    assert record.later.value > 0.95
    for _ in range(30):
        record.note(4, 0)
    assert record.first.value < 0.05


def test_a_record_tells_the_first_token_from_later_ones():
    record = Record()
    for _ in range(40):
        record.ask(5)
        record.note(3, 0)
        record.note(5, 5)
    assert record.first.value == pytest.approx(0.5, abs=0.05)
    assert record.later.value > 0.95
    assert record.going.value == pytest.approx(6 / 7, abs=0.05)  # 2 of 3 and 4 of 4


def test_a_draft_that_was_not_made_says_nothing():
    record, blank = Record(asked=4, idle=3), Record(asked=4, idle=3)
    record.note(0, 0)
    assert record == blank


def test_short_drafts_are_tried_longer_now_and_then():
    """A length of 1 says nothing of second tokens: without tries it would be for ever."""
    auto, costs = AutoLength(), Costs()
    [session] = [Session.start(Request((1,), SamplingParams(seed=0), 90, seeded=True))]
    auto.records[session.id] = faring(0.5, 0.0)
    assert best_length(auto.records[session.id], costs) == 1
    asked = []
    for _ in range(30):
        [length] = auto.lengths([session])
        asked.append(length)
        auto.observe(session, length, min(length, 1))
    assert set(asked) == {1, PROBE}
    assert sum(costs.of(length) - costs.of(1) for length in asked) <= SPENT * 30
