"""A real server on a free port, in a thread of the test, with a tiny model."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

import draftproof as dp
from draftproof.engine.engine import Engine
from draftproof.serve.server import bind, server_for
from draftproof.serve.settings import Settings
from draftproof.serve.state import State

WAIT = 60
"""Seconds after which a request that should have ended counts as hanging."""

CHAT = {"messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}], "max_tokens": 12}
TEXT = {"prompt": "the quick brown fox jumps over the lazy dog the quick", "max_tokens": 12}


@dataclass
class Running:
    """A server that runs, and a client for it."""

    state: State
    client: httpx.Client
    url: str

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, **fields: Any) -> dict[str, Any]:
        return _ok(self.post("/v1/chat/completions", CHAT | fields))

    def complete(self, **fields: Any) -> dict[str, Any]:
        return _ok(self.post("/v1/completions", TEXT | fields))

    def events(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream, which must end with [DONE]."""
        answer = self.post(path, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def stream_chat(self, **fields: Any) -> list[Any]:
        return self.events("/v1/chat/completions", CHAT | fields)

    def stream_text(self, **fields: Any) -> list[Any]:
        return self.events("/v1/completions", TEXT | fields)

    @property
    def engine(self) -> Engine:
        return self.state.engine

    def is_idle(self) -> bool:
        return self.state.service.running == 0 and self.state.service.waiting == 0


def _ok(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextmanager
def serving(engine: Engine, headers: dict[str, str] | None = None, **settings: Any) -> Iterator[Running]:
    """Serve an engine in a thread until the block ends."""
    state = State.open(engine, Settings(**{"name": "tiny"} | settings))
    bound = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    started = threading.Event()
    server = server_for(state, started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=WAIT, headers=headers) as client:
            assert started.wait(WAIT)
            yield Running(state, client, url)
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(WAIT)
        state.close()
        bound.close()
        assert not thread.is_alive(), "the server hangs"


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail if it never does."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.005)


def load(folder: str, drafter: Any = "ngram", **options: Any) -> Engine:
    return dp.load(folder, drafter, **{"kv_memory": 4_000_000} | options)
