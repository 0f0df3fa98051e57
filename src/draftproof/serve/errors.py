"""Report errors as OpenAI's error object, with its status codes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftproof.core.types import InexactError
from draftproof.engine.service import QueueFullError, ServiceClosedError

TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""OpenAI's type of error for each status; any other status is a "server_error"."""

RETRY_SECONDS: Final = 1
"""Retry-After of a full queue: places come free with every text that ends."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error that is answered to the client: what is wrong, and which field of the body it concerns."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Json(Response):
    """A JSON response. Half a surrogate pair, which a client may have sent, is answered as "?"."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("utf-8", "replace")


def to_json(content: Any) -> str:
    """Return compact JSON, which must not hold NaN or infinity."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def error_response(error: ApiError) -> Json:
    return Json(error.body, error.status, dict(error.headers))


def as_api_error(error: Exception) -> ApiError:
    """Return what a client is told of an error that the library raised."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return queue_full_error(str(error))
    if isinstance(error, ServiceClosedError):
        return ApiError(503, str(error), code="engine_stopped")
    if isinstance(error, ValueError | TypeError | InexactError):
        return ApiError(400, str(error))
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    return ApiError(500, f"{type(error).__name__}: {error}")


def draining_error() -> ApiError:
    return ApiError(503, "the server is shutting down", code="draining", headers=_retry())


def queue_full_error(reason: str) -> ApiError:
    return ApiError(429, f"{reason}: try again later", code="queue_full", headers=_retry())


def _retry() -> dict[str, str]:
    return {"Retry-After": str(RETRY_SECONDS)}


def answer_errors(app: FastAPI) -> None:
    """Let an app answer every error by OpenAI's error object."""

    async def api_error(_request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def invalid_body(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error))

    async def http_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers or {}))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid_body)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, api_error)


def _validation_error(error: RequestValidationError) -> ApiError:
    """Return the first fault of a body that is not as documented, with the name of its field."""
    first = error.errors()[0]
    place = [str(step) for step in first["loc"] if step != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] in ("model_attributes_type", "missing") and not place:
        return ApiError(400, "the body must be a JSON object, with the header Content-Type: application/json")
    name = ".".join(place) or None
    return ApiError(400, f"{name or 'the body'}: {first['msg']}", param=name)
