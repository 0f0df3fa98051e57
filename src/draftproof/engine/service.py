"""Serve many callers with one engine: a thread runs the rounds, and requests are submitted from threads and coroutines.

Every request streams on its own, may be cancelled, and fails alone.
"""

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from draftproof.core.sampling import SamplingParams, is_whole
from draftproof.engine.request import Chunk, Output, Session, TokenLogprobs, raise_error
from draftproof.models.tokenizer import OnePrompt

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine

OMP_PAUSE_HARD: Final = 2
"""OpenMP's request to give up all that it holds; it starts again when it is needed."""

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class QueueFullError(RuntimeError):
    """The service has as many waiting requests as it takes: try again later."""


class ServiceClosedError(RuntimeError):
    """The service does not run: it was closed, or its thread has failed."""


class RequestStream:
    """The chunks of one request, for a thread (`for`) or a coroutine (`async for`). Each chunk is given once."""

    def __init__(self, service: "Service", session: Session) -> None:
        self._service, self._session = service, session
        self._chunks: SimpleQueue[Chunk | None] = SimpleQueue()
        """Chunks that nobody has taken yet; None after the last one."""
        self._waiters: deque[Waiter] = deque()
        """Coroutines that wait for a chunk."""
        self._end_waiters: deque[Waiter] = deque()
        """Coroutines that wait for the end of the text."""
        self._ended = Event()
        """Set when the last chunk is here; the session has its finish reason a little earlier."""
        if session.finish_reason is not None:
            self._chunks.put(None)
            self._ended.set()
        session.listener = self._push

    @property
    def id(self) -> int:
        return self._session.id

    @property
    def prompt(self) -> tuple[int, ...]:
        return self._session.request.prompt

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Return the log-probabilities of the prompt's tokens; all are there when the first chunk is."""
        return self._session.prompt_logprobs

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while (chunk := self._chunks.get()) is not None:
                yield chunk
            self._end()
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
            self._end()
        finally:
            self.cancel()

    def result(self) -> Output:
        """Wait for the end of the text and return all of it; raise if the request failed."""
        self._ended.wait()
        raise_error(self._session)
        return self._session.result()

    async def aresult(self) -> Output:
        """Wait for the end of the text and return all of it; raise if the request failed. For coroutines."""
        waiter = new_waiter()
        self._end_waiters.append(waiter)
        if not self._has_ended():  # looked at after the waiter is there: the end cannot come unnoticed in between
            await waiter[1]
        raise_error(self._session)
        return self._session.result()

    def cancel(self) -> None:
        """End the request between two rounds, where it is; one that has ended stays as it is."""
        self._service.cancel(self.id)

    def _has_ended(self) -> bool:
        return self._ended.is_set()

    def _end(self) -> None:
        """Leave the end for whoever iterates again, and raise if the request failed."""
        self._chunks.put(None)
        raise_error(self._session)

    async def _next(self) -> Chunk | None:
        while True:
            with suppress(Empty):
                return self._chunks.get_nowait()
            waiter = new_waiter()
            self._waiters.append(waiter)
            if self._chunks.empty():
                await waiter[1]

    def _push(self, chunk: Chunk) -> None:
        """Take a chunk from the thread that runs the rounds; it is delivered when the round is over."""
        self._service.deliver_later(self, chunk)

    def deliver(self, chunk: Chunk) -> Iterable[Waiter]:
        """Hand a chunk to whoever iterates; return the coroutines to wake."""
        if chunk.tokens or chunk.text or chunk.finish_reason not in (None, "error"):
            self._chunks.put(chunk)
        if chunk.finish_reason is not None:
            self._chunks.put(None)
            self._ended.set()
            self._service.forget(self.id)
            yield from drained(self._end_waiters)
        yield from drained(self._waiters)


def drained(waiters: deque[Waiter]) -> Iterable[Waiter]:
    """Take out all waiters, while others may be added."""
    while waiters:
        yield waiters.popleft()


def new_waiter() -> Waiter:
    """Return a future of the coroutine that runs, with its event loop."""
    loop = asyncio.get_running_loop()
    return loop, loop.create_future()


def resolve_all(futures: Sequence[asyncio.Future[None]]) -> None:
    """Resolve futures of the event loop that calls this, unless their coroutines were cancelled."""
    for future in futures:
        if not future.done():
            future.set_result(None)


