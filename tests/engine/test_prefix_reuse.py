"""Prefix reuse: what was read once is not read again, and no text changes because of it."""

from dataclasses import replace

import pytest

from draftproof.core.sampling import SamplingParams
from draftproof.drafters.model import ModelDrafter
from draftproof.engine import prefix_cache, scheduler
from draftproof.engine.request import Request, Session
from draftproof.models import prompt_chunks
from draftproof.models.extents import PAGE
from draftproof.models.hf import HFModel
from draftproof.models.rows import PooledRows
from engine.many_texts import unchecked
from engine.schedules import BASES, open_engine, target
from engine.tiny import neighbour

KINDS = ["none", "ngram", "model", "head", "head-tree"]
SEEDED = SamplingParams(seed=3)
UNSEEDED = SamplingParams()
LONG = BASES[0][:140]
"""A prompt of two whole chunks and twelve tokens."""


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


@pytest.fixture
def read(monkeypatch):
    """Record the widths of all spans that the target computes."""
    widths = []
    real = type(target()).packed

    def packed(self, this, keys, values, *, scored, layers=()):
        if self is target():
            widths.extend(span.width for span in this.spans)
        return real(self, this, keys, values, scored=scored, layers=layers)

    monkeypatch.setattr(type(target()), "packed", packed)
    return widths


def run(engine, prompt, sampling, max_tokens=8, **options):
    return engine.generate(list(prompt), sampling, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_read_once(kind, read):
    engine = open_engine(kind)
    first = run(engine, LONG, SEEDED)
    assert first.stats.cached_tokens == 0
    assert sum(width for width in read if width > 8) == len(LONG) - 1
    read.clear()
    again = run(engine, LONG, SEEDED)
    assert again.stats.cached_tokens == 2 * PAGE
    assert sum(width for width in read if width > 8) == len(LONG) - 1 - 2 * PAGE
    assert again.tokens == first.tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [63, 64, 65, 66, 67, 128, 129, 130, 131, 199])
def test_texts_are_the_same_with_and_without_reuse(kind, shared):
    prompts = [BASES[0][:199], [*BASES[0][:shared], 1, 2], [*BASES[0][:shared], 7, 7, 7, 7]]

    def texts(reuse):
        engine = open_engine(kind)
        engine._loop.scheduler.prefixes.enabled = reuse
        outputs = [run(engine, prompt, replace(SEEDED, seed=i)) for i, prompt in enumerate(prompts)]
        return [output.tokens for output in outputs], [output.stats.cached_tokens for output in outputs]

    (with_reuse, cached), (without, nothing) = texts(True), texts(False)
    assert with_reuse == without
    assert nothing == [0, 0, 0]
    assert cached == [0, reusable(prompts, with_reuse, 1), reusable(prompts, with_reuse, 2)]


def reusable(prompts, answers, i):
    """Return how many tokens of prompt i earlier requests have read in whole chunks.

    A token after them must be the same, too, and the prompt's last two tokens are not taken over.
    """
    most = 0
    for prompt, answer in zip(prompts[:i], answers, strict=False):
        text, whole = [*prompt, *answer], (len(prompt) - 1) // PAGE * PAGE
        for n in range(PAGE, min(whole, len(prompts[i]) - 2) + 1, PAGE):
            if text[: n + 1] == prompts[i][: n + 1]:
                most = max(most, n)
    return most


def test_a_wrong_prefix_changes_the_text(monkeypatch):
    """A control: without the comparison of tokens the texts above differ."""
    monkeypatch.setattr(
        prefix_cache, "_shared_pages", lambda prompt, tokens: (min(len(prompt), len(tokens)) - 2) // PAGE * PAGE
    )
    engine, fresh = open_engine("none"), open_engine("none")
    run(engine, BASES[1][:140], SEEDED)
    assert run(engine, LONG, SEEDED, 30).tokens != run(fresh, LONG, SEEDED, 30).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_of_a_chat_reads_what_is_new(kind, read):
    engine = open_engine(kind)
    answer = run(engine, LONG, UNSEEDED, 70).tokens
    turn = [*LONG, *answer, 1, 2, 3]
    read.clear()
    output = run(engine, turn, UNSEEDED, 4)
    assert output.stats.cached_tokens == 3 * PAGE, "generated tokens too: 140 + 69 tokens are in the pool"
    assert sum(width for width in read if width > 8) == len(turn) - 1 - 3 * PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_request_takes_over_whole_chunks_of_prompts_only(kind):
    engine, fresh = open_engine(kind), open_engine(kind)
    answer = run(engine, LONG, UNSEEDED, 70).tokens
    turn = [*LONG, *answer, 1, 2, 3]
    output = run(engine, turn, SEEDED, 12)
    assert output.stats.cached_tokens == 2 * PAGE
    assert output.tokens == run(fresh, turn, SEEDED, 12).tokens


