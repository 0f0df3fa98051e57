"""A small server that speaks what the page reads: files, models, feed and chat, with answers that a test chooses."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import draftproof

PACKAGE = Path(draftproof.__file__).parent
TYPES = {".css": "text/css", ".js": "text/javascript", ".html": "text/html"}
FILES = {
    "/": PACKAGE / "serve" / "page" / "index.html",
    "/page.css": PACKAGE / "serve" / "page" / "page.css",
    "/page.js": PACKAGE / "serve" / "page" / "page.js",
    "/look.css": PACKAGE / "explain" / "look.css",
}
ANSWER = (
    ("The sky", "bonus"),
    (" is", "draft"),
    (" blue", "draft"),
    ("\n<b>now</b>", "residual"),
    (" &amp; then", "plain"),
)
SAMPLE = {"running": 2, "waiting": 1, "kv": 0.25, "tokens_per_second": 88.4, "acceptance": None, "tokens_per_pass": 2.5}


@dataclass
class PageServer:
    """What the server answers, and what it was asked.

    plain     the answer without speculation; None: the same text
    pause     seconds before each part of an answer
    refusal   status, message and Retry-After of every chat
    failure   the message of an error in the stream, after the answer
    origins   whether parts say where they came from
    listed    set when the list of models may be answered
    """

    answer: tuple[tuple[str, str], ...] = ANSWER
    plain: str | None = None
    pause: float = 0.0
    api_key: str | None = None
    refusal: tuple[int, str, str] | None = None
    failure: str | None = None
    origins: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    listed: threading.Event = field(default_factory=threading.Event)
    ending: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.listed.set()

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        parts = self.answer
        if body.get("num_draft_tokens") == 0:
            whole = "".join(text for text, _ in parts) if self.plain is None else self.plain
            parts = tuple((word, "plain") for word in whole)
        for count, (text, origin) in enumerate(parts, 1):
            time.sleep(self.pause)
            chunk = {"choices": [{"index": 0, "delta": {"content": text}}], "usage": {"completion_tokens": count}}
            trace = {"tokens": [{"text": text, "from": origin}], "tokens_per_pass": 2.5, "acceptance": 0.5}
            yield chunk | ({"draftproof": trace} if self.origins else {})
        if self.failure is not None:
            yield {"error": {"message": self.failure}}


class _Handler(BaseHTTPRequestHandler):
    fake: PageServer

    def do_GET(self) -> None:
        if self.path in FILES:
            file = FILES[self.path]
            self.whole(200, file.read_bytes(), {"Content-Type": TYPES[file.suffix]})
        elif self.is_allowed():
            self.listing() if self.path == "/v1/models" else self.feed()

    def listing(self) -> None:
        self.fake.listed.wait()
        self.whole(200, json.dumps({"data": [{"id": "tiny-model"}]}).encode())

    def feed(self) -> None:
        self.begin()
        while not self.fake.ending.wait(0.05):
            self.event(SAMPLE)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed():
            return
        self.fake.bodies.append(body)
        if self.fake.refusal is not None:
            status, message, wait = self.fake.refusal
            self.whole(status, json.dumps({"error": {"message": message}}).encode(), {"Retry-After": wait})
            return
        self.begin()
        for chunk in self.fake.chunks(body):
            self.event(chunk)
        self.wfile.write(b"data: [DONE]\n\n")

    def is_allowed(self) -> bool:
        allowed = self.fake.api_key is None or self.headers.get("Authorization") == f"Bearer {self.fake.api_key}"
        if not allowed:
            self.whole(401, json.dumps({"error": {"message": "a key is needed"}}).encode())
        return allowed

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def event(self, content: Any) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def whole(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that went away."""


@contextmanager
def served(fake: PageServer) -> Iterator[str]:
    """Serve in a thread, and yield the URL."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        fake.ending.set()
        fake.listed.set()
        server.shutdown()
        thread.join()
        server.server_close()
