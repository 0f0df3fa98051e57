"""Random schedules: every seeded text is the same as alone, no page is lost or owned twice, and every request ends.

Requests come, are cancelled, preempted, reuse prefixes and fail, over a pool that is too small for all of them.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from draftproof.core.sampling import SamplingParams
from draftproof.engine import prefix_cache, scheduler
from draftproof.engine.draft_length import AutoLength
from draftproof.models import prompt_chunks
from draftproof.models.pool import KVPool
from draftproof.models.rows import PooledRows
from engine.many_texts import unchecked
from engine.schedules import DRAFTERS, SAMPLINGS, Schedule, Wanted, open_engine, operations, requests

PAGES = 6
"""Pages of the pool: the longest request takes five."""

_LONG = Wanted(base=0, shared=131, tail=(1,), max_tokens=12, sampling=0, seed=1)
ALL_AT_ONCE = [
    ("submit", _LONG),
    ("step", 12),
    ("submit", replace(_LONG, seed=2)),
    ("submit", replace(_LONG, shared=5, max_tokens=90)),
    ("submit", replace(_LONG, shared=66, seed=None, fault="grammar")),
    ("step", 3),
    ("cancel", 2),
]
"""A prefix that is reused, a request that is cancelled, and one that fails: what eight random schedules may miss."""


@pytest.fixture(autouse=True)
def rows_that_grow(monkeypatch):
    """Let rows enter with little room, so that they must grow, and be preempted for it."""
    monkeypatch.setattr(scheduler, "RESERVED", 8)


@pytest.fixture(autouse=True)
def chunks_of_all_sizes(monkeypatch):
    """Read short prompts in chunks that become smaller, as long ones are."""
    monkeypatch.setattr(prompt_chunks, "ATTENTION_DOUBLES", 48)
    assert len({prompt_chunks.chunk_size(start) for start in (0, 64, 96, 200)}) == 4


def run_schedules(kind, examples, seen, pages=PAGES, *, crowds=False):
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    @settings(max_examples=examples, database=None, suppress_health_check=quiet)
    @given(schedule=operations(kind, crowds=crowds))
    @example(schedule=ALL_AT_ONCE)
    def every(schedule):
        with unchecked():
            run = Schedule(open_engine(kind, pages=pages), seen).run(schedule)
            run.finish()
            run.check_texts(kind)

    every()


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_seeded_text_is_the_same_as_alone(kind):
    seen = Counter()
    run_schedules(kind, 8, seen)
    assert seen["compared"] >= 8
    assert seen["cached"] > 0
    assert seen["error"] > 0
    assert seen["cancelled"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("pages", [5, 8, 16])
def test_many_schedules(kind, pages):
    seen = Counter()
    run_schedules(kind, 100, seen, pages, crowds=True)
    assert seen["compared with a reused prefix"] > 0
    assert seen["compared after preemption"] > 0 or pages > 8


# ----------------------------------------------------------------------------------------------------- fixed schedules


def crowd(n, **options):
    """Return n seeded requests that do not fit into the pool together."""
    common = {"base": 0, "shared": 100, "max_tokens": 60, "sampling": 0} | options
    return [Wanted(**common, tail=(i % 8, 1), seed=i) for i in range(n)]


def run_crowd(kind, wanted, pages=PAGES):
    with unchecked():
        schedule = Schedule(open_engine(kind, pages=pages))
        for i, each in enumerate(wanted):
            schedule.submit(each)
            if i % 3 == 2:
                schedule.step()
        schedule.finish()
        schedule.check_texts(kind)
    return schedule.seen


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("length", ["auto", 3])
def test_preempted_rows_go_on_as_if_nothing_had_happened(kind, length):
    seen = run_crowd(kind, crowd(5, num_draft_tokens=length))
    assert seen["compared after preemption"] > 0
    assert seen["compared"] == 5


@pytest.mark.parametrize("kind", DRAFTERS)
def test_preempted_while_its_prompt_is_read(kind):
    """A prompt of three chunks is read beside rows that grow."""
    wanted = [*crowd(2, max_tokens=90), Wanted(1, 190, (3,), 12, 0, 5), Wanted(1, 190, (4,), 12, 0, 6)]
    assert run_crowd(kind, wanted, 7)["compared"] == 4


def test_a_row_comes_back_when_it_has_room_to_grow(monkeypatch):
    """Four texts of 400 tokens in a pool of 640: a row that came back without room would soon be preempted again."""
    monkeypatch.setattr(scheduler, "RESERVED", 128)

    def run():
        prompts, sampling = [[1, 2, 3 + i] for i in range(4)], SamplingParams(temperature=1.0, seed=1)
        with unchecked():
            outputs = open_engine("none", pages=10).generate(prompts, sampling, max_tokens=400)
        return [output.tokens for output in outputs], sum(output.stats.preemptions for output in outputs)

    texts, preemptions = run()
    monkeypatch.setattr(
        scheduler.Scheduler, "_may_stay", lambda self, tokens: True
    )  # the control: it comes back at once
    others, more = run()
    assert texts == others
    assert 0 < preemptions < more


def wrong_length_after_restore(monkeypatch):
    real = KVPool.restore

    def restore(self, row, saved):
        real(self, row, saved)
        self.rows[row].length = max(0, saved.length - 1)

    monkeypatch.setattr(KVPool, "restore", restore)


def shares_from_a_wrong_row(monkeypatch):
    real = KVPool.share

    def share(self, source, row, length):
        others = [name for name, other in self.rows.items() if other.length >= length and name not in (source, row)]
        real(self, others[0] if others else source, row, length)

    monkeypatch.setattr(KVPool, "share", share)


def matches_prefixes_by_length_alone(monkeypatch):
    monkeypatch.setattr(
        prefix_cache, "_shared_pages", lambda prompt, tokens: max(0, min(len(prompt) - 2, len(tokens) - 1)) // 64 * 64
    )


def restores_other_numbers(monkeypatch):
    real = KVPool.save

    def save(self, row):
        saved = real(self, row)
        for values in saved.values:
            values[saved.length // 2 :] = 0
        return saved

    monkeypatch.setattr(KVPool, "save", save)


def leaks_pages(monkeypatch):
    monkeypatch.setattr(KVPool, "leave", lambda self, row: self.rows.pop(row))


def frees_pages_of_a_row_that_stays(monkeypatch):
    real = PooledRows.ensure

    def ensure(self, row, tokens):
        before = self.pool.rows[row].extent
        real(self, row, tokens)
        if self.pool.rows[row].extent != before and self.pool.rows[row].extent.first == before.first:
            self.pool.extents.give(before)

    monkeypatch.setattr(PooledRows, "ensure", ensure)


def forgets_drafts_of_preempted_rows(monkeypatch):
    real = AutoLength.lengths

    def lengths(self, sessions, rows=None):
        present = {session.id for session in sessions}
        self.records = {name: record for name, record in self.records.items() if name in present}
        return real(self, sessions, rows)

    monkeypatch.setattr(AutoLength, "lengths", lengths)


def never_admits(monkeypatch):
    monkeypatch.setattr(scheduler.Scheduler, "_enter", lambda self, session, parts: False)
    monkeypatch.setattr("engine.schedules.MAX_STEPS", 50)


@pytest.mark.parametrize(
    ("broken", "kind", "length"),
    [
        (wrong_length_after_restore, "none", 3),
        (wrong_length_after_restore, "model", 3),
        (restores_other_numbers, "none", 3),
        (shares_from_a_wrong_row, "none", 3),
        (matches_prefixes_by_length_alone, "none", 3),
        (leaks_pages, "ngram", 3),
        (frees_pages_of_a_row_that_stays, "none", 3),
        (forgets_drafts_of_preempted_rows, "model", "auto"),
        (never_admits, "none", 3),
    ],
)
def test_a_broken_scheduler_is_found(broken, kind, length, monkeypatch):
    """Controls: the same checks fail for a scheduler with one defect."""
    broken(monkeypatch)
    wanted = [*crowd(4, num_draft_tokens=length), *crowd(3, base=1, num_draft_tokens=length)]
    with pytest.raises((AssertionError, ValueError)):
        run_crowd(kind, [wanted[i] for i in (0, 4, 1, 5, 2, 6, 3)])


@pytest.mark.parametrize("kind", ["none", "model"])
def test_the_schedule_of_the_controls_passes(kind):
    wanted = [*crowd(4), *crowd(3, base=1)]
    seen = run_crowd(kind, [wanted[i] for i in (0, 4, 1, 5, 2, 6, 3)])
    assert seen["compared"] == 7
    assert seen["preempted"] > 0
    assert seen["cached"] > 0


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("fault", ["grammar", "scores", "drafter", "prompt"])
def test_a_fault_stays_with_its_request(kind, fault):
    if (fault == "drafter" and kind == "none") or (fault == "prompt" and kind in ("none", "ngram")):
        pytest.skip("there is no such fault")
    wanted = crowd(4, max_tokens=12)
    wanted[1] = replace(wanted[1], fault=fault)
    seen = run_crowd(kind, wanted, 40)
    assert seen[f"fault: {fault}"] == 1
    assert seen["compared"] == 3


def failing_rule(*args, **kwargs):
    raise ArithmeticError("this rule does not work")


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_rule_that_raises_fails_its_request_alone(kind):
    engine = open_engine(kind)
    wanted = crowd(3, max_tokens=8)
    sessions = [each.prepare(engine) for each in wanted]
    bad = engine.prepare(wanted[0].prompt, SAMPLINGS[0], max_tokens=8, rule=failing_rule)
    engine._run([*sessions[:2], bad, sessions[2]], lambda: True)
    assert bad.finish_reason == "error"
    assert "this rule does not work" in bad.error
    assert [session.finish_reason for session in sessions] == ["length"] * 3


def test_a_chain_rule_for_a_tree_fails_its_request_alone():
    engine = open_engine("head-tree")
    wanted = crowd(2, max_tokens=8)
    good, bad = wanted[0].prepare(engine), replace(wanted[1], rule="block").prepare(engine)
    engine._run([good, bad], lambda: True)
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert 'use rule="tree"' in bad.error


# -------------------------------------------------------------------------------------------------------- the drafter


def test_idle_prefixes_do_not_take_the_drafters_room():
    """A drafter's rows reserve more than the target's; idle ones must not keep later requests from drafts."""
    seen = run_crowd("model", [Wanted(i % 2, 64 + i, (i % 8, 2), 6, 0, i) for i in range(24)], 24)
    assert seen["compared"] == 24


@settings(max_examples=3, database=None)
@given(wanted=st.lists(requests("none"), min_size=5, max_size=5))
def test_first_come_first_served(wanted):
    """Requests enter the pool in the order of their submission."""
    with unchecked():
        schedule = Schedule(open_engine("none", pages=PAGES, max_batch=2))
        sessions = [schedule.submit(replace(each, fault=None)) for each in wanted]
        entered = []
        while not schedule.engine._loop.is_idle:
            schedule.step()
            present = {s.id for s in (*schedule.scheduler.running, *schedule.scheduler.reading)}
            ended = {s.id for s in sessions if s.finish_reason is not None}
            for session in sessions:
                if session.id in present | ended and session.id not in entered:
                    entered.append(session.id)
        assert entered == [session.id for session in sessions]