@pytest.mark.parametrize("kind", ["none", "head"])
def test_what_came_from_generated_tokens_is_not_passed_on_to_seeded_requests(kind):
    """The second turn holds generated tokens in what looks like its prompt; a seeded third one must not take them."""
    engine, fresh = open_engine(kind), open_engine(kind)
    answer = run(engine, LONG, UNSEEDED, 70).tokens
    turn = [*LONG, *answer, 1, 2, 3]
    assert run(engine, turn, UNSEEDED, 70).stats.cached_tokens == 3 * PAGE
    engine._loop.scheduler.prefixes.idle.move_to_end(next(iter(engine._loop.scheduler.prefixes.idle)), last=True)
    third = run(engine, turn, SEEDED, 12)
    assert third.stats.cached_tokens == 2 * PAGE
    assert third.tokens == run(fresh, turn, SEEDED, 12).tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [140, 129, 300])
def test_samples_of_one_prompt_read_their_prefix_once(kind, length, read):
    prompt = (BASES[0] + BASES[1])[:length]
    n, whole = 6, (length - 2) // PAGE * PAGE
    engine = open_engine(kind, max_batch=8)
    outputs = engine.generate([prompt] * n, [SamplingParams(seed=i) for i in range(n)], max_tokens=6)
    assert [output.stats.cached_tokens for output in outputs] == [0] + [whole] * (n - 1)
    tokens = sum(width for width in read if width == PAGE)
    assert tokens == (length - 1) // PAGE * PAGE + (n - 1) * ((length - 1 - whole) // PAGE * PAGE)
    for i, output in enumerate(outputs):
        assert output.tokens == run(open_engine(kind), prompt, SamplingParams(seed=i), 6).tokens


def test_samples_of_one_prompt_start_together():
    """What follows the shared prefix is read in one round for all of them: it is short."""
    engine = open_engine("none", max_batch=8)
    sessions = [engine.prepare(LONG[:131], SamplingParams(seed=i), max_tokens=20) for i in range(6)]
    engine._loop.submit(sessions)
    rounds = 0
    while any(not session.output for session in sessions):
        engine._loop.step()
        rounds += 1
    assert rounds <= 4


def test_a_draft_model_with_a_shorter_context_does_not_prevent_reuse():
    engine = open_engine("model", drafter=ModelDrafter(HFModel(neighbour(), drafter=True)))
    first = run(engine, LONG, SEEDED)
    again = run(engine, LONG, SEEDED)
    assert again.stats.cached_tokens == 2 * PAGE
    assert again.tokens == first.tokens


@pytest.mark.parametrize("kind", ["ngram", "model", "head"])
def test_a_request_without_a_drafter_reuses_prefixes(kind):
    engine = open_engine(kind)
    run(engine, LONG, SEEDED)
    output = run(engine, LONG, SEEDED, drafter=False)
    assert output.stats.cached_tokens == 2 * PAGE
    assert output.tokens == run(open_engine(kind), LONG, SEEDED, drafter=False).tokens


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_drafted_request_after_one_without_a_drafter(kind):
    """The drafter has not read the prefix of a request that it was not used for."""
    engine, fresh = open_engine(kind), open_engine(kind)
    run(engine, LONG, SEEDED, drafter=False)
    output = run(engine, LONG, SEEDED, 20)
    assert output.tokens == run(fresh, LONG, SEEDED, 20).tokens


def test_prompt_logprobs_are_computed_in_full():
    engine = open_engine("none")
    run(engine, LONG, SEEDED)
    output = run(engine, LONG, SEEDED, prompt_logprobs=True)
    assert output.stats.cached_tokens == 0
    assert len(output.prompt_logprobs) == len(LONG) - 1


def test_a_cancelled_prompt_stays_as_far_as_it_was_read():
    engine = open_engine("none")
    session = engine.prepare(BASES[0] + BASES[1], SEEDED, max_tokens=5)
    busy = engine.prepare([1], SamplingParams(seed=1), max_tokens=60)
    busy.listener = lambda *_: None  # somebody waits for its tokens
    engine._loop.submit([busy])
    engine._loop.step()
    engine._loop.submit([session])
    engine._loop.step()
    assert session.read == PAGE, "one chunk beside a row that decodes"
    engine._loop.step()
    engine._cancel([session, busy])
    assert run(engine, BASES[0] + BASES[1], SEEDED).stats.cached_tokens == PAGE


