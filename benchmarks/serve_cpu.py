"""Measure servers on a CPU under load: draftproof serve, transformers serve and vLLM, with one load generator.

    python benchmarks/serve_cpu.py [--clients 1 8 16 64] [--turns 3] [--requests 2] [--max-tokens 64]
                                   [--only draftproof "draftproof plain"] [--out benchmarks/results/serve_cpu]

The bundled model in float32 (and ours in four bits, its default), greedy chats, streamed. A client sends its next
request when its last one has ended. All servers run during the whole benchmark, and take turns in rotating order; an
idle one costs memory only. The requests
of a turn are the same for all, and no two requests begin alike after the template's own words, so that no prefix cache
answers. A server that is not installed or does not start is left out with a sentence. Our server and the load generator
need `pip install "draftproof[serve]"`. The others may live in environments of their own: `--vllm` is a Python with vLLM
(default: that of `make test-vllm`), `--transformers` one with transformers, fastapi, uvicorn and accelerate. The load
generator runs on the same cores as the servers.

Figures: tokens per second of all clients together; time to first token; time between two pieces of text, of which one
may hold several tokens; and time per token, from a text's first piece to its last. Ratios are medians over turns of
ratios within a turn. Results are written as JSON and as Markdown.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from draftproof.bench.prompts import read
from draftproof.models import bundled

HERE = Path(__file__).parent
VLLM = HERE.parent / ".venv-vllm" / "bin" / "python"
START_SECONDS = 300
"""A server that does not answer /health within this time is left out."""
REQUEST_SECONDS = 1800
FEWEST_REQUESTS = 4
"""Requests of a turn with few clients: one alone would tell little."""
USAGE = {"stream_options": {"include_usage": True}}
"""Asks for the number of tokens at the end of a stream; transformers sends it unasked, and refuses the field."""
OURS = "draftproof"
PLACES = ("out", "vllm", "transformers")
"""Options that say where things are on this machine; they are not written down with the figures."""


@dataclass(frozen=True)
class Contender:
    """A server and the fields that its requests add. Each has its own process, and so its own prefix cache."""

    command: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def contenders(folder: str, asked: argparse.Namespace) -> dict[str, Contender]:
    """Return all contenders; {port} in a command is filled in later."""
    ours = (sys.executable, "-m", "draftproof.cli", "serve", "--port", "{port}", "--max-batch", "64")
    theirs = (asked.transformers, "-m", "transformers.cli.transformers", "serve", folder, "--port", "{port}")
    theirs += ("--dtype", "float32", "--device", "cpu")
    batching = ("--continuous-batching", "--cb-num-blocks", "128", "--cb-max-batch-tokens", "512")  # of 256 tokens
    vllm = (asked.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", "{port}")
    vllm += ("--max-model-len", "2048", "--dtype")
    ngram = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1})
    cpu = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(asked.cores),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",  # without ours
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return {
        OURS: Contender((*ours, "--weights", "float32"), USAGE),
        f"{OURS} plain": Contender((*ours, "--weights", "float32", "--drafter", "none"), USAGE),
        f"{OURS} int4": Contender((*ours, "--weights", "int4"), USAGE),
        "transformers": Contender(theirs),
        "transformers, continuous batching": Contender((*theirs, *batching)),
        "vLLM": Contender((*vllm, "float32"), USAGE, cpu),
        "vLLM, n-gram": Contender((*vllm, "float32", "--speculative-config", ngram), USAGE, cpu),
        "vLLM, bfloat16": Contender((*vllm, "bfloat16"), USAGE, cpu),
    }


# ------------------------------------------------------------------------------------------------------------- servers


@contextmanager
def running(contender: Contender, log: Path) -> Iterator[str]:
    """Start a server, and yield its URL when it answers; end it after the block."""
    if shutil.which(contender.command[0]) is None:
        raise RuntimeError(f"{Path(contender.command[0]).name} is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.replace("{port}", str(port)) for part in contender.command]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **contender.environment}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"it ended with status {process.returncode}: {lines[-1][:300] if lines else 'no output'}"
            )
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"it did not answer within {START_SECONDS} s")


# ------------------------------------------------------------------------------------------------------ load generator


@dataclass
class Answer:
    """One answer: when its pieces came (seconds after the request), its tokens and its text."""

    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int, fields: dict[str, Any]) -> Answer:
    """Stream one chat."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    answer, start = Answer(), time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body | fields) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(f"the stream ended with an error: {event['error']}")
            text = "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices", ()))
            if text:
                answer.pieces.append(time.perf_counter() - start)
                answer.text += text
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    if not answer.tokens:
        raise RuntimeError("the server did not report usage, or emitted no token")
    return answer


