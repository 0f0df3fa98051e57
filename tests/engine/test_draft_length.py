"""Draft lengths stay within the budget, do not depend on the machine for a seeded text, and shrink if drafts fail."""

import itertools

import pytest

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.engine import round as rounds
from draftproof.engine.draft_length import (
    LONGEST_DRAFT,
    PROBE_BUDGET,
    PROBE_LENGTH,
    AutoLength,
    Costs,
    DecayingRate,
    DraftRecord,
    best_lengths,
)
from draftproof.engine.engine import Engine
from draftproof.engine.limits import Limits
from draftproof.engine.request import Request, Session
from engine.scripted import ScriptedDrafter, cycle
from engine.tiny import PROMPT, llama, neighbour

ROUND = [1, 2, 3, 4, 5]


def best_length(record: DraftRecord, costs: Costs) -> int:
    [length] = best_lengths([record], costs)
    return length


def scripted_engine(text, **options) -> Engine:
    return Engine(cycle(*ROUND), None, ScriptedDrafter(text), num_draft_tokens="auto", **options)


@pytest.mark.parametrize("budget", [1, 2, 3, 10, 40])
def test_auto_never_drafts_past_the_budget(budget):
    engine = scripted_engine(ROUND * 20)
    output = engine.generate([1], max_tokens=budget)
    assert len(output.tokens) == budget
    assert all(emitted + asked < budget for emitted, asked in engine.drafter.asked)


def test_auto_never_drafts_past_the_last_position():
    engine = scripted_engine(ROUND * 20, limits=Limits(max_length=20))
    assert len(engine.generate([1], max_tokens=90).tokens) == 19
    assert all(1 + emitted + asked <= 20 for emitted, asked in engine.drafter.asked)


def test_auto_grows_with_a_drafter_that_is_always_right():
    engine = scripted_engine(ROUND * 80)
    output = engine.generate([1], max_tokens=300, seed=0)
    assert max(asked for _, asked in engine.drafter.asked) == LONGEST_DRAFT
    assert output.stats.tokens_per_pass > LONGEST_DRAFT / 2


def test_auto_gives_up_on_a_drafter_that_is_never_right():
    """After a few drafts only probes are left, and they cost a hundredth of the time, by the assumed costs."""
    engine = scripted_engine([0] * 900)
    output = engine.generate([1], max_tokens=480, seed=0)
    assert output.stats.accepted == 0
    assert output.stats.rounds == 480
    asked = [length for _, length in engine.drafter.asked]
    tries = [i for i, length in enumerate(asked) if length]
    begin = next(i for i, length in enumerate(asked) if not length)
    assert begin <= 8
    assert {asked[i] for i in tries if begin < i < 480 - PROBE_LENGTH} == {
        PROBE_LENGTH
    }  # at the end there is less room
    assert sum(Costs().of_round(length) - 1 for length in asked[begin:]) <= PROBE_BUDGET * 480
    assert sum(Costs().of_round(length) - 1 for length in asked) <= 0.02 * 480


def test_auto_tries_again_and_finds_out_when_a_drafter_gets_better():
    text = [0] * 200 + (ROUND * 80)[200:]
    output = scripted_engine(text).generate([1], max_tokens=380, seed=0)
    assert output.stats.tokens_per_pass > 1.5


def ticking(*steps):
    """Make a clock that advances by the next of these steps at every call."""
    times = itertools.accumulate(itertools.cycle(steps))
    return lambda: next(times)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_seeded_text_does_not_depend_on_how_busy_the_machine_is(rule, monkeypatch):
    made = []
    for steps in ((1e-3,), (1.0, 1e-3), (1e-6, 5.0, 1e-3, 1e-3, 1e-1)):
        monkeypatch.setattr(rounds.time, "perf_counter", ticking(*steps))
        engine = dp.load(llama(), neighbour(), rule=rule, num_draft_tokens="auto")
        outputs = engine.generate(
            [list(PROMPT), [1, 2]], [SamplingParams(seed=1), SamplingParams(seed=2)], max_tokens=40
        )
        made.append([(output.tokens, output.stats.drafted) for output in outputs])
    assert made[0] == made[1] == made[2]


