"""Hold what the routes of a server share: the service, its settings, its tokenizer and its metrics."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, TypeVar

from draftproof.core.sampling import SamplingParams
from draftproof.engine.engine import Engine
from draftproof.engine.service import Service
from draftproof.serve.errors import draining_error, queue_full_error
from draftproof.serve.memory import limit_word_cache
from draftproof.serve.metrics import Metrics
from draftproof.serve.settings import Settings
from draftproof.serve.token_text import TokenTexts

T = TypeVar("T")


@dataclass
class State:
    """A server's state.

    preparing  the one thread that reads prompts and compiles grammars, so that streams go on meanwhile: a tokenizer
               must not be used by two threads at once
    """

    engine: Engine
    service: Service
    settings: Settings
    metrics: Metrics
    preparing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "draftproof prompts"))
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    """Whether new requests are refused because the server shuts down."""
    in_preparation: int = 0
    """Requests whose prompts wait to be read, or are being read."""
    _closing: Lock = field(default_factory=Lock)

    @classmethod
    def open(cls, engine: Engine, settings: Settings) -> "State":
        """Start the service of an engine."""
        if engine.tokenizer is None:
            raise ValueError("a server needs an engine with a tokenizer: pass tokenizer= to load()")
        limit_word_cache(engine.tokenizer)
        service = engine.service(max_waiting=settings.max_queue)
        return cls(engine, service, settings, Metrics(settings.metrics_prefix, settings.name, service))

    def close(self) -> None:
        """Cancel what runs, and end the threads."""
        self.draining = True
        with self._closing:
            self.preparing.shutdown(wait=True, cancel_futures=True)
            self.service.close()

    def prepare(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Do some work on the thread that reads prompts."""
        future = asyncio.get_running_loop().run_in_executor(self.preparing, work)
        self.in_preparation += 1
        future.add_done_callback(self._leave_preparation)
        return future

    def _leave_preparation(self, _future: object) -> None:
        self.in_preparation -= 1

    def check_room(self) -> None:
        """Refuse a request before its prompt is read, if the server shuts down or a queue is full."""
        if self.draining:
            raise draining_error()
        waiting, most = max(self.in_preparation, self.service.waiting), self.settings.max_queue
        if waiting >= most:
            raise queue_full_error(f"{waiting} requests are waiting, and this server takes {most}")

    @property
    def tokenizer(self) -> Any:
        """Return the target's tokenizer, with all methods that transformers gives it."""
        return self.engine.tokenizer

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer, self.engine.model.vocab_size)

    @cached_property
    def default_sampling(self) -> SamplingParams:
        """Return the sampling of a request that asks for none: the model's own settings, else temperature 1."""
        own = getattr(getattr(self.engine.loaded, "generation_config", None), "do_sample", False)
        return self.engine.default_sampling if own else SamplingParams()

    @property
    def max_length(self) -> int | None:
        return self.service.max_length

    @property
    def problem(self) -> str | None:
        """Return why no request can be served; None where all is well."""
        if self.draining:
            return "the server is shutting down"
        if not self.service.is_alive:
            failure = self.service.failure
            return f"the engine has stopped: {type(failure).__name__}: {failure}" if failure else "the engine is closed"
        most, seconds = self.settings.max_round, self.service.round_seconds
        if most is not None and seconds > most:
            return f"the engine hangs: its present round has been running for {seconds:.0f} s"
        return None
