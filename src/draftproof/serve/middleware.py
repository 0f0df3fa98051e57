"""Guard the app: request ids and logs, API keys and the size of bodies. Pure ASGI: no work for each chunk."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Collection
from hmac import compare_digest
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftproof.serve.errors import ApiError, error_response

REQUEST_ID: Final = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
"""Request ids of clients that are taken over; any other is replaced."""

BODY_SECONDS: Final = 60.0
"""Time in which a body must arrive: a client that stops halfway would keep a server that shuts down from ending."""

log = logging.getLogger("draftproof.serve")


class RequestIds:
    """Give every request an id, in `scope["state"]["request_id"]`, the header X-Request-Id and the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        start, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            fields = {
                "request_id": name,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or None,  # None: the client went away before there was an answer
                "seconds": round(time.perf_counter() - start, 4),
            }
            log.info("%(method)s %(path)s %(status)s %(seconds).3fs %(request_id)s", fields, extra={"fields": fields})


class ApiKeys:
    """Refuse requests without one of the keys, as `Authorization: Bearer KEY`; `open_paths` need none."""

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str]) -> None:
        self.app, self._keys, self._open = app, [key.encode() for key in keys], frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open and not self._is_known(Headers(scope=scope)):
            message = "give an API key: Authorization: Bearer KEY"
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            return await error_response(error)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("utf-8", "replace")
        matches = [compare_digest(given, known) for known in self._keys]  # all of them: the time tells nothing
        return kind.lower() == "bearer" and any(matches)


class BodyLimit:
    """Read a request's body up to a limit, and refuse a larger one with 413 and one that takes too long with 408."""

    def __init__(self, app: ASGIApp, most: int, seconds: float = BODY_SECONDS) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self.app(scope, receive, send)
        try:
            announced = Headers(scope=scope).get("content-length", "0")
            if announced.isdecimal() and int(announced) > self.most:
                raise self._too_large()
            async with asyncio.timeout(self.seconds):
                body = await self._read(receive)
        except TimeoutError:
            message = f"the body did not arrive within {self.seconds:g} s"
            error = ApiError(408, message, code="body_timeout", headers={"Connection": "close"})
            return await error_response(error)(scope, receive, send)
        except ApiError as error:
            return await error_response(error)(scope, receive, send)
        if body is not None:
            await self.app(scope, _replaying(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body; None if the client went away before its end."""
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self.most:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self.most} bytes, the limit of this server", code="body_too_large"
        )


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that gives a body which was read already, then what comes after it."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay


class JsonLogs(logging.Formatter):
    """Write log records as JSON objects, one per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        entry = {"time": round(record.created, 3), "level": record.levelname.lower(), **fields}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)