async def load(
    url: str, model: str, prompts: Sequence[str], clients: int, max_tokens: int, fields: dict[str, Any]
) -> Any:
    """Send all prompts from so many clients, each its next one when its last has ended; return answers and seconds."""
    answers: list[Answer | None] = [None] * len(prompts)
    queue = iter(range(len(prompts)))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits) as client:

        async def work() -> None:
            for i in queue:
                answers[i] = await ask(client, prompts[i], max_tokens, {"model": model} | fields)

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        return answers, time.perf_counter() - start


@dataclass(frozen=True)
class Cell:
    """Figures of one contender under one load in one turn. Times are in milliseconds."""

    tokens_per_second: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float
    per_token_p50: float
    per_token_p99: float
    tokens: int
    texts: list[str]

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> "Cell":
        first = [a.pieces[0] for a in answers if a.pieces]
        between = [later - earlier for a in answers for earlier, later in zip(a.pieces, a.pieces[1:], strict=False)]
        per_token = [(a.pieces[-1] - a.pieces[0]) / (a.tokens - 1) for a in answers if a.pieces and a.tokens > 1]
        tokens = sum(a.tokens for a in answers)
        figures = [1000 * quantile(times, q) for times in (first, between, per_token) for q in (0.5, 0.99)]
        return cls(tokens / seconds, *figures, tokens, [a.text for a in answers])


def quantile(values: Sequence[float], q: float) -> float:
    """Return the value at rank ⌈q·n⌉."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(-(-q * len(ordered) // 1)) - 1))] if ordered else float("nan")


def prompts_of(turn: str, count: int, longest: int) -> list[str]:
    """Return the prompts of a turn, all kinds in alternation, each with a beginning of its own."""
    kinds: dict[str, list[str]] = {}
    for prompt in read():
        if len(prompt.prompt) <= longest:
            kinds.setdefault(prompt.kind, []).append(prompt.prompt)
    mixed = [group[i] for i in range(max(map(len, kinds.values()))) for group in kinds.values() if i < len(group)]
    return [f"[{turn}.{i}] {mixed[i % len(mixed)]}" for i in range(count)]


# ------------------------------------------------------------------------------------------------------------- results


Cells = dict[int, dict[str, list[Cell]]]
"""Figures by number of clients, contender and turn."""


def model_of(name: str, url: str) -> str:
    """Return the model's name in requests. transformers lists what the hub's cache has, and serves a folder."""
    if name.startswith("transformers"):
        return str(bundled.folder())
    return str(httpx.get(f"{url}/v1/models").json()["data"][0]["id"])


def measure(
    urls: dict[str, str], entrants: dict[str, Contender], asked: argparse.Namespace, left_out: dict[str, str]
) -> Iterator[Cells]:
    """Yield the figures so far after each number of clients. A contender that fails at the warm-up is left out."""
    models = {name: model_of(name, url) for name, url in urls.items()}
    cells: Cells = {}
    for name in urls:  # the first request compiles, allocates and packs
        try:
            _run(name, urls, models, entrants, prompts_of("warm-up", 2, asked.longest), 2, asked.max_tokens)
        except (RuntimeError, httpx.HTTPError) as error:
            left_out[name] = f"{type(error).__name__}: {error}"
            print(f"left out: {name}: {left_out[name]}", flush=True)
    names = [name for name in urls if name not in left_out]
    for clients in asked.clients:
        cells[clients] = {name: [] for name in names}
        for turn in range(asked.turns):
            count = max(clients * asked.requests, FEWEST_REQUESTS)
            prompts = prompts_of(f"{clients}.{turn}", count, asked.longest)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                cell = _run(name, urls, models, entrants, prompts, clients, asked.max_tokens)
                cells[clients][name].append(cell)
                print(
                    f"{clients:3d} clients, turn {turn}: {name:34s} {cell.tokens_per_second:8.1f} tokens/s", flush=True
                )
        yield cells


def _run(
    name: str, urls: dict[str, str], models: dict[str, str], entrants: dict[str, Contender], prompts: list[str],
    clients: int, max_tokens: int,
) -> Cell:  # fmt: skip
    answers, seconds = asyncio.run(load(urls[name], models[name], prompts, clients, max_tokens, entrants[name].fields))
    return Cell.of(answers, seconds)


def ratio(cells: dict[str, list[Cell]], name: str, other: str) -> float:
    """Return the median over turns of the ratio of two contenders' tokens per second."""
    pairs = zip(cells[name], cells[other], strict=True)
    return statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)