class Service:
    """An engine that a thread of its own runs.

    >>> with engine.service() as service:                      # doctest: +SKIP
    ...     for chunk in service.submit("Tell me a story.", max_tokens=100):
    ...         print(chunk.text, end="")

    max_waiting  requests that may wait for a place; more are refused with `QueueFullError`
    """

    def __init__(self, engine: "Engine", *, max_waiting: int = 256) -> None:
        if not is_whole(max_waiting) or max_waiting < 1:
            raise ValueError(f"max_waiting must be a whole number ≥ 1; got {max_waiting!r}")
        self.engine, self.max_waiting = engine, max_waiting
        self.failure: Exception | None = None
        """Why the thread ended, if it failed."""
        self._loop = engine._loop
        self._live: dict[int, Session] = {}
        self._lock = Lock()
        """Held while a request is submitted, so that none arrives after the last look at those that run."""
        self._is_closing = False
        self._undelivered: list[tuple[RequestStream, Chunk]] = []
        """Chunks of the round that runs."""
        self._delivering = Lock()
        """Held while chunks are added or taken: another thread may run a round when the service fails."""
        self._loop.after_step.append(self._deliver)
        end_openmp_threads()
        self._thread = Thread(target=self._run, name="draftproof service", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: OnePrompt, sampling: SamplingParams | None = None, *, max_tokens: int = 256, **options: Any
    ) -> RequestStream:
        """Queue a request and return its stream. The arguments are those of `Engine.generate`, for one prompt."""
        session = self.engine.prepare(prompt, sampling, max_tokens=max_tokens, **options)
        stream = RequestStream(self, session)
        with self._lock:
            if not self.is_alive:
                why = f": {type(self.failure).__name__}: {self.failure}" if self.failure is not None else ""
                raise ServiceClosedError(f"the service does not run any more{why}")
            if self._loop.waiting >= self.max_waiting:
                raise QueueFullError(f"{self._loop.waiting} requests are waiting, and max_waiting={self.max_waiting}")
            if session.finish_reason is None:
                self._live[session.id] = session
                self._loop.submit([session])
        return stream

    def cancel(self, request: int) -> None:
        """End a request between two rounds, where it is; one that has ended stays as it is."""
        with self._lock:
            session = self._live.pop(request, None)
        if session is not None:
            self._loop.cancel([session])

    def forget(self, request: int) -> None:
        """Let go of a request that has ended: under steady load there is no idle moment to do so."""
        with self._lock:
            self._live.pop(request, None)

    def deliver_later(self, stream: RequestStream, chunk: Chunk) -> None:
        """Keep a chunk until the round is over.

        Threads that wake in the middle of a round compete with it for Python's lock at every operation. At its end, a
        chunk for each row wakes all threads at once, and each event loop once.
        """
        with self._delivering:
            self._undelivered.append((stream, chunk))

    def _deliver(self) -> None:
        with self._delivering:
            chunks, self._undelivered = self._undelivered, []
        woken: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for stream, chunk in chunks:
            for loop, future in stream.deliver(chunk):
                woken.setdefault(loop, []).append(future)
        for loop, futures in woken.items():
            with suppress(RuntimeError):  # the loop was closed, and nobody waits there
                loop.call_soon_threadsafe(resolve_all, futures)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing and self.failure is None

    @property
    def round_seconds(self) -> float:
        """Return how long the present round has been running; 0 between rounds. A device that hangs shows here."""
        return self._loop.round_seconds

    @property
    def running(self) -> int:
        """Return the number of requests that have a place in the pool."""
        return len(self._loop.scheduler.running) + len(self._loop.scheduler.reading)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a place."""
        return self._loop.waiting

    @property
    def max_length(self) -> int | None:
        """Return the most tokens of one text, prompt counted: what the model and the pool have room for."""
        pool = self._loop.scheduler.rows.pool
        limits = [self.engine._max_length, None if pool is None else pool.tokens]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def kv_usage(self) -> float:
        """Return the share of the KV pool that rows and idle prefixes take; 0 where there is no pool."""
        pool = self._loop.scheduler.rows.pool
        return 0.0 if pool is None else 1 - pool.extents.free_pages / pool.pages

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        with self._lock:
            self._is_closing = True
            live = list(self._live.values())
        self._loop.cancel(live)
        self._loop.wake()
        self._thread.join()
        if self._deliver in self._loop.after_step:
            self._loop.after_step.remove(self._deliver)

    async def aclose(self) -> None:
        """Cancel what runs, and end the thread, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not (self._is_closing and self._loop.is_idle):
                self._loop.wait_for_work(lambda: self._is_closing)
                self._loop.run_until(lambda: self._loop.is_idle)
        except Exception as error:  # whatever it is, nobody may wait for ever
            with self._lock:
                self.failure = error
                live = list(self._live.values())
            self._loop.cancel(live)  # the next round of this engine, if there is one, removes their rows
            self._end_all(live, error)

    def _end_all(self, sessions: Sequence[Session], error: Exception) -> None:
        for session in sessions:
            if session.finish_reason is None:
                session.finish_reason, session.cause = "error", error
                session.error = f"request {session.id}: the service failed: {type(error).__name__}: {error}"
                session.notify([])
        self._deliver()


def end_openmp_threads() -> None:
    """End the OpenMP threads that the calling thread has from loading a model; it gets others when it needs them.

    Every thread that computes has a team of its own. If the teams together have more threads than there are cores,
    GNU's OpenMP lets all of them sleep between two loops, and waking them took a third of a round. LLVM's OpenMP waits
    in another way, and would end the teams of all threads.
    """
    if os.name != "posix":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "omp_pause_resource_all") and not hasattr(library, "kmp_set_blocktime"):
        library.omp_pause_resource_all(OMP_PAUSE_HARD)
