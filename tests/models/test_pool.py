"""A KV pool: rows keep their contents whatever happens to the others, and a budget says what fits into it."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from draftproof.core.sampling import SamplingParams
from draftproof.engine.engine import Engine
from draftproof.engine.limits import Limits
from draftproof.models.extents import PAGE
from draftproof.models.hf import HFModel
from draftproof.models.pool import KVPool, LayerShape, PoolFull, pages_within
from engine.tiny import PROMPT, llama

SHAPES = [LayerShape(2, 3, 4, torch.float32), LayerShape(1, 5, 5, torch.float64)]
CPU = torch.device("cpu")


def a_pool(pages=6):
    pool = KVPool(SHAPES, pages, CPU)
    for buffer in (*pool.keys, *pool.values):
        buffer.fill_(-1.0)
    return pool


def append(pool, row, numbers):
    """Write tokens at the end of a row; each is a number that fills its keys and values."""
    pool.ensure(row, pool.rows[row].length + len(numbers))
    here = pool.rows[row]
    at = here.extent.start + here.length
    for buffer in (*pool.keys, *pool.values):
        buffer[at : at + len(numbers)] = torch.tensor(list(numbers), dtype=buffer.dtype)[:, None, None]
    here.length += len(numbers)


def contents(pool, row):
    """Return the numbers of a row, and check that all layers agree on them."""
    here = pool.rows[row]
    held = slice(here.extent.start, here.extent.start + here.length)
    read = [buffer[held].flatten(1) for buffer in (*pool.keys, *pool.values)]
    numbers = read[0][:, 0].tolist()
    for each in read:
        assert bool((each == torch.tensor(numbers, dtype=each.dtype)[:, None]).all())
    return [int(number) for number in numbers]


def check_pages(pool):
    """Check that every page is free or owned by exactly one row."""
    owned = [page for row in pool.rows.values() for page in range(row.extent.first, row.extent.end)]
    free = [page for run in pool.extents.free for page in range(run.first, run.end)]
    assert sorted(owned + free) == list(range(pool.pages))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "append", "append", "truncate", "leave", "share", "save", "restore", "path", "trim"]),
        st.integers(0, 9),
        st.integers(0, 150),
    ),
    min_size=10,
    max_size=40,
)


def run_against_lists(pool, operations):
    """Apply operations to a pool and to lists of numbers; compare all rows after each. Return what was done."""
    texts, saved, counter, done = {}, {}, iter(range(1, 10**6)), set()
    for operation, which, n in operations:
        names = sorted(saved if operation == "restore" else texts)
        row = which if operation == "enter" else (names[which % len(names)] if names else None)
        try:
            if operation == "enter" and row not in texts and row not in saved:
                pool.enter(row, n + 1)
                texts[row] = []
            elif operation == "restore" and row is not None:
                copy, text = saved[row]
                pool.restore(row, copy)
                texts[row] = text
                del saved[row]
            elif row is None or operation in ("enter", "restore"):
                continue
            elif operation == "append":
                numbers = [next(counter) for _ in range(n)]
                append(pool, row, numbers)
                texts[row] = texts[row] + numbers
            elif operation == "truncate":
                texts[row] = texts[row][:n]
                pool.rows[row].length = len(texts[row])
            elif operation == "leave":
                pool.leave(row)
                del texts[row]
            elif operation == "share" and 20 not in texts:
                length = min(n, len(texts[row]))
                pool.enter(20, max(length, 1))
                pool.share(row, 20, length)
                texts[20] = texts[row][:length]
            elif operation == "save" and row != 20:
                saved[row] = pool.save(row), texts.pop(row)
            elif operation == "path":
                nodes = [next(counter) for _ in range(6)]
                append(pool, row, nodes)  # a root and five slots, of which 0, 2 and 3 are kept
                pool.rows[row].length -= 6
                pool.move_path(row, [0, 2, 3])
                pool.rows[row].length += 4
                texts[row] = [*texts[row], nodes[0], nodes[1], nodes[3], nodes[4]]
            elif operation == "trim":
                pool.trim(row)
                assert pool.rows[row].extent.pages == max(1, -(-len(texts[row]) // PAGE))
            done.add(operation)
        except PoolFull:
            done.add("full")
        check_pages(pool)
        assert {name: contents(pool, name) for name in pool.rows} == texts
    return done


@settings(max_examples=80)
@given(operations=OPERATIONS)
def test_rows_keep_their_contents(operations):
    run_against_lists(a_pool(), operations)


def test_the_random_operations_reach_everything():
    reached = set()

    @settings(max_examples=40, database=None)
    @given(operations=OPERATIONS)
    def collect(operations):
        reached.update(run_against_lists(a_pool(), operations))

    collect()
    assert reached >= {"enter", "append", "truncate", "leave", "share", "save", "restore", "path", "trim", "full"}


class ShortCopy(KVPool):
    """Loses the last token of a row that moves or is shared."""

    def _copy(self, source, target, length):
        super()._copy(source, target, max(0, length - 1))


class UnmovedPath(KVPool):
    """Leaves the kept slots of a tree where they are."""

    def move_path(self, row, kept):
        pass


class LongRestore(KVPool):
    """Restores a row with a token too many."""

    def restore(self, row, saved):
        super().restore(row, saved)
        self.rows[row].length += 1


@pytest.mark.parametrize("broken", [ShortCopy, UnmovedPath, LongRestore])
def test_a_broken_pool_is_found(broken):
    """A control: the comparison fails if it should."""

    @settings(max_examples=150, database=None, phases=[Phase.generate])
    @given(operations=OPERATIONS)
    def compared(operations):
        run_against_lists(broken(SHAPES, 6, CPU), operations)

    with pytest.raises(AssertionError):
        compared()


def test_buffers_never_move():
    pool = a_pool(16)
    before = [buffer.data_ptr() for buffer in (*pool.keys, *pool.values)]
    pool.enter(1, 10)
    append(pool, 1, range(70))
    pool.enter(2, 10)
    append(pool, 1, range(200))
    pool.restore(3, pool.save(1))
    pool.leave(2)
    assert [buffer.data_ptr() for buffer in (*pool.keys, *pool.values)] == before


def test_a_row_grows_in_place_where_it_can_and_has_room_for_twice_its_tokens_then():
    pool = a_pool(12)
    pool.enter(1, PAGE)
    append(pool, 1, range(PAGE))
    first = pool.rows[1].extent
    append(pool, 1, [7])
    assert (pool.rows[1].extent.first, pool.rows[1].extent.pages) == (first.first, 4)


def test_a_name_is_used_once_and_a_shared_prefix_must_be_there():
    pool = a_pool()
    pool.enter(1, 5)
    append(pool, 1, [1, 2, 3])
    with pytest.raises(ValueError, match="row 1 is in the pool already"):
        pool.enter(1, 5)
    pool.enter(2, 5)
    with pytest.raises(ValueError, match="row 2 takes 4 tokens of row 1, which holds 3"):
        pool.share(1, 2, 4)


def test_a_full_pool_says_so_and_stays_as_it_is():
    pool = a_pool(3)
    pool.enter(1, 2 * PAGE)
    append(pool, 1, [5, 6])
    with pytest.raises(PoolFull, match="no run of 2 free pages among 1 of 3"):
        pool.enter(2, PAGE + 1)
    with pytest.raises(PoolFull, match="row 1 needs 4 pages"):
        pool.ensure(1, 3 * PAGE + 1)
    assert contents(pool, 1) == [5, 6]
    check_pages(pool)


# ----------------------------------------------------------------------------------------------------- the budget


def engine_with(kv_memory, **options):
    return Engine(HFModel(llama(max_length=1024)), None, None, limits=Limits(kv_memory=kv_memory, **options))


BYTES = sum(shape.bytes for shape in HFModel(llama(max_length=1024)).kv_shapes())
"""Bytes of a token in the tiny model's pool."""


