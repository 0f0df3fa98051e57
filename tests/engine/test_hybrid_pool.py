"""Keys and values of hybrid models in the pool: they stay in place as rows come and go, and no page is lost.

Seeded texts are compared with themselves alone. Bits depend on the batch, because mixers compute rectangles: the tokens
are the same but for near-ties, of which these schedules have none.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import draftproof as dp
from draftproof.engine import scheduler
from draftproof.models import hybrid as hybrids
from draftproof.models.extents import PAGE
from draftproof.models.hybrid import HybridModel
from draftproof.models.hybrid_rows import HybridRows, PooledHybridRows
from draftproof.models.loading import as_model
from draftproof.models.pool import PoolFull
from draftproof.models.rows import Block, Reading, RectangularRows, open_rows
from engine.many_texts import unchecked
from engine.schedules import Schedule, Wanted, hybrid_target, open_engine, operations
from models.hybrid_families import QUICK, V, hybrid
from models.mtp_checkpoints import write

TOLERANCE = 1e-3
"""Largest difference of logits, in standard deviations."""


def text(n, seed=0):
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def open_pool(name, texts, pages=12):
    """Return rows that have read these texts."""
    rows = open_rows(as_model(hybrid(name)), pages)
    assert isinstance(rows, PooledHybridRows)
    read(rows, dict(enumerate(texts)))
    return rows


def read(rows, texts):
    for row, tokens in texts.items():
        rows.enter(row, len(tokens) + 8)
    rows.score([], reading=[Reading(row, tokens) for row, tokens in texts.items()])


def off(name, rows, texts):
    """Score three tokens after each text, and keep one; return the largest difference to plain forwards."""
    tokens = torch.tensor([text(3, seed=5)] * len(texts))
    [[group]] = rows.score([Block(list(texts), tokens, [3] * len(texts))]).groups
    worst = 0.0
    for b, (row, before) in enumerate(texts.items()):
        with torch.no_grad():
            plain = hybrid(name)(torch.tensor([[*before, *tokens[b].tolist()]]), use_cache=False).logits[0, -3:]
        worst = max(worst, float((group.forward.logits[b] - plain).abs().max() / plain.std()))
        rows.keep([row], [1])
        before.append(int(tokens[b, 0]))
    return worst


def held(rows, row):
    """Return copies of a row's keys and values."""
    here = rows.pool.rows[row]
    at = slice(here.extent.start, here.extent.start + here.length)
    return [buffer[at].clone() for buffer in (*rows.pool.keys, *rows.pool.values)]


def addresses(rows):
    return [buffer.data_ptr() for buffer in (*rows.pool.keys, *rows.pool.values)]


@pytest.mark.parametrize("name", QUICK)
def test_entering_and_leaving_copies_no_keys_and_values(name):
    texts = {row: text(40 + 9 * row, seed=row) for row in range(3)}
    rows = open_pool(name, texts.values())
    buffers, before = addresses(rows), {row: held(rows, row) for row in (0, 2)}
    places = {row: rows.pool.rows[row].extent for row in (0, 2)}
    rows.leave(1)
    texts = {0: texts[0], 2: texts[2], 3: text(20, seed=3)}
    read(rows, {3: texts[3]})
    assert addresses(rows) == buffers
    for row in (0, 2):
        assert rows.pool.rows[row].extent == places[row]
        assert all(torch.equal(one, other) for one, other in zip(held(rows, row), before[row], strict=True))
    assert off(name, rows, texts) < TOLERANCE
    assert off(name, rows, texts) < TOLERANCE, "after a rejection"


@pytest.mark.parametrize("name", QUICK)
def test_a_row_that_was_saved_comes_back_as_it_was(name):
    texts = {row: text(40 + 9 * row, seed=row) for row in range(3)}
    rows = open_pool(name, texts.values(), pages=4)
    assert off(name, rows, texts) < TOLERANCE
    before = held(rows, 1)
    saved = rows.save(1)
    read(rows, {7: text(50)})
    with pytest.raises(PoolFull):
        rows.restore(1, saved)
    assert off(name, rows, {0: texts[0], 2: texts[2], 7: text(50)}) < TOLERANCE
    rows.leave(7)
    rows.restore(1, saved)
    assert all(torch.equal(one, other) for one, other in zip(held(rows, 1), before, strict=True))
    assert off(name, rows, {0: texts[0], 2: texts[2], 1: texts[1]}) < TOLERANCE


