"""A row that does not draft keeps few of the target's states, however long its text, and can draft later.

The limit is lowered to 16 states and those of the last pass, which stay with all its rows; without it each row would
keep those of its prompt and of every round. Drafters that make no mistakes (`perfect_drafters`) show that what was read
in the meantime is right.
"""

import pytest
import torch

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.drafters import dflash, head_reader, head_rectangular
from draftproof.drafters.head import HeadDrafter
from draftproof.engine.draft_length import DraftLengths
from engine.perfect_drafters import DOWN, UP, acceptance, continued, dflash_folder, eagle3_folder, target
from engine.tiny import llama
from engine.tiny_heads import on_target

MOST, UNLIMITED = 16, 10**9
PLAIN = 80
"""Tokens of output before the first draft."""


def limit(monkeypatch, most: int) -> None:
    for module in (head_reader, head_rectangular, dflash):
        monkeypatch.setattr(module, "MOST_UNREAD", most)
    monkeypatch.setattr(head_reader, "MOST_PARTS", 1)


def draft_late(monkeypatch) -> None:
    """Draft for no row before it has written `PLAIN` tokens, as "auto" may decide."""

    def choose(self, sessions):
        return [4 if len(s.tokens) - s.prompt_length >= PLAIN else 0 for s in sessions]

    monkeypatch.setattr(DraftLengths, "choose", choose)


def watch(monkeypatch, drafter) -> list[int]:
    """Return a list that gets the most states that wait in one row, by the memory they take, after every proposal."""
    most: list[int] = []
    propose = drafter.propose

    def watched(contexts, k, rng):
        draft = propose(contexts, k, rng)
        memory = drafter._memory
        rows = list(memory.rows.values()) if hasattr(memory, "rows") else memory._rows
        chunks = [[part for chunk in row.chunks for part in chunk.states] for row in rows]
        stored = [[*chunk, *row.waiting] for row, chunk in zip(rows, chunks, strict=True)]
        most.append(max(sum(_states_held(part[0]) for part in parts) for parts in stored))
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    return most


def _states_held(states: torch.Tensor) -> int:
    """Return how many states the memory holds that a tensor of states is in."""
    return states.untyped_storage().nbytes() // (states.element_size() * states.shape[1])


@pytest.mark.parametrize("folder", [eagle3_folder, dflash_folder])
def test_states_of_a_published_drafter_are_read_before_they_are_too_many(folder, tmp_path, monkeypatch):
    prompts = [[UP], [DOWN, *[4] * 30, 2, 1, 0]]
    draft_late(monkeypatch)
    for most in (MOST, UNLIMITED):
        limit(monkeypatch, most)
        engine = dp.load(target(), folder(tmp_path / str(most), "speculators"))
        waiting = watch(monkeypatch, engine.drafter)
        outputs = engine.generate(prompts, temperature=0, max_tokens=PLAIN + 12)
        assert [output.tokens for output in outputs] == [continued(prompt, PLAIN + 12) for prompt in prompts]
        assert acceptance(outputs) > 0.99
        assert sum(output.stats.drafted for output in outputs) > 16
        largest_pass = len(prompts[1]) + 1
        assert max(waiting) <= MOST + largest_pass if most == MOST else max(waiting) > PLAIN


def texts(monkeypatch, most: int) -> tuple[list[list[int]], int, int]:
    """Return seeded texts of a head trained here, how many tokens were drafted, and the most states that waited."""
    limit(monkeypatch, most)
    draft_late(monkeypatch)
    engine = dp.load(llama(max_length=256), HeadDrafter(on_target()), kv_memory=2**22)
    waiting = watch(monkeypatch, engine.drafter)
    prompts = [[1, 2, 3], [n % 8 for n in range(90)], [5, 6, 7, 0] * 10, [1, 2, 3, 4] * 4 + [5]]
    params = [SamplingParams(temperature=t, seed=n) for n, t in enumerate((0.8, 1.0, 0.0, 0.9))]
    outputs = engine.generate(prompts, params, max_tokens=PLAIN + 24)
    return [output.tokens for output in outputs], sum(output.stats.drafted for output in outputs), max(waiting)


def test_seeded_texts_do_not_depend_on_when_states_are_read(monkeypatch):
    wanted, drafted, unlimited = texts(monkeypatch, UNLIMITED)
    made, _, limited = texts(monkeypatch, MOST)
    assert made == wanted
    assert drafted > 40
    largest_pass = 64 + 3
    assert limited <= MOST + largest_pass < PLAIN + 80 < unlimited


def test_states_are_taken_only_in_passes_of_rows_that_may_be_drafted_for(monkeypatch):
    """A request without a drafter, alone, asks the target for none; beside one that drafts, the pass gives them."""
    engine = dp.load(llama(), HeadDrafter(on_target()), max_batch=2)
    rows = engine._loop.scheduler.rows
    score, asked = rows.score, []

    def watched(blocks, *, layers=(), reading=()):
        asked.append(tuple(layers))
        return score(blocks, layers=layers, reading=reading)

    monkeypatch.setattr(rows, "score", watched)
    engine.generate([1, 2, 3], temperature=0, max_tokens=4, drafter=False)
    assert set(asked) == {()}
    asked.clear()
    engine.generate([1, 2, 3], temperature=0, max_tokens=4)
    assert set(asked) == {engine.drafter.features.layers}