def test_the_least_recently_used_prefix_goes_first():
    engine = open_engine("none", pages=9)
    prompts = [[i, *BASES[i % 2][: 2 * PAGE + 2]] for i in range(3)]
    for prompt in prompts:
        run(engine, prompt, SEEDED, 1)  # three pages each
    assert run(engine, prompts[0], SEEDED, 1).stats.cached_tokens == 2 * PAGE, "needs room: the second goes"
    held = [prefix.tokens[0] for prefix in engine._loop.scheduler.prefixes.idle.values()]
    assert 1 not in held
    assert run(engine, prompts[0], SEEDED, 1).stats.cached_tokens == 2 * PAGE
    assert run(engine, prompts[1], SEEDED, 1).stats.cached_tokens == 0


def test_so_many_prefixes_are_kept_and_no_more(monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_IDLE", 3)
    engine = open_engine("model")
    for i in range(6):
        run(engine, [i, *LONG], SEEDED, 2)
    idle = engine._loop.scheduler.prefixes.idle
    assert [prefix.tokens[0] for prefix in idle.values()] == [3, 4, 5]
    assert len(engine._loop.scheduler.rows.pool.rows) == 3


def test_a_failed_request_leaves_no_prefix():
    engine = open_engine("none")

    def failing(output):
        raise KeyError("no such state")

    with pytest.raises(RuntimeError, match="its grammar failed"):
        run(engine, LONG, SEEDED, allowed=failing)
    assert not engine._loop.scheduler.prefixes.idle


def test_clearing_prefixes_empties_the_pools():
    engine = open_engine("head")
    run(engine, LONG, SEEDED)
    engine._loop.scheduler.clear_prefixes()
    assert not engine._loop.scheduler.rows.pool.rows
    assert not engine.drafter.inner._memory.pool.pool.rows
    assert run(engine, LONG, SEEDED).stats.cached_tokens == 0


# -------------------------------------------------------------------------------------------------- what is shared


def a_session(prompt, seeded=True):
    return Session.start(Request(tuple(prompt), SEEDED, 5, seeded=seeded))


@pytest.mark.parametrize(
    ("prompt", "held", "shared"),
    [
        (66, 66, 64),  # the token after the chunk is shared, and the prompt's last two are read
        (65, 66, 0),
        (66, 64, 0),
        (66, 65, 64),
        (130, 130, 128),
        (129, 199, 64),
        (64, 199, 0),
    ],
)
def test_whole_chunks_with_a_shared_token_after_them(prompt, held, shared):
    assert prefix_cache._shared_pages(BASES[0][:prompt], BASES[0][:held]) == shared


def test_a_chunk_whose_next_token_differs_is_not_shared():
    assert prefix_cache._shared_pages([*BASES[0][:64], 1, 1, 1], [*BASES[0][:64], 2, 1, 1]) == 0
    assert prefix_cache._shared_pages([*BASES[0][:128], 1, 1, 1], [*BASES[0][:128], 2, 1, 1]) == 64


def most_shared(session, other):
    return prefix_cache.PrefixCache().most_shared(session, [other], PooledRows.__new__(PooledRows))


def test_texts_that_share_nothing_share_nothing():
    assert most_shared(a_session(BASES[0]), a_session(BASES[1])) == 0
    assert most_shared(a_session(BASES[0]), a_session(BASES[0])) == 3 * PAGE


def test_seeded_requests_share_whole_chunks_and_others_whole_pages(monkeypatch):
    monkeypatch.setattr(prompt_chunks, "ATTENTION_DOUBLES", 44)
    assert most_shared(a_session(BASES[0]), a_session(BASES[0])) == prompt_chunks.chunk_around(3 * PAGE)[0] < 3 * PAGE
    assert most_shared(a_session(BASES[0], seeded=False), a_session(BASES[0])) == 3 * PAGE


@pytest.mark.parametrize("kind", ["none", "head"])
def test_the_rest_of_a_chunk_is_not_passed_on_to_seeded_requests_as_a_whole_one(kind, monkeypatch):
    """The second request begins within a chunk: what it reads up to the border is narrower than the chunk."""
    monkeypatch.setattr(prompt_chunks, "ATTENTION_DOUBLES", 48)
    border, _ = prompt_chunks.chunk_around(2 * PAGE)
    assert border < 2 * PAGE
    engine, fresh = open_engine(kind), open_engine(kind)
    second = [*BASES[0][:150], *BASES[1][:46]]
    run(engine, BASES[0][:196], UNSEEDED)
    assert run(engine, second, UNSEEDED).stats.cached_tokens == 2 * PAGE
    third = run(engine, second, SEEDED, 12)
    assert third.stats.cached_tokens == border
    assert third.tokens == run(fresh, second, SEEDED, 12).tokens