def test_without_a_seed_the_measured_costs_decide(monkeypatch):
    """Control for the test above: without a seed the clock does change the length."""
    drafted = []
    for draft in (1e-4, 3.0):
        auto = AutoLength()
        for width in (1, 3, 5, 1):
            auto.record_time({"draft": draft * (width - 1), "score": 1.0}, [width - 1])
        drafted.append(best_length(record_of(0.7, 0.7), auto.measured))
    assert drafted[0] > drafted[1] == 0


def record_of(first: float, later: float, continued: float = 1.0) -> DraftRecord:
    return DraftRecord(DecayingRate(first, 1.0), DecayingRate(later, 1.0), DecayingRate(continued, 1.0))


def test_a_longer_draft_is_asked_for_where_more_is_kept():
    lengths = [best_length(record_of(rate, rate), Costs()) for rate in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == LONGEST_DRAFT


def test_a_drafter_that_ends_its_drafts_itself_may_be_asked_for_more():
    """Such a drafter stops where it is unsure; one that always goes on needs a shorter limit."""
    stopping, going_on = record_of(0.3, 0.4, continued=0.5), record_of(0.3, 0.4, continued=1.0)
    assert best_length(stopping, Costs()) > best_length(going_on, Costs())


def test_a_first_token_that_fails_mostly_is_no_reason_for_short_drafts():
    assert best_length(record_of(0.3, 0.95), Costs()) > best_length(record_of(0.8, 0.3), Costs())


def sessions_of(count: int, *, seeded: bool) -> list[Session]:
    return [Session.start(Request((1,), SamplingParams(seed=i), 90, seeded=seeded)) for i in range(count)]


def test_what_one_rows_drafts_show_counts_for_all_rows_at_once():
    """If each row found out alone, a batch would try a useless drafter once for every row."""
    auto = AutoLength()
    rows = sessions_of(4, seeded=False)
    before = auto.lengths(rows)
    assert min(before) > 0
    for _ in range(6):
        auto.record_draft(rows[0], 4, 0, asked=4)
    assert max(auto.lengths(rows)) == 0
    for _ in range(30):
        auto.record_draft(rows[1], 4, 4, asked=4)
    after = auto.lengths(rows)
    assert after[1] == max(after) > 0
    assert after[0] < after[1], "its own drafts count more"


def test_a_row_that_went_badly_drafts_again_where_drafts_mostly_go_well():
    """Without drafts a row has no news of its own; a probe now and then would take long to find out."""
    auto = AutoLength()
    good, bad = sessions_of(2, seeded=False)
    auto.lengths([good, bad])
    for _ in range(60):
        auto.record_draft(good, 4, 4, asked=4)
        auto.record_draft(bad, 4, 0, asked=4)
    record, costs = auto.records[bad.id], Costs(draft_cost=0.3)
    assert best_length(record, costs) == 0
    for _ in range(30):
        record.update(0, 0)
    assert best_length(record, costs) > 0


def test_seeded_rows_learn_from_their_own_drafts_alone():
    auto = AutoLength()
    first, second = sessions_of(2, seeded=True)
    before = auto.lengths([first, second])
    for _ in range(6):
        auto.record_draft(first, 4, 0, asked=4)
    after = auto.lengths([first, second])
    assert after[0] < before[0]
    assert after[1] == before[1]


def test_a_record_follows_recent_drafts():
    record = DraftRecord()
    for _ in range(30):
        record.update(4, 4)
    assert record.first.value > 0.95
    assert record.later.value > 0.95
    for _ in range(30):
        record.update(4, 0)
    assert record.first.value < 0.05


def test_a_record_tells_the_first_token_from_later_ones():
    record = DraftRecord()
    for _ in range(40):
        record.ask(5)
        record.update(3, 0)
        record.update(5, 5)
    assert record.first.value == pytest.approx(0.5, abs=0.05)
    assert record.later.value > 0.95
    assert record.continued.value == pytest.approx(6 / 7, abs=0.05)  # 2 of 3 and 4 of 4


def test_a_round_without_a_draft_changes_no_record():
    record, blank = DraftRecord(asked=4, rounds_since_probe=3), DraftRecord(asked=4, rounds_since_probe=3)
    record.update(0, 0)
    assert record == blank


def test_short_drafts_are_probed_with_longer_ones():
    """A length of 1 gives no information about second tokens: without probes it would never change."""
    auto, costs = AutoLength(), Costs()
    [session] = [Session.start(Request((1,), SamplingParams(seed=0), 90, seeded=True))]
    auto.records[session.id] = record_of(0.5, 0.0)
    assert best_length(auto.records[session.id], costs) == 1
    asked = []
    for _ in range(30):
        [length] = auto.lengths([session])
        asked.append(length)
        auto.record_draft(session, length, min(length, 1))
    assert set(asked) == {1, PROBE_LENGTH}
    assert sum(costs.of_round(length) - costs.of_round(1) for length in asked) <= PROBE_BUDGET * 30


def loaded(seconds_by_positions: dict[int, float], draft: float = 1e-4) -> Costs:
    costs = Costs()
    for positions, seconds in seconds_by_positions.items():
        for _ in range(30):
            costs.update({"score": seconds, "draft": draft}, positions, 1)
    return costs


def test_lengths_shrink_as_the_pass_fills_up():
    """64 rows fill a pass: a further position costs as much as the first, and only sure tokens are worth it."""
    costs = loaded({1: 1.0, 8: 1.2, 64: 8.0, 128: 16.0})
    few = best_lengths([record_of(0.6, 0.6)], costs)
    many = best_lengths([record_of(0.6, 0.6)] * 64, costs)
    sure = best_lengths([record_of(0.95, 0.95)] * 4 + [record_of(0.1, 0.1)] * 60, costs)
    assert few[0] >= 2
    assert many == [0] * 64
    assert sure[4:] == [0] * 60


def test_a_row_that_is_sure_gets_the_tokens_that_others_would_waste():
    costs = loaded({1: 1.0, 4: 1.1, 16: 2.0, 32: 4.0})
    lengths = best_lengths([record_of(0.95, 0.95), record_of(0.3, 0.3)], costs)
    assert lengths[0] > lengths[1]


def test_costs_of_one_row_are_not_those_of_eight():
    """Drafts of one row cost little; those of eight widen a pass as much, and cost what was measured for eight."""
    auto = AutoLength()
    sessions = [Session.start(Request((1,), SamplingParams(), 90)) for _ in range(8)]

    def drafts():
        auto.records = {session.id: record_of(0.6, 0.6) for session in sessions}
        return sum(auto.lengths(sessions))

    for width in (1, 3, 9, 17, 9, 17, 1, 3):
        auto.record_time({"score": 1.0 + 0.01 * width, "draft": 0.01 * (width - 1)}, [width - 1])
    assert drafts() > 0
    for drafted in (0, 1, 2, 0, 1, 2, 0):
        auto.record_time({"score": 1.0 + 2.0 * drafted, "draft": 0.1 * drafted}, [drafted] * 8)
    assert drafts() <= PROBE_LENGTH


def test_probes_of_many_rows_cost_no_more_than_those_of_one():
    auto = AutoLength(measured_together={7: loaded({1: 1.0, 64: 8.0, 66: 8.25, 128: 16.0})})
    sessions = [Session.start(Request((1,), SamplingParams(seed=i), 90)) for i in range(64)]
    auto.records = {session.id: record_of(0.05, 0.0) for session in sessions}
    asked = []
    for _ in range(200):
        lengths = auto.lengths(sessions)
        for session, length in zip(sessions, lengths, strict=True):
            auto.record_draft(session, length, 0)
        asked.append(sum(lengths))
    extra = auto.costs(64).of_pass(66) / auto.costs(64).of_pass(64) - 1
    assert sum(asked) / PROBE_LENGTH * extra <= 1.5 * PROBE_BUDGET * 200
    assert sum(asked) > 0
