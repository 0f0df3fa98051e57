"""Put a server under mixed load: `python -m serve.soak --requests 10000` (`make soak`); a small one is in the tests.

Streams and plain requests, greedy and seeded, grammars, several texts, long prompts, clients that go away at random
bytes, slow readers, malformed and oversized bodies. Nothing may be lost or hang, every text that was completed must be
the library's own, and at the end no page of the pool may be taken.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from draftproof.core.sampling import SamplingParams
from draftproof.engine.engine import Engine
from serve.running import WAIT, Running, serving, wait_for

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "0123456789",
    "größe",
    "naïve",
    "日本語",
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["fox", "dog"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NONCE = re.compile(r"nonce\d+x")
CLIENTS = 16
MAX_BODY = 100_000
FLAT = 0.01
"""Growth of the process' memory that a long run may show after its first tenth."""

KINDS = {
    "plain": 6, "stream": 6, "greedy": 3, "several": 2, "long": 2, "grammar": 1, "echo": 1, "slow": 1,
    "leaves": 4, "malformed": 1, "oversized": 1, "unknown field": 1,
}  # fmt: skip
"""How often each kind of request comes."""


@dataclass
class Record:
    """What became of a request. `texts` are None where the client left, or where it was refused as it should be."""

    kind: str
    body: dict[str, Any]
    nonce: str
    texts: list[str] | None = None