def test_a_row_is_shortened_within_the_last_pass():
    rows = open_pool("lfm2", [text(30), text(20, seed=1)])
    tokens = text(4, seed=5)
    rows.score([Block([0, 1], torch.tensor([tokens] * 2), [4, 4])])
    rows.keep([0, 1], [4, 3])
    rows.truncate([0], [31])
    assert off("lfm2", rows, {0: [*text(30), *tokens[:1]], 1: [*text(20, seed=1), *tokens[:3]]}) < TOLERANCE
    with pytest.raises(ValueError, match="holds 32 tokens and cannot be shortened to 40"):
        rows.truncate([0], [40])
    with pytest.raises(ValueError, match="hold 31 tokens, and only tokens of the last pass can be taken back"):
        rows.truncate([0], [12])


def test_rectangular_rows_can_be_saved_too():
    rows = HybridRows(as_model(hybrid("lfm2")))
    texts = {0: text(5), 1: text(9, seed=1)}
    read(rows, texts)
    rows.restore(0, rows.save(0))
    assert off("lfm2", rows, {1: texts[1], 0: texts[0]}) < TOLERANCE
    rows.restore(1, rows.save(1))
    assert off("lfm2", rows, texts) < TOLERANCE


@pytest.mark.parametrize("name", QUICK)
def test_padding_past_the_room_of_a_row_writes_nothing(name):
    """A row in the middle of the pool has room for two tokens, and the pass is six tokens wide."""
    texts = {0: text(50), 1: text(PAGE - 2, seed=1), 2: text(30, seed=2)}
    rows = open_rows(as_model(hybrid(name)), 3)
    for row in texts:
        rows.enter(row, PAGE)
    rows.score([], reading=[Reading(row, tokens) for row, tokens in texts.items()])
    before = held(rows, 2)
    tokens = torch.tensor([text(6, seed=5)] * 3)
    [[group]] = rows.score([Block([0, 1, 2], tokens, [6, 2, 6])]).groups
    assert all(torch.equal(one, other) for one, other in zip(held(rows, 2), before, strict=True))
    for row, width in enumerate([6, 2, 6]):
        with torch.no_grad():
            plain = hybrid(name)(torch.tensor([texts[row] + tokens[row].tolist()]), use_cache=False).logits[0, -6:]
        assert (group.forward.logits[row] - plain)[:width].abs().max() < TOLERANCE * plain.std()
    with pytest.raises(ValueError, match="the room of each row: one holds 62 of 64"):
        rows.keep([1], [3])
    rows.keep([1, 0], [2, 3])
    rows.leave(2)
    rows.leave(0)
    rows.ensure(1, PAGE + 10)
    assert off(name, rows, {1: texts[1] + tokens[1, :2].tolist()}) < TOLERANCE


def bytes_of(pages, model=None):
    """Return the memory of a pool, if the drafter has none."""
    shapes = (hybrid_target() if model is None else as_model(model)).kv_shapes()
    return pages * PAGE * sum(shape.bytes for shape in shapes)


def test_a_pool_that_is_too_small_for_a_request_says_so():
    engine = dp.load(hybrid("lfm2"), None, kv_memory=bytes_of(2), max_batch=2)
    with pytest.raises(
        RuntimeError, match=r"may need 140 tokens in the KV pool, which holds 128: .* a larger kv_memory"
    ):
        engine.generate(text(100), max_tokens=40)
    assert len(engine.generate(text(100), temperature=0, max_tokens=28).tokens) == 28


def test_a_pool_without_a_page_says_so():
    with pytest.raises(ValueError, match=r"kv_memory=100 is 100 bytes.*a pool needs 64 tokens at least"):
        dp.load(hybrid("lfm2"), None, kv_memory=100).generate([1, 2], max_tokens=2)


def test_a_service_knows_the_pool():
    with dp.load(hybrid("lfm2"), None, kv_memory=bytes_of(3), max_batch=2).service() as service:
        stream = service.submit(text(30), max_tokens=90, temperature=0)
        usage = max(service.kv_usage for _ in stream)
        assert usage == pytest.approx(2 / 3)
        assert service.kv_usage == 0, "no prefix stays"
        assert service.max_length == 3 * PAGE


# ----------------------------------------------------------------------------------------------------------- schedules


