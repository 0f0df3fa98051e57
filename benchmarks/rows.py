"""Measure rows that come and go: entering and leaving, prompts read beside others, mixed requests, second turns.

    python benchmarks/rows.py [--old FOLDER] [--only NAME ...] [--out benchmarks/results/rows_cpu.json]

--old is a checkout of commit 88e0ab6, whose `Batch` copied the cache when rows came and went: mixed requests run there
and here in turns, each time in a process of its own. SmolLM2 on a CPU. Times are of this machine and ratios are what
counts; on 2 idle cores all parts take about 15 minutes.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import draftproof as dp

HERE = Path(__file__).parent
WORDS = "the lighthouse keeper found a message in an old bottle and read it aloud to the quiet sea before dawn".split()  # noqa: SIM905
CHATS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Name five rivers in Europe, and say where each one ends.",
    "What should I cook with rice, eggs and spinach?",
)


def text(words: int, seed: int) -> str:
    """Return a text of so many words, unlike that of any other seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(10)) for _ in range(words))


def prompt(tokenizer: Any, tokens: int, seed: int) -> list[int]:
    """Return a prompt of exactly so many tokens."""
    ids: list[int] = tokenizer(text(tokens, seed))["input_ids"][:tokens]
    return ids


def entering_and_leaving() -> dict[str, Any]:
    """Time a row that enters and leaves a pool of 64 rows with room for 1024 tokens each, without an allocation."""
    from draftproof.models.loading import LoadOptions, as_model, load_model
    from draftproof.models.rows import PooledRows

    hf, _ = load_model("smollm2", LoadOptions(weights="float32"))
    rows = PooledRows(as_model(hf), 64 * 16 + 16)
    for name in range(64):
        rows.enter(name, 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for name in range(64, 1064):
        start = time.perf_counter()
        rows.leave(name - 64)
        rows.enter(name, 1024)
        times.append(time.perf_counter() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"microseconds, median": 1e6 * statistics.median(times), "microseconds, p99": 1e6 * sorted(times)[989],
            "memory grown, KiB": grown}  # fmt: skip


def beside_a_long_prompt() -> dict[str, Any]:
    """Time the rounds of 15 rows with and without a prompt of 4000 tokens beside them, and its first token."""
    engine = dp.load(drafter=None, max_batch=16, kv_memory=4 * 2**30, weights="float32")
    long = prompt(engine.tokenizer, 4000, 99)

    def first_token(seed: int) -> float:
        """Read the long prompt with nobody else, and return the time to its first token."""
        start = time.perf_counter()
        engine.generate([seed, *long[1:]], temperature=0, max_tokens=1)
        return time.perf_counter() - start

    def rounds(seed: int, *, with_long: bool = False) -> tuple[list[float], float]:
        """Run 15 rows, and return the times between the rounds of one of them, and the long prompt's first token."""
        between: list[float] = []
        with engine.service() as service:
            others = [
                service.submit(text_ids, temperature=1.0, max_tokens=400, num_draft_tokens=0)
                for text_ids in (prompt(engine.tokenizer, 100, 15 * seed + i) for i in range(15))
            ]
            watched = iter(others[0])
            for _ in range(3):
                next(watched)
            first = 0.0
            start = time.perf_counter()
            stream = service.submit([200 + seed, *long[1:]], temperature=0, max_tokens=1) if with_long else None
            last = time.perf_counter()
            while not stream._has_ended() if stream is not None else len(between) < 60:
                next(watched)
                now = time.perf_counter()
                between.append(now - last)
                last = now
            first = time.perf_counter() - start
            for each in others:
                each.cancel()
        return between, first

    first_token(3)
    without, beside, ratios, alone = [], [], [], []
    for turn in range(4):  # the p99 of one prompt's rounds would be the second largest of them
        without += rounds(4 * turn)[0]
        times, first = rounds(4 * turn + 1, with_long=True)
        beside += times
        alone.append(first_token(100 + turn))
        ratios.append(first / alone[-1])
    p50 = statistics.median(without)
    p99 = sorted(beside)[int(0.99 * (len(beside) - 1))]
    return {
        "p50 between rounds without it, ms": 1e3 * p50,
        "p99 beside it, ms": 1e3 * p99,
        "p99 / p50": p99 / p50,
        "its first token alone, s": statistics.median(alone),
        "beside / alone": statistics.median(ratios),
        "beside / alone, range": [min(ratios), max(ratios)],
    }


def requests(tokenizer: Any, count: int) -> tuple[list[list[int]], list[int]]:
    """Return mixed requests: prompts of 10 to 1500 tokens, outputs of 5 to 200."""
    rng = random.Random(1)
    sizes = [(rng.randint(10, 1500), rng.randint(5, 200)) for _ in range(count)]
    return [prompt(tokenizer, n, i) for i, (n, _) in enumerate(sizes)], [out for _, out in sizes]


def contender(count: int, drafter: str | None, batch: int) -> dict[str, Any]:
    """Run mixed requests with whichever draftproof is on the path; the API is that of both commits."""
    torch.set_num_threads(2)
    more = {"kv_memory": 2**31, "weights": "float32"} if hasattr(dp.Engine, "service") else {}
    params = getattr(dp, "SamplingParams", None) or dp.Sampling  # its name at the old commit
    engine = dp.load(drafter=drafter, max_batch=batch, **more)
    prompts, outs = requests(engine.tokenizer, count)
    engine.generate([prompts[0][:20]] * 2, temperature=0, max_tokens=4)
    start = time.perf_counter()
    outputs = engine.generate(prompts, [params(temperature=1.0)] * count, max_tokens=outs)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.tokens) for output in outputs)
    failed = [output.error for output in outputs if output.finish_reason == "error"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "tokens": tokens, "tokens/s": tokens / seconds, "peak bytes": peak, "failed": failed}


