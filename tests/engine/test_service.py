"""The service: threads and coroutines share one engine, every stream is its own, and nobody waits for ever."""

import asyncio
import contextlib
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from draftproof.core.sampling import SamplingParams
from draftproof.engine.request import Session
from draftproof.engine.service import QueueFullError, Service, ServiceClosedError, end_openmp_threads
from engine.many_texts import unchecked
from engine.schedules import BASES, RaisingDrafter, failing_grammar, open_engine
from engine.tiny import PROMPT

S = SamplingParams
WAIT = 60
"""Seconds after which a thread that should have ended counts as hanging."""

KINDS = ["none", "ngram", "model", "head"]
PROMPTS = [list(PROMPT), [3, 4], BASES[0][:150], BASES[0][:100], [1], BASES[1][:70]]


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


def alone(kind, i, **options):
    return open_engine(kind).generate(PROMPTS[i % 6], S(seed=i), max_tokens=15, **options).tokens


def in_thread(call):
    """Run a call in a thread; fail if it does not return."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        return future.result(WAIT)


# --------------------------------------------------------------------------------------------- threads and coroutines


@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_their_own_texts(kind):
    expected = [alone(kind, i) for i in range(8)]
    start = threading.Barrier(8)
    with open_engine(kind).service() as service, ThreadPoolExecutor(8) as pool:

        def one(i):
            start.wait()
            stream = service.submit(PROMPTS[i % 6], S(seed=i), max_tokens=15)
            return [token for chunk in stream for token in chunk.tokens] if i % 2 else stream.result().tokens

        assert list(pool.map(one, range(8), timeout=WAIT)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_coroutines_get_their_own_texts(kind):
    expected = [alone(kind, i) for i in range(6)]

    async def one(service, i):
        stream = service.submit(PROMPTS[i % 6], S(seed=i), max_tokens=15)
        if i % 2:
            return (await stream.aresult()).tokens
        return [token async for chunk in stream for token in chunk.tokens]

    async def every():
        service = open_engine(kind).service()
        try:
            return await asyncio.wait_for(asyncio.gather(*(one(service, i) for i in range(6))), WAIT)
        finally:
            await service.aclose()

    assert asyncio.run(every()) == expected


def test_a_round_wakes_an_event_loop_once():
    """Not once for every text: waking takes longer than what a fast model leaves between two rounds."""
    engine, wakes = open_engine("none", max_batch=8), []

    async def read(service, i):
        stream = service.submit(PROMPTS[1], S(seed=i), max_tokens=20)
        return sum([len(chunk.tokens) async for chunk in stream])

    async def every():
        loop = asyncio.get_running_loop()
        real = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda call, *given: wakes.append(call) or real(call, *given)
        async with contextlib.aclosing(engine.service()) as service:
            before = engine._loop.rounds
            texts = await asyncio.wait_for(asyncio.gather(*(read(service, i) for i in range(8))), WAIT)
            return texts, engine._loop.rounds - before, len(wakes)

    texts, rounds, woken = asyncio.run(every())
    assert texts == [20] * 8
    assert 0 < woken <= rounds + 1  # a round counts after its chunks were delivered


def test_who_iterates_again_gets_nothing_and_does_not_wait():
    with open_engine("none").service() as service:
        stream = service.submit(PROMPTS[1], S(seed=0), max_tokens=3)
        assert sum(len(chunk.tokens) for chunk in stream) == 3
        assert in_thread(lambda: list(stream)) == []

        async def again():
            return [chunk async for chunk in stream]

        assert in_thread(lambda: asyncio.run(again())) == []


def test_the_last_chunk_has_the_reason_and_comes_once():
    with open_engine("model").service() as service:
        chunks = list(service.submit(list(PROMPT), S(seed=1), max_tokens=15))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].stats.emitted == 15


def test_a_request_of_no_tokens_ends_at_once():
    with open_engine("none").service() as service:
        stream = service.submit(list(PROMPT), max_tokens=0)
        assert in_thread(stream.result).tokens == []
        assert list(stream) == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_streams_of_an_engine_interleave(kind):
    engine = open_engine(kind)
    streams = [engine.stream(PROMPTS[i], S(seed=i), max_tokens=15) for i in range(2)]
    texts = [[], []]
    while any(streams):
        for i, stream in enumerate(streams):
            chunk = None if stream is None else next(stream, None)
            if chunk is None:
                streams[i] = None
            else:
                texts[i] += chunk.tokens
    assert texts == [alone(kind, i) for i in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_generate_and_stream_beside_a_service(kind):
    engine = open_engine(kind)
    with engine.service() as service, ThreadPoolExecutor(3) as pool:
        served = service.submit(PROMPTS[0], S(seed=0), max_tokens=15)
        generated = pool.submit(lambda: engine.generate(PROMPTS[1], S(seed=1), max_tokens=15).tokens)
        streamed = pool.submit(
            lambda: [t for chunk in engine.stream(PROMPTS[2], S(seed=2), max_tokens=15) for t in chunk.tokens]
        )
        assert [served.result().tokens, generated.result(WAIT), streamed.result(WAIT)] == [
            alone(kind, i) for i in range(3)
        ]


# -------------------------------------------------------------------------------------------- the end of a text, once


def between_the_reason_and_the_last_chunk(monkeypatch, act):
    """Call `act` when a text has its finish reason and its last chunk has not been handed over yet."""
    real = Session.notify

    def notify(self, tokens):
        if self.finish_reason is not None:
            act(self)
        real(self, tokens)

    monkeypatch.setattr(Session, "notify", notify)


def test_no_chunk_is_lost_while_the_text_ends(monkeypatch):
    """A reader that looks just then must wait for the last chunk."""
    seen, ended = {}, threading.Event()

    def act(session):
        reader = threading.Thread(target=lambda: seen.setdefault("chunks", list(seen["stream"])))
        reader.start()
        reader.join(0.2)
        seen["reader"] = reader
        ended.set()

    between_the_reason_and_the_last_chunk(monkeypatch, act)
    engine = open_engine("none")
    with engine.service() as service:
        release = threading.Event()
        monkeypatch.setattr(engine._loop.scheduler, "parts", _after(release, engine._loop.scheduler.parts))
        seen["stream"] = service.submit([1], S(seed=1), max_tokens=1)
        release.set()
        assert ended.wait(WAIT)
        seen["reader"].join(WAIT)
    assert [len(chunk.tokens) for chunk in seen["chunks"]] == [1]


def _after(event, call):
    def waiting():
        event.wait(WAIT)
        return call()

    return waiting


def test_a_text_is_whole_when_it_has_a_finish_reason():
    """Other threads take a text as soon as it has a reason: nothing may be added after that."""
    lengths = []

    class Watched(Session):
        """Records the text at the moment when the reason is set."""

        __slots__ = ()

        def __setattr__(self, name, value):
            if name == "finish_reason" and value is not None:
                lengths.append((len(self.tokens) - self.prompt_length, self.stats.emitted, len(self.logprobs)))
            object.__setattr__(self, name, value)

    engine = open_engine("model")
    session = engine.prepare(list(PROMPT), S(seed=1), max_tokens=9, logprobs=True)
    watched = Watched(session.request, session.tokens, session.sampling, session.prompt_length)
    engine._run([watched], lambda: True)
    assert lengths == [(9, 9, 9)]


# -------------------------------------------------------------------------------------------------------- cancelling


@pytest.mark.parametrize("kind", KINDS)
def test_cancelling_mid_stream_ends_one_text(kind):
    with open_engine(kind).service() as service:
        other = service.submit(PROMPTS[1], S(seed=1), max_tokens=15)
        stream = service.submit(PROMPTS[0], S(seed=0), max_tokens=400)
        got = []
        for chunk in stream:
            got += chunk.tokens
            if len(got) >= 5:
                service.cancel(stream.id)
        assert chunk.finish_reason == "cancelled"
        assert stream.result().finish_reason == "cancelled"
        assert stream.result().tokens == got
        assert other.result().tokens == alone(kind, 1)


def test_leaving_a_loop_over_a_stream_cancels_it():
    with open_engine("none").service() as service:
        stream = service.submit(PROMPTS[0], S(seed=0), max_tokens=400)
        for _ in stream:
            break
        assert in_thread(stream.result).finish_reason == "cancelled"


def test_leaving_an_asynchronous_loop_cancels_it():
    async def main():
        service = open_engine("none").service()
        stream = service.submit(PROMPTS[0], S(seed=0), max_tokens=400)
        async for _ in stream:
            break
        output = await asyncio.wait_for(stream.aresult(), WAIT)
        await service.aclose()
        return output.finish_reason

    assert asyncio.run(main()) == "cancelled"


def test_a_cancelled_task_cancels_its_request():
    async def main():
        service = open_engine("none").service()
        stream = service.submit(PROMPTS[0], S(seed=0), max_tokens=400)

        async def read():
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        output = await asyncio.wait_for(stream.aresult(), WAIT)
        await service.aclose()
        return output.finish_reason

    assert asyncio.run(main()) == "cancelled"


def test_cancelling_what_has_ended_changes_nothing():
    with open_engine("none").service() as service:
        stream = service.submit(PROMPTS[0], S(seed=0), max_tokens=5)
        first = stream.result()
        service.cancel(stream.id)
        service.cancel(10**9)
        assert stream.result().finish_reason == first.finish_reason == "length"
        assert [chunk.finish_reason for chunk in stream].count("length") == 1


def test_a_request_that_ends_in_the_round_of_its_cancellation_ends_once():
    engine = open_engine("none")
    session = engine.prepare([1], S(seed=1), max_tokens=1)
    chunks = []
    session.listener = chunks.append
    engine._loop.submit([session])
    real = engine._loop.scheduler.step

    def step():
        made = real()
        engine._loop.cancel([session])
        return made

    engine._loop.scheduler.__class__.step, saved = lambda self: step(), engine._loop.scheduler.__class__.step
    try:
        engine._loop.step()
    finally:
        engine._loop.scheduler.__class__.step = saved
    engine._loop.step()
    assert [chunk.finish_reason for chunk in chunks] == ["length"]


# ---------------------------------------------------------------------------------------------- the queue and the end


def test_a_full_queue_refuses_and_says_so():
    engine = open_engine("none", max_batch=1)
    release = threading.Event()
    engine._loop.scheduler.parts = _after(release, engine._loop.scheduler.parts)
    with engine.service(max_waiting=2) as service:
        streams = []
        with pytest.raises(QueueFullError, match="2 requests are waiting, and max_waiting=2"):
            streams += (service.submit([1], S(seed=i), max_tokens=3) for i in range(5))
        assert len(streams) in (2, 3), "one may have been admitted before the others wait"
        release.set()
        assert [len(in_thread(stream.result).tokens) for stream in streams] == [3] * len(streams)
        assert len(service.submit([1], S(seed=9), max_tokens=3).result().tokens) == 3, "there is room again"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_queue_length_that_is_none_is_refused(wrong):
    with pytest.raises((ValueError, TypeError), match="max_waiting"):
        Service(open_engine("none"), max_waiting=wrong)


def test_closing_cancels_what_runs():
    service = open_engine("none", max_batch=2).service()
    streams = [service.submit([1], S(seed=i), max_tokens=500) for i in range(4)]
    next(iter(streams[0]))
    in_thread(service.close)
    assert [in_thread(stream.result).finish_reason for stream in streams] == ["cancelled"] * 4
    assert not service.is_alive
    with pytest.raises(ServiceClosedError, match="the service does not run any more"):
        service.submit([1])
    in_thread(service.close)
    assert service.engine.generate([1], S(seed=1), max_tokens=3).finish_reason == "length", "the engine can be used"
    scheduler = service.engine._loop.scheduler
    assert set(scheduler.rows.pool.rows) == set(scheduler.prefixes.idle)


def test_a_request_that_is_submitted_while_the_service_closes_does_not_hang(monkeypatch):
    engine = open_engine("none")
    service = engine.service()
    real = engine.prepare

    def prepare(*args, **options):
        session = real(*args, **options)
        service.close()
        return session

    monkeypatch.setattr(engine, "prepare", prepare)
    with pytest.raises(ServiceClosedError):
        in_thread(lambda: service.submit([1], max_tokens=3).result())


def test_a_thread_that_fails_ends_all_streams_with_the_reason(monkeypatch):
    engine = open_engine("model")
    service = engine.service()
    started = service.submit(PROMPTS[0], S(seed=0), max_tokens=400)
    next(iter(started))
    streams = [service.submit(PROMPTS[1], S(seed=1), max_tokens=400)]

    def failing(self):
        raise OSError("the machine is on fire")

    monkeypatch.setattr(type(engine._loop), "step", failing)
    for stream in streams:
        with pytest.raises(OSError, match="on fire"):
            in_thread(lambda stream=stream: list(stream))
        with pytest.raises(OSError, match="on fire"):
            in_thread(stream.result)
    service._thread.join(WAIT)
    assert not service.is_alive
    assert isinstance(service.failure, OSError)
    with pytest.raises(ServiceClosedError, match="OSError: the machine is on fire"):
        service.submit([1])
    monkeypatch.undo()
    with unchecked():
        assert engine.generate(PROMPTS[0], S(seed=0), max_tokens=15).tokens == alone("model", 0)
    scheduler = engine._loop.scheduler
    assert not scheduler.running, "no row of a failed request is left"
    assert set(scheduler.rows.pool.rows) == set(scheduler.prefixes.idle)


def test_a_service_tells_how_busy_it_is():
    engine = open_engine("none", max_batch=1)
    with engine.service() as service:
        assert (service.running, service.waiting, service.kv_usage) == (0, 0, 0.0)
        streams = [service.submit([1], S(seed=i), max_tokens=300) for i in range(3)]
        for _ in streams[0]:
            assert (service.running, service.waiting) == (1, 2)
            assert 0 < service.kv_usage <= 1
            break


# ------------------------------------------------------------------------------------------------- options and faults


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "token"},
        {"rule": "coupled"},
        {"drafter": False},
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 7},
        {"num_draft_tokens": "auto"},
    ],
)
def test_options_are_a_requests_own(options):
    with open_engine("model").service() as service:
        special = service.submit(PROMPTS[0], S(seed=0), max_tokens=15, **options)
        usual = service.submit(PROMPTS[1], S(seed=1), max_tokens=15)
        made = special.result()
        assert made.tokens == alone("model", 0, **options)
        assert usual.result().tokens == alone("model", 1)
    if options.get("drafter") is False or options.get("num_draft_tokens") == 0:
        assert made.stats.drafted == 0
    if options.get("num_draft_tokens") == 7:
        assert max(drafted for drafted, _ in made.rounds) == 7


def test_coupled_and_no_drafter_give_the_same_text():
    with open_engine("model").service() as service:
        coupled = service.submit(PROMPTS[0], S(seed=5), max_tokens=20, rule="coupled")
        plain = service.submit(PROMPTS[0], S(seed=5), max_tokens=20, drafter=False)
        assert coupled.result().tokens == plain.result().tokens


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rule": "blok"}, "did you mean 'block'"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temprature": 1.0}, "temprature"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, error):
    with open_engine("model").service() as service:
        with pytest.raises((ValueError, TypeError), match=error):
            service.submit([1], **options)
        assert service.submit([1], S(seed=1), max_tokens=3).result().finish_reason == "length"


def test_faults_stay_with_their_request():
    engine = open_engine("ngram")
    assert isinstance(engine.drafter, RaisingDrafter)
    with engine.service() as service:
        good = service.submit(PROMPTS[0], S(seed=0), max_tokens=15)
        grammar = service.submit(PROMPTS[1], S(seed=1), max_tokens=15, allowed=failing_grammar)
        drafter = service.submit(PROMPTS[2], S(seed=2), max_tokens=400)
        next(iter(drafter))
        with pytest.raises(RuntimeError, match="its grammar failed: KeyError"):
            grammar.result()
        broken = service.submit(PROMPTS[3], S(seed=3), max_tokens=400)
        engine.drafter.bad.add(broken.id)
        with pytest.raises(RuntimeError, match="no draft for this one"):
            in_thread(broken.result)
        assert good.result().tokens == alone("ngram", 0)
        assert service.is_alive


def test_a_request_that_can_never_fit_is_told_so():
    with open_engine("none", pages=2).service() as service:
        with pytest.raises(RuntimeError, match="which holds 128: ask for fewer max_tokens"):
            in_thread(service.submit([1], max_tokens=200).result)
        assert service.submit([1], S(seed=1), max_tokens=5).result().finish_reason == "length"


def test_two_threads_in_generate_share_rounds():
    engine = open_engine("none")
    start = threading.Barrier(2)

    def one(i):
        start.wait()
        return engine.generate(PROMPTS[i], S(seed=i), max_tokens=15).tokens

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2), timeout=WAIT)) == [alone("none", i) for i in range(2)]


# ----------------------------------------------------------------------------------------------------------- threads


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "GOMP_parallel") or hasattr(ctypes.CDLL(None), "kmp_set_blocktime"),
    reason="threads are not GNU's",
)
def test_the_thread_that_loaded_a_model_keeps_no_openmp_threads():
    """With two teams on as many cores as one of them has, all their threads would sleep between two loops."""
    before = torch.get_num_threads()

    def compute_and_end():
        def threads():
            return {task.name for task in Path("/proc/self/task").iterdir()}

        torch.set_num_threads(3)
        first = threads()
        torch.ones(10**6).exp_()
        team = threads() - first
        end_openmp_threads()
        deadline = time.monotonic() + 10  # the system may list a thread a little longer than it runs
        while team & threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(team), team & threads()

    try:
        count, left = in_thread(compute_and_end)
    finally:
        torch.set_num_threads(before)
    assert count >= 2
    assert not left


def test_prompts_that_come_together_are_read_together_beside_a_stream():
    """One chunk of a lone prompt beside a stream, a chunk for each of several, and eight at most."""
    engine = open_engine("none", pages=200, max_batch=16)
    scheduler = engine._loop.scheduler
    scheduler.prefixes.enabled = False  # prompts that begin alike would wait for each other
    streamed = engine.prepare(PROMPTS[0], S(seed=0), max_tokens=40)
    streamed.listener = lambda chunk: None
    engine._loop.submit([streamed])
    while not scheduler.running:
        engine._loop.step()

    def read_in_a_round(prompts):
        sessions = [engine.prepare(prompt, S(seed=1), max_tokens=1) for prompt in prompts]
        engine._loop.submit(sessions)
        engine._loop.step()
        read = sum(session.read for session in sessions)
        while any(session.finish_reason is None for session in sessions):
            engine._loop.step()
        return read

    assert read_in_a_round([BASES[0][:200]]) == 64
    assert read_in_a_round([BASES[0][i : i + 65] for i in range(3)]) == 3 * 64
    assert read_in_a_round([BASES[1][i : i + 65] for i in range(10)]) == 8 * 64
