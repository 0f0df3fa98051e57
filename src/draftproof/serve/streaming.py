"""Send server-sent events, and notice clients that go away, in streams and in plain requests."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftproof.serve.errors import to_json

T = TypeVar("T")

DONE: Final = "data: [DONE]\n\n"
"""The last event of a stream, as OpenAI sends it."""

HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that keep proxies from holding events back."""


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody to answer."""


def event(content: Any) -> str:
    """Return a server-sent event."""
    return f"data: {to_json(content)}\n\n"


class EventStream(Response):
    """A response of server-sent events; a client that goes away closes their generator at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], on_close: Callable[[], None] = lambda: None) -> None:
        super().__init__(None, headers=HEADERS)
        if "content-length" in self.headers:
            del self.headers["content-length"]  # as long as it takes
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            return
        finally:
            self._on_close()  # not left to the generator: one that was never started runs nothing when it is closed
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work for a client; if it goes away meanwhile, cancel the work and raise `ClientGoneError`.

    Starlette notices this in streams only, and on some servers only when something is sent.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