def mixed(old: Path | None, count: int, batch: int, turns: int) -> dict[str, Any]:
    """Run mixed requests here and at the old commit, in turns."""
    here = Path(dp.__file__).parents[1]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(turns):
        for name, folder in (("new", here), ("old", old)):
            if folder is None:
                continue
            source = folder if name == "new" else folder / "src"
            command = [sys.executable, __file__, "--contender", str(count), "--batch", str(batch)]
            run = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=False
            )
            if run.returncode:
                raise RuntimeError(run.stderr[-2000:])
            found.setdefault(name, []).append(json.loads(run.stdout.splitlines()[-1]))
            print(name, found[name][-1], flush=True)
    speeds = {name: statistics.median(run["tokens/s"] for run in runs) for name, runs in found.items()}
    ratio = {"new / old": speeds["new"] / speeds["old"]} if "old" in speeds else {}
    return {"runs": found, "tokens/s": speeds, **ratio}


def under_load() -> dict[str, Any]:
    """Compare "auto" lengths with plain decoding for 1, 4, 16 and 64 rows, unseeded, in turns; medians of the ratio."""
    found: dict[str, Any] = {}
    for drafter in ("head", "ngram"):
        engine = dp.load(drafter=drafter, max_batch=64, kv_memory=2**31, weights="float32")
        for rows in (1, 4, 16, 64):
            prompts = [prompt(engine.tokenizer, 40, 1000 * rows + i) for i in range(rows)]
            ratios = []
            for turn in range(11 if rows <= 4 else 4):  # few rows emit few tokens, and their ratios differ by a tenth
                speeds = {}
                for drafting in (True, False) if turn % 2 else (False, True):
                    start = time.perf_counter()
                    outputs = engine.generate(prompts, temperature=0.8, max_tokens=32, drafter=drafting)
                    speeds[drafting] = sum(len(o.tokens) for o in outputs) / (time.perf_counter() - start)
                ratios.append(speeds[True] / speeds[False])
            found[f"{drafter}, {rows} rows"] = statistics.median(ratios[1:])
    return found