@dataclass
class Result:
    records: list[Record] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Resident bytes after every request."""
    seconds: float = 0.0


def make_body(kind: str, rng: random.Random, nonce: str, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request. Its prompt holds a nonce of its own, at a random place."""
    words = [rng.choice(WORDS) for _ in range(rng.randrange(40, 80) if kind == "long" else rng.randrange(2, 20))]
    words.insert(rng.randrange(len(words) + 1), nonce)
    body: dict[str, Any] = {
        "prompt": " ".join(words),
        "max_tokens": rng.randrange(1, max_tokens + 1),
        "seed": rng.randrange(2**62),
        "temperature": 0 if kind == "greedy" else rng.choice([0.5, 0.8, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "rule": rng.choice([None, "block", "token", "coupled"]),
        "num_draft_tokens": rng.choice([None, 0, 3]),
    }
    if kind == "several":
        body["n"] = rng.randrange(2, 4)
    if kind == "grammar":
        body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
        body["max_tokens"] = 60
    if kind == "echo":
        body |= {"echo": True, "logprobs": 1}
    if kind == "leaves":
        body["max_tokens"] = 20 * max_tokens
    if kind in ("stream", "slow") or (kind in ("several", "leaves", "greedy") and rng.random() < 0.5):
        body["stream"] = True
    return body


async def run_one(client: httpx.AsyncClient, record: Record, rng: random.Random) -> None:
    """Send a request as its kind demands, and record the texts of one that was completed."""
    path, body, kind = "/v1/completions", record.body, record.kind
    if kind == "malformed":
        content = json.dumps(body)[: rng.randrange(1, 40)]
        answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
    elif kind == "oversized":
        assert (await client.post(path, json=body | {"user": "x" * MAX_BODY})).status_code == 413
    elif kind == "unknown field":
        assert (await client.post(path, json=body | {"mood": "good"})).status_code == 400
    elif kind == "leaves":
        await _leave(client, path, body, rng)
    elif body.get("stream"):
        record.texts = await _read_stream(client, path, body, slow=kind == "slow")
    else:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        record.texts = [choice["text"] for choice in answer.json()["choices"]]


async def _leave(client: httpx.AsyncClient, path: str, body: dict[str, Any], rng: random.Random) -> None:
    """Go away after a random number of bytes of a stream, or after a random time."""
    try:
        async with asyncio.timeout(rng.random() * 0.2), client.stream("POST", path, json=body) as answer:
            wanted, received = rng.randrange(2000), 0
            async for piece in answer.aiter_bytes(64):
                received += len(piece)
                if received >= wanted:
                    return
    except TimeoutError:
        pass


async def _read_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any], *, slow: bool) -> list[str]:
    texts = [""] * body.get("n", 1)
    last = ""
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if slow:
                await asyncio.sleep(0.002)
            last = line or last
            if line.startswith("data: {"):
                content = json.loads(line.removeprefix("data: "))
                assert "error" not in content, content
                for choice in content["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert last == "data: [DONE]"
    return texts


async def put_under_load(server: Running, requests: int, *, seed: int, max_tokens: int) -> Result:
    """Send so many requests, CLIENTS at a time."""
    result, start = Result(), time.perf_counter()
    rng = random.Random(seed)
    numbers = iter(range(requests))
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)

    async def client_loop(client: httpx.AsyncClient) -> None:
        for number in numbers:
            own = random.Random(rng.random())
            kind = own.choices(list(KINDS), KINDS.values())[0]
            nonce = f"nonce{number}x"
            record = Record(kind, make_body(kind, own, nonce, max_tokens), nonce)
            async with asyncio.timeout(WAIT):
                await run_one(client, record, own)
            result.records.append(record)
            result.memory.append(resident_bytes())

    async with (
        httpx.AsyncClient(base_url=server.url, timeout=WAIT, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CLIENTS):
            group.create_task(client_loop(client))
    result.seconds = time.perf_counter() - start
    return result


# ----------------------------------------------------------------------------------------------------------- the checks


def check(result: Result, server: Running, reference: Engine, requests: int) -> None:
    """Check that nothing was lost, mixed, changed or left behind."""
    assert len(result.records) == requests
    check_nonces(result.records)
    for record in result.records:
        if record.texts is not None:
            assert record.texts == alone(reference, record.body), record
    check_pool(server)


def check_nonces(records: list[Record]) -> None:
    """Check that no text holds the nonce of another request's prompt."""
    for record in records:
        for text in record.texts or []:
            found = {
                word for word in text.replace("\n", " ").split() if word.startswith("nonce") and word.endswith("x")
            }
            others = {word for word in found if word[5:-1].isdecimal()} - {record.nonce}
            assert not others, (record.nonce, others)


def check_pool(server: Running) -> None:
    """Check that after the last request no row is left, and no page is taken but by idle prefixes."""
    wait_for(lambda: server.is_idle() and server.engine._loop.is_idle)
    scheduler = server.engine._loop.scheduler
    assert set(scheduler.rows.pool.rows) == set(scheduler.prefixes.idle)
    scheduler.clear_prefixes()
    assert scheduler.rows.pool.extents.free_pages == scheduler.rows.pool.pages


def alone(engine: Engine, body: dict[str, Any]) -> list[str]:
    """Return the texts of a body by the library, one at a time."""
    texts = []
    allowed = None
    if "response_format" in body:
        from draftproof.integrations import llguidance

        allowed = llguidance.json_schema(SCHEMA, engine)
    for i in range(body.get("n", 1)):
        sampling = SamplingParams(temperature=body["temperature"], top_p=body["top_p"], seed=body["seed"] + i)
        output = engine.generate(
            body["prompt"],
            sampling,
            max_tokens=body["max_tokens"],
            chat=False,
            allowed=allowed,
            rule=body["rule"],
            num_draft_tokens=body["num_draft_tokens"],
        )
        texts.append((body["prompt"] if body.get("echo") else "") + output.text)
    return texts


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_memory(memory: list[int]) -> float:
    """Return how much the process grew after the first tenth of a run; it must not."""
    tenth = len(memory) // 10
    early, late = max(memory[tenth : 2 * tenth]), max(memory[-tenth:])
    growth = late / early - 1
    assert growth <= FLAT, f"the process grew by {growth:.1%}"
    return growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", default=None, help="a folder or smollm2; default: a tiny random model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    import tempfile

    import draftproof as dp
    from cli.tiny import save_model

    with tempfile.TemporaryDirectory() as folder:
        target = arguments.model or str(save_model(Path(folder), layers=2))
        drafter = "auto" if arguments.model else "ngram"
        engine, reference = (dp.load(target, drafter, max_batch=8, kv_memory=2**28) for _ in range(2))
        with serving(engine, max_body=MAX_BODY) as server:
            result = asyncio.run(put_under_load(server, arguments.requests, seed=arguments.seed, max_tokens=24))
            kinds = dict(Counter(record.kind for record in result.records))
            print(f"{arguments.requests} requests in {result.seconds:.0f} s: {kinds}")
            growth = check_memory(result.memory)
            print(f"memory after the first tenth: {growth:+.2%}")
            check(result, server, reference, arguments.requests)
    print("every completed text is the library's, and no page is taken")


if __name__ == "__main__":
    sys.exit(main())
