"""Measure what drafting costs or gains a loaded server, against its own plain decoding, in many short turns.

    python benchmarks/serve_drafting.py [--clients 8 16 64] [--pairs 10] [--requests 2] [--max-tokens 48]
                                        [--weights float32] [--out benchmarks/results/serve_drafting.json]

Two servers of the bundled model run all the time and take turns: one with its head, one without a drafter. The first
also takes turns with requests that switch drafting off (`"drafter": false`). Turns of one server differ by a tenth and
more, because the machine's speed changes; turns one after the other differ by less. So a figure is the median
of the ratios of turns that follow each other, in alternating order, with a standard error from their quartiles: a
process that comes in between spoils single turns. Chats are greedy and streamed; all have a beginning of their own, so
that no prefix cache answers.
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftproof.models import bundled
from serve_cpu import FEWEST_REQUESTS, USAGE, Contender, load, model_of, prompts_of, running

DRAFTING, OFF, PLAIN = "drafting", "switched off", "no drafter"


def contenders(weights: str) -> dict[str, Contender]:
    """Return the requests that are compared; those with one command go to one server."""
    ours = (sys.executable, "-m", "draftproof.cli", "serve", "--port", "{port}", "--max-batch", "64")
    ours += ("--weights", weights)
    return {
        DRAFTING: Contender(ours, USAGE),
        OFF: Contender(ours, USAGE | {"drafter": False}),
        PLAIN: Contender((*ours, "--drafter", "none"), USAGE),
    }


def speed(url: str, contender: Contender, prompts: list[str], clients: int, max_tokens: int) -> float:
    """Return the tokens per second of one turn."""
    model = model_of("draftproof", url)
    answers, seconds = asyncio.run(load(url, model, prompts, clients, max_tokens, contender.fields))
    return float(sum(answer.tokens for answer in answers) / seconds)


def ratio(turns: Sequence[dict[str, float]], name: str, other: str) -> dict[str, float]:
    """Return the median of the ratios of two contenders' speeds, and its standard error."""
    ratios = [turn[name] / turn[other] for turn in turns]
    low, median, high = statistics.quantiles(ratios, n=4)
    spread = (high - low) / 1.349  # the standard deviation of a normal distribution with these quartiles
    return {"median": median, "standard error": 1.253 * spread / math.sqrt(len(ratios))}


def measure(urls: dict[str, str], asked: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Return the speeds of all turns with so many clients, and the ratios."""
    entrants, turns = contenders(asked.weights), []
    for turn in range(-1, asked.pairs):  # the first turn compiles, allocates and packs
        names, speeds = list(entrants) if turn % 2 else list(entrants)[::-1], {}
        for name in names:
            label = f"{clients}.{turn}.{list(entrants).index(name)}"
            prompts = prompts_of(label, max(clients * asked.requests, FEWEST_REQUESTS), asked.longest)
            speeds[name] = speed(urls[name], entrants[name], prompts, clients, asked.max_tokens)
        if turn >= 0:
            turns.append(speeds)
    found = {f"{DRAFTING} / {other}": ratio(turns, DRAFTING, other) for other in (PLAIN, OFF)}
    medians = {name: statistics.median(turn[name] for turn in turns) for name in entrants}
    return {**found, "tokens/s": medians, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--pairs", type=int, default=10, help="turns of each contender")
    parser.add_argument("--requests", type=int, default=2, help="requests of each client in a turn")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=600, help="characters of the longest prompt")
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    bundled.fetch(progress=False)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[tuple[str, ...], str] = {}
        urls: dict[str, str] = {}
        for name, contender in contenders(asked.weights).items():
            if contender.command not in servers:
                log = logs / f"{len(servers)}.log"
                servers[contender.command] = stack.enter_context(running(contender, log))
            urls[name] = servers[contender.command]
        for clients in asked.clients:
            found[f"{clients} clients"] = figures = measure(urls, asked, clients)
            shown = {name: value for name, value in figures.items() if name != "turns"}
            print(f"{clients} clients: {json.dumps(shown)}", flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