def callers() -> dict[str, Any]:
    """Compare "auto" lengths with plain decoding for 8, 16 and 64 callers that come and go, in turns.

    Each asks in a chat, streams 48 tokens, and asks again: prompts are read beside rows that decode.
    """
    engine = dp.load(drafter="head", max_batch=64, kv_memory=2**31, weights="float32")
    return {f"head, {count} callers": _callers(engine, count, turns) for count, turns in ((8, 9), (16, 9), (64, 5))}


def _callers(engine: dp.Engine, count: int, turns: int) -> dict[str, Any]:
    """Return the median over turns of the speed with drafts as a multiple of the speed without, and its range."""
    ratios = []
    for turn in range(turns):
        order = (True, False) if turn % 2 else (False, True)
        speeds = {drafting: _speed(engine, count, drafting, f"{turn} {drafting}") for drafting in order}
        ratios.append(speeds[True] / speeds[False])
    return {"median": statistics.median(ratios[1:]), "range": [min(ratios[1:]), max(ratios[1:])]}


def _speed(engine: dp.Engine, count: int, drafting: bool, label: str) -> float:
    """Return the tokens per second of callers that ask three questions each, one after another."""
    emitted = [0] * count

    def call(service: Any, caller: int) -> None:
        for turn in range(3):
            question = f"{CHATS[(caller + turn) % len(CHATS)]} (Note {label}, {caller}, {turn}.)"
            chat = [{"role": "user", "content": question}]
            stream = service.submit(chat, temperature=0, max_tokens=48, drafter=drafting)
            emitted[caller] += sum(len(chunk.tokens) for chunk in stream)

    with engine.service() as service, ThreadPoolExecutor(count) as pool:
        start = time.perf_counter()
        for done in [pool.submit(call, service, caller) for caller in range(count)]:
            done.result()
        return sum(emitted) / (time.perf_counter() - start)


def memory() -> dict[str, Any]:
    """Serve 1000 requests and report how the process grows: a pool takes memory when it is first written to."""
    engine = dp.load(drafter="ngram", max_batch=16, kv_memory=2**28, weights="float32")
    rng, sizes = random.Random(3), []
    for start in range(0, 1000, 50):
        prompts = [prompt(engine.tokenizer, rng.randint(5, 120), start + i) for i in range(50)]
        engine.generate(prompts, temperature=1.0, max_tokens=[rng.randint(1, 8) for _ in prompts])
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    after = {f"bytes after {n}": sizes[n // 50 - 1] for n in (50, 200, 400, 600, 800, 1000)}
    return {**after, "growth over the last 400 requests": sizes[-1] / sizes[11] - 1}


def second_turn() -> dict[str, Any]:
    """Time the first token of a chat's first and second turn, on a conversation of about 1000 tokens."""
    engine = dp.load(drafter=None, max_batch=2, kv_memory=2**30, weights="float32")
    ratios, first_turns = [], []
    for seed in range(3):
        messages = [{"role": "user", "content": text(440, seed)}]

        def first(turns: list[dict[str, str]]) -> float:
            start = time.perf_counter()
            stream = engine.stream(turns, temperature=0, max_tokens=40)
            next(stream)
            seconds = time.perf_counter() - start
            reply = "".join(chunk.text for chunk in stream)
            turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
            return seconds

        one = first(messages)
        two = first(messages)
        ratios.append(two / one)
        first_turns.append(one)
    tokens = engine.generate(messages, temperature=0, max_tokens=1).stats.cached_tokens
    return {"first turn, s": statistics.median(first_turns), "second / first": statistics.median(ratios),
            "cached tokens in the third turn": tokens}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="checkout of commit 88e0ab6")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--contender", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contender(options.contender, None, options.batch)))
        return
    torch.set_num_threads(2)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "entering": entering_and_leaving,
        "second turn": second_turn,
        "long prompt": beside_a_long_prompt,
        "load": under_load,
        "callers": callers,
        "memory": memory,
        "mixed": lambda: mixed(options.old, options.requests, options.batch, options.turns),
    }
    found = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for name, run in parts.items():
        if not options.only or name in options.only:
            found[name] = run()
            print(name, json.dumps(found[name], indent=1), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