def test_a_budget_that_is_too_small_says_how_many_tokens_fit():
    with pytest.raises(ValueError, match=f"hold 10 tokens of {BYTES} bytes: a pool needs 64 tokens at least"):
        engine_with(10 * BYTES).generate(list(PROMPT), max_tokens=2)


def test_a_request_that_can_never_fit_fails_alone_and_says_what_does():
    engine = engine_with(2 * PAGE * BYTES)
    sampling = SamplingParams(seed=1)
    failed, right = engine.generate([list(PROMPT)] * 2, sampling, max_tokens=[119, 118])
    assert failed.finish_reason == "error"
    assert "may need 129 tokens in the KV pool, which holds 128: ask for fewer max_tokens" in failed.error
    assert (right.finish_reason, len(right.tokens)) == ("length", 118)


@pytest.mark.parametrize("pages", [1, 3, 20])
def test_a_pool_is_as_large_as_its_budget(pages):
    engine = engine_with(pages * PAGE * BYTES + PAGE * BYTES - 1)
    engine.generate(list(PROMPT), max_tokens=2)
    pool = engine._loop.scheduler.rows.pool
    assert pool.pages == pages
    assert sum(buffer.nbytes for buffer in (*pool.keys, *pool.values)) == pages * PAGE * BYTES


def test_a_pool_is_not_larger_than_its_rows_can_use():
    assert pages_within(10**12, BYTES, 4, 1024) == 2 * 4 * 16


@pytest.mark.parametrize("wrong", [0, -5, 1.5, 0.0, "1G", None])
def test_a_budget_that_is_none_is_refused(wrong):
    with pytest.raises((ValueError, TypeError), match="kv_memory"):
        Limits(kv_memory=wrong)