def same_texts(cells: dict[str, list[Cell]], name: str, other: str) -> float:
    """Return the share of texts that two contenders have in common."""
    pairs = [
        (a, b) for x, y in zip(cells[name], cells[other], strict=True) for a, b in zip(x.texts, y.texts, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def median(turns: Sequence[Cell], figure: str) -> float:
    return statistics.median(getattr(cell, figure) for cell in turns)


def as_json(cells: Cells, left_out: dict[str, str], asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "asked": {name: value for name, value in vars(asked).items() if name not in PLACES},
        "versions": {name: version(name) for name in ("draftproof", "torch", "transformers", "httpx")},
        "python": platform.python_version(),
        "cores": asked.cores,
        "left_out": left_out,
        "clients": {
            clients: {
                name: {
                    **{f: median(turns, f) for f in Cell.__dataclass_fields__ if f != "texts"},
                    "turns": [{k: v for k, v in asdict(cell).items() if k != "texts"} for cell in turns],
                    "same_texts": same_texts(table, name, next(iter(table))),
                }
                for name, turns in table.items()
            }
            for clients, table in cells.items()
        },
        "ratios": {
            clients: {o: ratio(table, OURS, o) for o in table if OURS in table} for clients, table in cells.items()
        },
    }


def as_markdown(cells: Cells, left_out: dict[str, str]) -> str:
    head = "| clients | server | tokens/s | first token, p50 / p99 | between pieces, p50 / p99 | per token, p50 / p99 |"
    lines = [
        "# Servers under load",
        "",
        "Times in milliseconds; medians over turns.",
        "",
        head,
        "|---|---|---|---|---|---|",
    ]
    for clients, table in cells.items():
        for name, turns in table.items():
            times = [
                f"{median(turns, f'{kind}_p50'):.0f} / {median(turns, f'{kind}_p99'):.0f}"
                for kind in ("first", "between", "per_token")
            ]
            lines.append(f"| {clients} | {name} | {median(turns, 'tokens_per_second'):.1f} | {' | '.join(times)} |")
    if any(OURS in table for table in cells.values()):
        others = [name for name in next(iter(cells.values())) if name != OURS]
        lines += [
            "",
            f"## {OURS} against …",
            "",
            f"| clients | {' | '.join(others)} |",
            "|---" * (1 + len(others)) + "|",
        ]
        for clients, table in cells.items():
            lines.append(f"| {clients} | {' | '.join(f'{ratio(table, OURS, o):.2f} ×' for o in others)} |")
    lines += ["", *(f"Left out: {name}: {why}." for name, why in left_out.items())]
    return "\n".join(lines).rstrip() + "\n"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2, help="requests of each client in a turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1200, help="characters of the longest prompt")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders to run; all by default")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vllm", default=str(VLLM), help="the Python of vLLM")
    parser.add_argument("--transformers", default=sys.executable, help="the Python of transformers serve")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serve_cpu", help="without suffix")
    return parser.parse_args()


def main() -> None:
    asked = parsed()
    entrants = contenders(str(bundled.fetch(progress=False)), asked)
    unknown = set(asked.only or ()) - set(entrants)
    if unknown:
        raise SystemExit(
            f"there is no {', '.join(map(repr, sorted(unknown)))}; there are {', '.join(map(repr, entrants))}"
        )
    entrants = {name: entrants[name] for name in entrants if not asked.only or name in asked.only}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls: dict[str, str] = {}
        for i, (name, contender) in enumerate(entrants.items()):
            try:
                urls[name] = stack.enter_context(running(contender, logs / f"{i}.log"))
            except RuntimeError as error:
                left_out[name] = str(error)
                print(f"left out: {name}: {error}", flush=True)
        if not urls:
            raise SystemExit("no server could be started")
        for cells in measure(urls, entrants, asked, left_out):
            asked.out.with_suffix(".json").write_text(json.dumps(as_json(cells, left_out, asked), indent=1) + "\n")
            asked.out.with_suffix(".md").write_text(as_markdown(cells, left_out))
    print(asked.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
