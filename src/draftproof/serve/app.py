"""The routes of the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import prometheus_client
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

import draftproof
from draftproof.models.tokenizer import encode
from draftproof.serve.answer import respond
from draftproof.serve.chat import prepare_chat
from draftproof.serve.completions import prepare_completion
from draftproof.serve.errors import ApiError, Json, answer_errors
from draftproof.serve.events import load_samples
from draftproof.serve.memory import give_back_freed_memory
from draftproof.serve.middleware import ApiKeys, BodyLimit, RequestIds
from draftproof.serve.prompts import chat_tokens, decode
from draftproof.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from draftproof.serve.state import State
from draftproof.serve.streaming import EventStream
from draftproof.serve.submit import check_model

PAGE: Final = Path(__file__).parent / "page"
"""The page `/` and its files."""

LOOK: Final = Path(draftproof.__file__).parent / "explain" / "look.css"
"""The style that the page shares with `draftproof explain`."""


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorObject


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 500, 503)
}


def create_app(state: State) -> FastAPI:
    """Return the ASGI app of a server; when it ends, so does the state's service."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        trimming = asyncio.create_task(give_back_freed_memory())
        yield
        trimming.cancel()
        await asyncio.to_thread(state.close)

    app = FastAPI(title="draftproof", version=draftproof.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    answer_errors(app)
    _add_generation(app, state)
    _add_tokenization(app, state)
    _add_reports(app, state)
    open_paths = _add_page(app)
    # The last one that is added runs first.
    app.add_middleware(BodyLimit, most=state.settings.max_body)
    if state.settings.api_keys:
        app.add_middleware(ApiKeys, keys=state.settings.api_keys, open_paths=["/health", *open_paths])
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestIds)
    return app


def _add_generation(app: FastAPI, state: State) -> None:
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a chat, whole or as server-sent events."""
        return await respond(request, state, partial(prepare_chat, state, body))

    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue a text or token ids, whole or as server-sent events."""
        return await respond(request, state, partial(prepare_completion, state, body))

    for path, handler in (("/chat/completions", chat_completions), ("/completions", completions)):
        _add(app, path, handler, "POST")


def _add_tokenization(app: FastAPI, state: State) -> None:
    async def tokenize(body: TokenizeBody) -> Response:
        """Return the tokens of a text, or of a chat by the model's template."""
        state.check_room()
        body.refuse_unknown()
        check_model(body.model, state)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages")
        tokens = await state.prepare(partial(_tokens, state, body))
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": state.max_length, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [state.token_texts.text(token) for token in tokens]
        return Json(answer)

    def detokenize(body: DetokenizeBody) -> Response:
        """Return the text of tokens."""
        body.refuse_unknown()
        check_model(body.model, state)
        return Json({"prompt": decode(state, body.tokens)})

    for path, handler in (("/tokenize", tokenize), ("/detokenize", detokenize)):
        _add(app, path, handler, "POST")


def _tokens(state: State, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        return chat_tokens(
            state,
            body.messages,
            continue_final=bool(body.continue_final_message),
            open_answer=body.add_generation_prompt,
            template_options=body.chat_template_kwargs,
        )
    assert body.prompt is not None
    if body.add_special_tokens is False:
        return list(state.tokenizer.encode(body.prompt, add_special_tokens=False))
    return encode(body.prompt, state.tokenizer, chat=False)


def _add_reports(app: FastAPI, state: State) -> None:
    async def models() -> Response:
        """List the model that is served."""
        return Json({"object": "list", "data": [_model(state)]})

    async def model(name: str) -> Response:
        """Describe the model that is served."""
        check_model(name, state)
        return Json(_model(state))

    async def health() -> Response:
        """Answer 200 if requests can be served, else 503 with the reason."""
        problem = state.problem
        return Json({"status": "ok" if problem is None else problem}, 200 if problem is None else 503)

    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(state.metrics.render(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def version() -> Response:
        """Return the version of draftproof."""
        return Json({"version": draftproof.__version__})

    async def events() -> Response:
        """Stream the load of the server, one event a second."""
        return EventStream(load_samples(state))

    for path, handler in (
        ("/models", models),
        ("/models/{name:path}", model),
        ("/health", health),
        ("/metrics", metrics),
        ("/version", version),
        ("/events", events),
    ):
        _add(app, path, handler, "GET")


def _model(state: State) -> dict[str, Any]:
    return {
        "id": state.settings.name,
        "object": "model",
        "created": state.started,
        "owned_by": "draftproof",
        "max_model_len": state.max_length,
    }


def _add_page(app: FastAPI) -> list[str]:
    """Serve the page and its files, and return their paths."""

    async def page() -> Response:
        index = PAGE / "index.html"
        if not index.is_file():
            raise ApiError(404, "this server has no page; the API is under /v1")
        return FileResponse(index)

    def file_route(path: Path) -> Any:
        async def file() -> Response:
            return FileResponse(path)

        return file

    app.add_api_route("/", page, methods=["GET"], include_in_schema=False)
    files = [LOOK, *sorted(path for path in PAGE.glob("*") if path.suffix in (".css", ".js", ".html"))]
    for path in files:
        app.add_api_route(f"/{path.name}", file_route(path), methods=["GET"], include_in_schema=False)
    return ["/", *(f"/{path.name}" for path in files)]


def _add(app: FastAPI, path: str, handler: Any, method: str) -> None:
    """Add a route, with and without /v1."""
    for prefix, in_schema in (("/v1", True), ("", False)):
        app.add_api_route(
            prefix + path,
            handler,
            methods=[method],
            response_class=Response,
            responses=ERRORS,
            include_in_schema=in_schema,
        )
