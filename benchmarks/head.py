"""The head in the engine: tokens for each pass of the target, and its speed against plain decoding and transformers.

    python benchmarks/head.py [--head FOLDER] [--quick] [--out benchmarks/results/head.json]
    python benchmarks/head.py --only-passes --device cuda --target FOLDER --head FOLDER    # counts; many rows at once

Prompts of eight kinds that no training has seen (src/draftproof/train/held_out.jsonl). The counts are over all of them,
or on a CPU over as many as --seconds-a-cell allows, kinds taking turns. The times are over one or two prompts of each
kind, contenders taking turns on every prompt, medians of the ratio to plain decoding: drafts as long as `auto` says,
and what the kind of machine, its load and other processes do to one contender they do to its neighbour. On 2 idle cores
one run takes about 12 minutes; --quick takes 3 and says less.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import draftproof as dp
from draftproof.models.tokenizer import encode
from draftproof.train.evaluate import OVERALL, SAMPLINGS, Prompt, held_out, tallies

HERE = Path(__file__).parent
DRAFTED = 4
TREE_NODES = 7
CLOCKED = {"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}}


def cells() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name of the rule, of the sampling, and what `load` takes."""
    for rule in ("token", "block"):
        for sampling in SAMPLINGS:
            yield rule, sampling, {"rule": rule, "num_draft_tokens": DRAFTED}
    yield f"tree of {TREE_NODES}", "T=0", {"rule": "tree", "num_draft_tokens": TREE_NODES}


def passes(target: Any, words: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens for each pass of the target, by rule, sampling and kind."""
    table: dict[str, Any] = {}
    rows = options.rows or (64 if target.device.type == "cuda" else 8)
    for rule, sampling, how in cells():
        engine = dp.load(target, options.drafter, tokenizer=words, max_batch=rows, **how)
        found = tallies(
            engine, held_out(), SAMPLINGS[sampling], max_tokens=options.max_tokens, seed=options.seed,
            seconds=options.seconds_a_cell,
        )  # fmt: skip
        table.setdefault(rule, {})[sampling] = {kind: round(tally.per_pass, 3) for kind, tally in found.items()}
        whole = found[OVERALL]
        print(
            f"{rule:<10} {sampling:<16} {whole.per_pass:.3f}  ({whole.texts} texts, {whole.tokens} tokens)", flush=True
        )
    return table


@dataclass
class Times:
    """Of one contender: seconds a token for each prompt, and where the time went."""

    each_token: list[float] = field(default_factory=list)
    drafted: int = 0
    drafting: float = 0.0
    emitted: int = 0
    rounds: int = 0


def ours(engine: dp.Engine, sampling: dict[str, float], max_tokens: int, times: Times) -> Callable[[list[int]], int]:
    def call(tokens: list[int]) -> int:
        stats = engine.generate(tokens, seed=1, max_tokens=max_tokens, **sampling).stats
        times.drafted += stats.drafted
        times.drafting += stats.seconds["draft"]
        times.emitted += stats.emitted
        times.rounds += stats.rounds
        return stats.emitted

    return call


def theirs(model: Any, sampling: dict[str, float], max_tokens: int) -> Callable[[list[int]], int]:
    """transformers' own generate."""
    how = {"do_sample": False} if sampling["temperature"] == 0 else {"do_sample": True, **sampling, "top_k": 0}

    def call(tokens: list[int]) -> int:
        ids = torch.tensor([tokens], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **how)
        return out.shape[1] - len(tokens)

    return call


def clock(target: Any, words: Any, unpacked: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Contenders taking turns on every prompt, in an order that turns too."""
    prompts = held_out()[: 8 * options.prompts_of_a_kind]
    table = {}
    for name, sampling in CLOCKED.items():
        drafters = {"plain": None, "head": options.drafter, "suffix+head": f"suffix+{options.drafter}"}
        engines = {contender: dp.load(target, drafter, tokenizer=words) for contender, drafter in drafters.items()}
        times = {contender: Times() for contender in (*engines, "transformers")}
        calls = {
            contender: ours(engine, sampling, options.clocked_tokens, times[contender])
            for contender, engine in engines.items()
        }
        calls["transformers"] = theirs(unpacked, sampling, options.clocked_tokens)
        for call in calls.values():
            call(encode("Hello!", words))  # the first text of a process pays for all
        _take_turns(prompts, words, calls, times)
        table[name] = {contender: summary(times[contender], times["plain"]) for contender in calls}
        print(name, json.dumps(table[name]), flush=True)
    return table


def _take_turns(
    prompts: list[Prompt], words: Any, calls: dict[str, Callable[[list[int]], int]], times: dict[str, Times]
) -> None:
    order = list(calls)
    for n, prompt in enumerate(prompts):
        tokens = encode(prompt.text, words)
        for contender in order[n % len(order) :] + order[: n % len(order)]:
            start = time.perf_counter()
            said = calls[contender](tokens)
            times[contender].each_token.append((time.perf_counter() - start) / said)


def summary(times: Times, plain: Times) -> dict[str, float]:
    ratios = sorted(p / t for t, p in zip(times.each_token, plain.each_token, strict=True))
    quarter = len(ratios) // 4
    made = {
        "tokens_per_second": 1 / statistics.median(times.each_token),
        "against_plain": statistics.median(ratios),
        "quartiles": [ratios[quarter], ratios[-1 - quarter]],
    }
    if times.drafted:
        made["draft_ms_a_token"] = 1e3 * times.drafting / times.drafted
        made["tokens_per_pass"] = times.emitted / times.rounds
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument("--head", help="a folder; default: the head that is shipped")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only-passes", action="store_true", help="count, do not time")
    parser.add_argument("--rows", type=int, help="texts at once while counting")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a counted text")
    parser.add_argument("--seed", type=int, default=0, help="of the first counted text")
    parser.add_argument("--seconds-a-cell", type=float, help="default: no limit on a GPU, 45 on a CPU")
    parser.add_argument("--prompts-of-a-kind", type=int, default=2, help="timed")
    parser.add_argument("--clocked-tokens", type=int, default=64, help="of a timed text")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "head.json")
    options = parser.parse_args()
    if options.quick:
        options.seconds_a_cell, options.prompts_of_a_kind, options.clocked_tokens = 10.0, 1, 32
    options.drafter = f"head:{options.head}" if options.head else "head"
    if options.seconds_a_cell is None:
        options.seconds_a_cell = float("inf") if options.device.startswith("cuda") else 45.0
    result = measured(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    how = {"device": options.device, "dtype": torch.float32}
    loaded = dp.load(options.target, None, **how)
    result = {
        "command": "python benchmarks/head.py" + (" --only-passes" if options.only_passes else ""),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{os.cpu_count()} CPU cores",
        "threads": torch.get_num_threads(),
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "seconds_a_cell": None if options.seconds_a_cell == float("inf") else options.seconds_a_cell,
        "tokens_per_pass": passes(loaded.hf, loaded.tokenizer, options),
    }
    if not options.only_passes:
        unpacked = dp.load(options.target, None, **how, pack=False).hf
        result["prompts_of_a_kind"], result["clocked_tokens"] = options.prompts_of_a_kind, options.clocked_tokens
        result["clock"] = clock(loaded.hf, loaded.tokenizer, unpacked, options)
    return result


if __name__ == "__main__":
    main()
