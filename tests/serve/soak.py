"""Put a server under mixed load: `python -m serve.soak --requests 10000` (`make soak`); a small one is in the tests.

Streams and plain requests, greedy and seeded, grammars, several texts, long prompts, clients that go away at random
bytes, slow readers, malformed and oversized bodies. Nothing may be lost or hang, every text that was completed must be
the library's own, at the end no page of the pool may be taken, and the server's memory stays flat. The clients are a
process of their own, so that the memory is the server's alone.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.head import HeadDrafter
from draftproof.engine.engine import Engine
from draftproof.serve.memory import limit_kernel_cache
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
"""Growth of the server's memory that a long run may show after its first tenth."""

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
    """What became of all requests. The records are in a file: in memory they would look like a leak of the server."""

    file: Path
    kinds: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    """Resident bytes of the server after every request, if its process is known."""
    seconds: float = 0.0

    def records(self) -> Iterator[Record]:
        with self.file.open() as lines:
            for line in lines:
                yield Record(**json.loads(line))


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
        await _leave(str(client.base_url).rstrip("/"), path, body, rng)
    elif body.get("stream"):
        record.texts = await _read_stream(client, path, body, slow=kind == "slow")
    else:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        record.texts = [choice["text"] for choice in answer.json()["choices"]]


async def _leave(url: str, path: str, body: dict[str, Any], rng: random.Random) -> None:
    """Go away after a random number of bytes of the answer, or after a random time.

    By a socket of its own: httpx's pool loses connections whose requests are cancelled.
    """
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(content)}", "", ""))
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(rng.random() * 0.2):
            writer.write(head.encode() + content)
            await reader.readexactly(1 + rng.randrange(2000))
    except (TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()


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


async def put_under_load(
    url: str,
    requests: int,
    file: Path,
    *,
    seed: int,
    max_tokens: int,
    longest: float = WAIT,
    process: int | None = None,
) -> Result:
    """Send so many requests, CLIENTS at a time, and write a record of each. One that takes `longest` seconds hangs.

    process  the server's, whose memory is looked at after every request
    """
    result, start = Result(file), time.perf_counter()
    rng = random.Random(seed)
    numbers = iter(range(requests))

    async def client_loop(client: httpx.AsyncClient) -> None:
        for _ in numbers:
            own = random.Random(rng.random())
            kind = own.choices(list(KINDS), KINDS.values())[0]
            nonce = f"nonce{own.getrandbits(40)}x"
            record = Record(kind, make_body(kind, own, nonce, max_tokens), nonce)
            async with asyncio.timeout(longest):
                await run_one(client, record, own)
            written.write(json.dumps(asdict(record)) + "\n")
            result.kinds[kind] += 1
            if process is not None:
                result.memory.append(resident_bytes(process))

    with file.open("w") as written:
        async with (
            httpx.AsyncClient(base_url=url, timeout=longest) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(CLIENTS):
                group.create_task(client_loop(client))
    result.seconds = time.perf_counter() - start
    return result


# ----------------------------------------------------------------------------------------------------------- the checks


def check(result: Result, server: Running, reference: Engine, requests: int) -> None:
    """Check that nothing was lost, mixed, changed or left behind."""
    assert result.kinds.total() == requests
    nonces = {record.nonce for record in result.records()}
    for record in result.records():
        check_nonces(record, nonces)
        if record.texts is not None:
            assert record.texts == alone(reference, record.body), record
    check_pool(server)


def check_nonces(record: Record, nonces: Set[str]) -> None:
    """Check that no text holds the nonce of another request's prompt. A model may write one that nobody sent."""
    for text in record.texts or []:
        others = nonces.intersection(NONCE.findall(text)) - {record.nonce}
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


@torch.inference_mode()
def touch_pools(engine: Engine) -> None:
    """Write to all of the pools' memory: the process then has no reason to grow with the pages that are used."""
    scheduler = engine._loop.scheduler
    drafter = scheduler.parts().drafter
    pools = [scheduler.rows.pool, *([drafter._memory.pool.pool] if isinstance(drafter, HeadDrafter) else [])]
    for pool in pools:
        for buffer in (*pool.keys, *pool.values):
            buffer.zero_()


def resident_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_memory(memory: list[int]) -> float:
    """Return how much the process grew after the first tenth of a run; it must not."""
    tenth = len(memory) // 10
    early, late = max(memory[tenth : 2 * tenth]), max(memory[-tenth:])
    growth = late / early - 1
    assert growth <= FLAT, f"the server grew by {growth:.1%}"
    return growth


def clients(url: str, requests: int, file: Path, *, seed: int, longest: float) -> Result:
    """Put the server of this process under load from another one."""
    figures = file.with_suffix(".json")
    asked = map(str, (url, file, figures, requests, seed, longest, os.getpid()))
    subprocess.run([sys.executable, "-m", "serve.soak", "--clients", *asked], check=True)
    found = json.loads(figures.read_text())
    return Result(file, Counter(found["kinds"]), found["memory"], found["seconds"])


def be_clients(url: str, file: str, figures: str, requests: str, seed: str, longest: str, process: str) -> None:
    """Be the other process of `clients`."""
    load = put_under_load(
        url,
        int(requests),
        Path(file),
        seed=int(seed),
        max_tokens=24,
        longest=float(longest),
        process=int(process),
    )
    result = asyncio.run(load)
    found = {"kinds": result.kinds, "memory": result.memory, "seconds": result.seconds}
    Path(figures).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", default=None, help="a folder or smollm2; default: a tiny random model")
    parser.add_argument("--weights", default="auto", help="weights of the model, as in `load`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", nargs=7, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients:
        return be_clients(*arguments.clients)

    from cli.tiny import save_model

    limit_kernel_cache()
    with tempfile.TemporaryDirectory() as folder:
        target = arguments.model or str(save_model(Path(folder), layers=2))
        drafter = "auto" if arguments.model else "ngram"
        memory = 2**28 if arguments.model else 2**24

        def load() -> Engine:
            return dp.load(target, drafter, max_batch=8, kv_memory=memory, weights=arguments.weights)

        engine = load()
        touch_pools(engine)
        with serving(engine, max_body=MAX_BODY) as server:
            longest = 10 * WAIT if arguments.model else WAIT
            file = Path(folder) / "records"
            result = clients(server.url, arguments.requests, file, seed=arguments.seed, longest=longest)
            print(f"{arguments.requests} requests in {result.seconds:.0f} s: {dict(result.kinds)}")
            check(result, server, load(), arguments.requests)
            print("every completed text is the library's, and no page is taken")
            tenth = len(result.memory) // 10
            print(f"most MiB in each tenth: {[max(result.memory[i * tenth :][:tenth]) >> 20 for i in range(10)]}")
            print(f"growth after the first tenth: {check_memory(result.memory):+.2%}")


if __name__ == "__main__":
    sys.exit(main())
