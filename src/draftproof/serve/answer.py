"""Answer a request for texts, whole or as a stream of events; chats and text completions differ in their choices."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

import draftproof
from draftproof.engine.request import Chunk
from draftproof.serve.errors import ApiError, Json, as_api_error, draining_error
from draftproof.serve.protocol import GenerationBody
from draftproof.serve.state import State
from draftproof.serve.streaming import DONE, ClientGoneError, EventStream, event, unless_gone
from draftproof.serve.texts import Text, cancel_all, chunks_of_all, reports, usage
from draftproof.serve.trace import Trace

log = logging.getLogger("draftproof.serve")

NO_CLIENT = 499
"""Status of a request whose client is gone, for the log; nobody receives it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request's id, and when it came, by `time.perf_counter`."""

    request_id: str
    at: float = field(default_factory=time.perf_counter)


class Answer(ABC):
    """The texts of one request on their way to the client."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, state: State, body: GenerationBody, texts: Sequence[Text], arrival: Arrival) -> None:
        self.state, self.body, self.texts = state, body, texts
        self.id, self.created = f"{self.id_prefix}-{arrival.request_id}", int(time.time())
        self._closed: set[int] = set()
        self._traces: dict[int, Trace] = {}

    @abstractmethod
    def choice(self, text: Text) -> dict[str, Any]:
        """Return a text that has ended, as a choice of the whole answer."""

    @abstractmethod
    def deltas(self, text: Text, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yield what a chunk adds to a text, as choices of events."""

    @abstractmethod
    def closing(self, text: Text) -> dict[str, Any]:
        """Return the last choice of a text in a stream, with its finish reason."""

    def extras(self) -> dict[str, Any]:
        """Return further fields of the whole answer, and of the first event of a stream."""
        return {}

    def rounds(self, text: Text) -> dict[str, Any]:
        """Return what each round of a text drafted and accepted, which an audit of this server reads."""
        if not self.body.draftproof_trace:
            return {}
        return {"draftproof": {"rounds": [[each.drafted, each.accepted] for each in text.stats.record]}}

    def cancel(self) -> None:
        """End the texts between two rounds; those that have ended stay as they are."""
        cancel_all(self.texts)

    async def whole(self) -> dict[str, Any]:
        """Wait for all texts and return the answer."""
        async for _ in chunks_of_all(self.texts, self.state):
            pass
        choices = [self.choice(text) for text in self.texts]
        return (
            self._envelope(self.whole_object, choices)
            | {"usage": usage(self.texts)}
            | reports(self.texts)
            | self.extras()
        )

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as events. An error comes last, before the mark of the end."""
        extras = self.extras()
        try:
            async for text, chunk in chunks_of_all(self.texts, self.state):
                trace = self._trace(text, chunk)
                for choice in self.deltas(text, chunk):
                    yield self._event(choice, extras | trace)
                    trace, extras = {}, {}
                if trace:
                    yield self._event(None, trace)
                if chunk.finish_reason is not None:
                    yield self._close(text)
            for text in self.texts:
                if text.index not in self._closed:  # a text of no tokens has no chunks
                    for choice in self.deltas(text, _nothing(text)):
                        yield self._event(choice, extras)
                    yield self._close(text)
            if self.body.includes_usage:
                yield event(self._envelope(self.chunk_object, []) | {"usage": usage(self.texts)})
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("the stream %s failed", self.id)
            yield event(as_api_error(error).body)
        yield DONE

    def _close(self, text: Text) -> str:
        self._closed.add(text.index)
        is_last = len(self._closed) == len(self.texts)
        return self._event(self.closing(text), reports(self.texts) if is_last else {})

    def _event(self, choice: dict[str, Any] | None, more: dict[str, Any]) -> str:
        content = self._envelope(self.chunk_object, [] if choice is None else [choice]) | more
        if self.body.repeats_usage:
            content["usage"] = usage(self.texts)
        elif self.body.includes_usage:
            content["usage"] = None
        return event(content)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.state.settings.name,
            "system_fingerprint": f"draftproof-{draftproof.__version__}",
            "choices": choices,
        }

    def _trace(self, text: Text, chunk: Chunk) -> dict[str, Any]:
        if not self.body.draftproof_trace:
            return {}
        if text.index not in self._traces:
            self._traces[text.index] = Trace(self.state.tokenizer, text.stream.prompt)
        return {"draftproof": self._traces[text.index].parts(chunk)}


def _nothing(text: Text) -> Chunk:
    return Chunk("", [], None, text.stats)


async def respond(request: Request, state: State, prepare: Callable[[Arrival], Answer]) -> Response:
    """Prepare an answer on the thread that reads prompts, and give it: whole, or as a stream.

    A client that goes away ends its texts, whatever they are waiting for.
    """
    state.check_room()
    work = _answer(state, partial(prepare, Arrival(request.state.request_id)))
    try:
        result = await unless_gone(request.receive, work)
    except ClientGoneError:
        return Response(status_code=NO_CLIENT)
    return EventStream(result.events(), result.cancel) if isinstance(result, Answer) else Json(result)


async def _answer(state: State, prepare: Callable[[], Answer]) -> Answer | dict[str, Any]:
    """Return the whole answer, or for a stream the answer that is yet to come."""
    future = state.prepare(prepare)
    try:
        answer = await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.cancelled():
            raise draining_error() from None
        future.add_done_callback(_abandon)  # the thread goes on: what it submits must not stay behind
        raise
    if answer.body.stream:
        return answer
    try:
        return await answer.whole()
    finally:
        answer.cancel()


def _abandon(future: "asyncio.Future[Answer]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().cancel()
