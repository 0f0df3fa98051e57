"""Serve many callers with one engine: a thread runs the rounds, and requests are submitted from threads and coroutines.

Every request streams on its own, may be cancelled, and fails alone.
"""

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from draftproof.core.sampling import SamplingParams, is_whole
from draftproof.engine.request import Chunk, Output, Session, TokenLogprobs, raise_error
from draftproof.models.rows import PooledRows
from draftproof.models.tokenizer import OnePrompt

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine

OMP_PAUSE_HARD: Final = 2
"""OpenMP's request to give up all that it holds; it starts again when it is needed."""


class QueueFullError(RuntimeError):
    """The service has as many waiting requests as it takes: try again later."""


class ServiceClosedError(RuntimeError):
    """The service does not run: it was closed, or its thread has failed."""


class RequestStream:
    """The chunks of one request, for a thread (`for`) or a coroutine (`async for`). Each chunk is given once."""

    def __init__(self, service: "Service", session: Session) -> None:
        self._service, self._session = service, session
        self._chunks: deque[Chunk] = deque()
        self._changed = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._is_complete = session.finish_reason is not None
        """Whether the last chunk is here; the session has its finish reason a little earlier."""
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
            while True:
                with self._changed:
                    self._changed.wait_for(self._is_ready)
                    chunk = self._chunks.popleft() if self._chunks else None
                if chunk is None:
                    raise_error(self._session)
                    return
                yield chunk
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            while True:
                await self._ready()
                if not self._chunks:
                    raise_error(self._session)
                    return
                yield self._chunks.popleft()
        finally:
            self.cancel()

    def result(self) -> Output:
        """Wait for the end of the text and return all of it; raise if the request failed."""
        with self._changed:
            self._changed.wait_for(self._has_ended)
        raise_error(self._session)
        return self._session.result()

    async def aresult(self) -> Output:
        """Wait for the end of the text and return all of it; raise if the request failed. For coroutines."""
        while not self._has_ended():
            self._chunks.clear()
            await self._ready()
        raise_error(self._session)
        return self._session.result()

    def cancel(self) -> None:
        """End the request between two rounds, where it is; one that has ended stays as it is."""
        self._service.cancel(self.id)

    def _has_ended(self) -> bool:
        return self._is_complete

    def _is_ready(self) -> bool:
        return bool(self._chunks) or self._has_ended()

    async def _ready(self) -> None:
        event = asyncio.Event()
        waiter = asyncio.get_running_loop(), event
        with self._changed:
            if self._is_ready():
                return
            self._waiters.append(waiter)
        try:
            await event.wait()
        finally:
            with self._changed:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def _push(self, chunk: Chunk) -> None:
        """Take a chunk from the thread that runs the rounds, and wake whoever waits for it."""
        with self._changed:
            if chunk.tokens or chunk.text or chunk.finish_reason not in (None, "error"):
                self._chunks.append(chunk)
            self._is_complete = chunk.finish_reason is not None
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        if chunk.finish_reason is not None:
            self._service.forget(self.id)
        for loop, event in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


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
        rows = self._loop.scheduler.rows
        limits = [self.engine._max_length, rows.tokens if isinstance(rows, PooledRows) else None]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def kv_usage(self) -> float:
        """Return the share of the KV pool that rows and idle prefixes take; 0 where passes are not packed."""
        rows = self._loop.scheduler.rows
        if not isinstance(rows, PooledRows):
            return 0.0
        return 1 - rows.pool.extents.free_pages / rows.pool.pages

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        with self._lock:
            self._is_closing = True
            live = list(self._live.values())
        self._loop.cancel(live)
        self._loop.wake()
        self._thread.join()

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