@pytest.fixture
def rows_that_grow(monkeypatch):
    """Let rows enter with little room, so that they must grow, and be preempted for it."""
    monkeypatch.setattr(scheduler, "RESERVED", 8)


def run_crowd(wanted, pages):
    with unchecked():
        schedule = Schedule(open_engine("hybrid", pages=pages))
        for i, each in enumerate(wanted):
            schedule.submit(each)
            if i % 3 == 2:
                schedule.step()
        schedule.finish()
        schedule.check_texts("hybrid")
    return schedule.seen


def crowd(n, **options):
    """Return n seeded requests that do not fit into a pool of six pages together."""
    common = {"base": 0, "shared": 100, "max_tokens": 60, "sampling": 0} | options
    return [Wanted(**common, tail=(i % 8, 1), seed=i) for i in range(n)]


@pytest.mark.usefixtures("rows_that_grow")
@pytest.mark.parametrize("length", ["auto", 3])
def test_preempted_rows_go_on_as_if_nothing_had_happened(length):
    seen = run_crowd(crowd(5, num_draft_tokens=length), 6)
    assert seen["compared after preemption"] > 0
    assert seen["compared"] == 5
    assert seen["cached"] == 0


@pytest.mark.usefixtures("rows_that_grow")
def test_states_that_are_not_saved_are_found(monkeypatch):
    """The control: a row comes back with the states of a new one."""
    real = RectangularRows.restore

    def restore(self, row, saved):
        real(self, row, self._model.empty_cache(saved.slots, 1))

    monkeypatch.setattr(RectangularRows, "restore", restore)
    with pytest.raises(AssertionError, match="differs from itself alone"):
        run_crowd(crowd(5), 6)


@pytest.mark.usefixtures("rows_that_grow")
def test_preempted_rows_draft_on_with_the_targets_own_mtp_layer(tmp_path):
    model = write(tmp_path / "target", "qwen3_5_text")
    model.config.max_position_embeddings = 256  # more than a page
    limited = dp.load(model, "mtp", num_draft_tokens=2, max_batch=3, kv_memory=bytes_of(4, model))
    prompts = [text(20, seed=seed) for seed in range(3)]
    plain = dp.load(model, None).generate(prompts, temperature=0, max_tokens=80)
    outputs = limited.generate(prompts, temperature=0, max_tokens=80)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(output.stats.preemptions for output in outputs) > 0


@pytest.mark.parametrize("fault", ["grammar", "scores", "drafter"])
def test_a_fault_stays_with_its_request(fault):
    wanted = crowd(4, max_tokens=12)
    wanted[1] = replace(wanted[1], fault=fault)
    seen = run_crowd(wanted, 40)
    assert seen[f"fault: {fault}"] == 1
    assert seen["compared"] == 3


@pytest.mark.usefixtures("rows_that_grow")
@pytest.mark.parametrize("pages", [6, pytest.param(12, marks=pytest.mark.slow)])
def test_every_seeded_text_of_a_random_schedule_is_the_same_as_alone(pages):
    seen = Counter()

    @settings(max_examples=3, database=None, suppress_health_check=list(HealthCheck))
    @given(schedule=operations("hybrid", crowds=True))
    def every(schedule):
        with unchecked():
            run = Schedule(open_engine("hybrid", pages=pages), seen).run(schedule)
            run.finish()
            run.check_texts("hybrid")

    every()
    assert seen["compared after preemption"] > 0
    assert seen["cancelled"] > 0


# ---------------------------------------------------------------------------------------- models that do not use a pool


def test_a_model_whose_attention_is_its_own_is_served_from_a_slot_cache(monkeypatch):
    model = hybrid("qwen3_5_text")
    right = dp.load(model, "ngram").generate([1, 2, 3, 1, 2], temperature=0, max_tokens=12).tokens
    monkeypatch.setattr(hybrids, "ATTENTION_NAME", "sdpa")  # as if the layers did not look it up
    served = HybridModel(model)
    assert served.pool_refusal == "of 1 layers with keys and values, 0 use transformers' attention interface"
    assert type(open_rows(served, 4)) is HybridRows
    assert dp.load(served, "ngram").generate([1, 2, 3, 1, 2], temperature=0, max_tokens=12).tokens == right


def test_a_model_without_attention_needs_no_pool():
    served = as_model(hybrid("mamba2"))
    assert served.pool_refusal == "the model has no attention layers"
    assert type(open_rows(served, 4)) is HybridRows
