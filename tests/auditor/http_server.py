"""A small HTTP server around any decoder, in a thread: the completions of vLLM and draftproof, and of llama.cpp."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from draftproof.auditor.interface import Decoder
from draftproof.core.sampling import SamplingParams

NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class Fake:
    """What the server does, and what it was asked.

    busy     answers 429 as often as this, then serves
    retry    the Retry-After header of those answers; None: it has none
    answer   replaces the answer to a completion, if it is not None
    """

    decoder: Decoder | None = None
    owner: str = "vllm"
    models: tuple[str, ...] = ("tiny",)
    api_key: str | None = None
    busy: int = 0
    retry: str | None = "0"
    answer: tuple[int, str] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    decoding: threading.Lock = field(default_factory=threading.Lock)
    """Held while the decoder runs: transformers' takes one text at a time."""

    def reply(self, path: str, body: dict[str, Any] | None, key: str | None) -> tuple[int, Any, dict[str, str]]:
        """Return status, JSON and headers of an answer."""
        if self.api_key is not None and key != f"Bearer {self.api_key}":
            return 401, {"error": {"message": "wrong key"}}, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "owned_by": self.owner} for name in self.models]}, {}
        with self.lock:
            self.busy -= 1
            if self.busy >= 0:
                return 429, {"error": {"message": "full"}}, {} if self.retry is None else {"Retry-After": self.retry}
            self.bodies.append(body or {})
            self.paths.append(path)
        if self.answer is not None:
            status, text = self.answer
            return status, json.loads(text), {}
        return 200, self.completion(path, body or {}), {}

    def completion(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        llama = path == "/completion"
        fields = {name: body[name] for name in NAMES if name in body}
        fields |= {"repetition_penalty": body["repeat_penalty"]} if llama else {}
        sampling = SamplingParams(**fields, top_k=body["top_k"] or None)
        assert self.decoder is not None
        with self.decoding:
            [sample] = self.decoder.decode(
                [body["prompt"]], sampling, max_tokens=body["max_tokens"], seeds=[body["seed"]]
            )
        if llama:
            return {"content": "", "tokens": list(sample.tokens) if body.get("return_tokens") else []}
        choice: dict[str, Any] = {"index": 0, "text": ""}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(sample.tokens)
        if body.get("draftproof_trace") and sample.rounds is not None:
            choice["draftproof"] = {"rounds": [[r.drafted, r.accepted] for r in sample.rounds]}
        return {"choices": [choice]}


@contextmanager
def served(fake: Fake) -> Iterator[str]:
    """Serve, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: dict[str, Any] | None) -> None:
            with fake.lock:
                fake.running += 1
                fake.most_running = max(fake.most_running, fake.running)
            status, content, headers = fake.reply(self.path, body, self.headers.get("Authorization"))
            with fake.lock:
                fake.running -= 1
            sent = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(sent))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
