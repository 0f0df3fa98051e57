"""Measure a head in the engine: tokens per target pass, and speed against plain decoding and transformers.

    python benchmarks/head.py [--head FOLDER] [--quick] [--out benchmarks/results/head.json]
    python benchmarks/head.py --only-passes --device cuda --target FOLDER --head FOLDER    # counts, many rows
    python benchmarks/head.py --four-bits    # counts on four-bit weights against float32, prompt by prompt

Prompts are of eight kinds, and no training has used them (src/draftproof/train/held_out.jsonl). The counts are over
all of them, or on a CPU over as many as --seconds-a-cell allows, kinds in alternation. The times are over one or two
prompts of each kind, with draft lengths chosen by `auto`, as medians of the ratio to plain decoding. The decoders
alternate on every prompt, so that machine load affects all of them alike. On 2 idle cores a run takes about 12 minutes;
--quick takes 3 and is less precise.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers

import draftproof as dp
from draftproof.models.tokenizer import encode
from draftproof.train.evaluate import OVERALL, SAMPLINGS, Prompt, count_passes, held_out_prompts

HERE = Path(__file__).parent
DRAFT_TOKENS = 4
TREE_NODES = 7
FOUR_BIT_SAMPLINGS = {"T=0": {"temperature": 0.0}, "T=0.8": {"temperature": 0.8}}
TIMED_SAMPLINGS = {"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}}


def cells() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the cells to count: the rule's name, the sampling's name, and the options of `load`."""
    for rule in ("token", "block"):
        for sampling in SAMPLINGS:
            yield rule, sampling, {"rule": rule, "num_draft_tokens": DRAFT_TOKENS}
    yield f"tree of {TREE_NODES}", "T=0", {"rule": "tree", "num_draft_tokens": TREE_NODES}


def passes(target: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Count tokens per target pass, by rule, sampling and kind."""
    table: dict[str, Any] = {}
    rows = options.rows or (64 if target.device.type == "cuda" else 8)
    for rule, sampling, load_options in cells():
        engine = dp.load(target, options.drafter, tokenizer=tokenizer, max_batch=rows, **load_options)
        counts = count_passes(
            engine, held_out_prompts(), SAMPLINGS[sampling], max_tokens=options.max_tokens, seed=options.seed,
            seconds=options.seconds_a_cell,
        )  # fmt: skip
        table.setdefault(rule, {})[sampling] = {kind: round(count.per_pass, 3) for kind, count in counts.items()}
        overall = counts[OVERALL]
        print(
            f"{rule:<10} {sampling:<16} {overall.per_pass:.3f}  ({overall.texts} texts, {overall.tokens} tokens)",
            flush=True,
        )
    return table


def four_bits(options: argparse.Namespace) -> dict[str, Any]:
    """Count tokens per target pass on four-bit weights and on float32, and compare them prompt by prompt."""
    prompts = held_out_prompts() + held_out_prompts(Path(str(files("draftproof.bench") / "prompts.jsonl")))
    table: dict[str, Any] = {}
    for name, sampling in FOUR_BIT_SAMPLINGS.items():
        outputs = {
            weights: dp.load(
                options.target, options.drafter, weights=weights, num_draft_tokens=DRAFT_TOKENS,
                max_batch=options.rows or 8,
            ).generate(
                [prompt.text for prompt in prompts],
                [dp.SamplingParams(**sampling, seed=options.seed + n) for n in range(len(prompts))],
                max_tokens=options.max_tokens,
            )
            for weights in ("int4", "float32")
        }  # fmt: skip
        table[name] = compared(*outputs.values())
        print(name, json.dumps(table[name]), flush=True)
    return table


def compared(some: list[dp.Output], others: list[dp.Output]) -> dict[str, float]:
    """Return tokens per pass of both, their ratio as the geometric mean over prompts, and its standard error."""
    logs = [math.log(a.stats.tokens_per_pass / b.stats.tokens_per_pass) for a, b in zip(some, others, strict=True)]
    ratio = math.exp(statistics.mean(logs))
    totals = [sum(o.stats.emitted for o in side) / sum(o.stats.rounds for o in side) for side in (some, others)]
    return {
        "prompts": len(logs),
        "int4": round(totals[0], 3),
        "float32": round(totals[1], 3),
        "ratio": round(ratio, 4),
        "standard_error": round(ratio * statistics.stdev(logs) / math.sqrt(len(logs)), 4),
    }


@dataclass
class Times:
    """One decoder's seconds per token for each prompt, and its draft statistics."""

    each_token: list[float] = field(default_factory=list)
    drafted: int = 0
    drafting: float = 0.0
    emitted: int = 0
    rounds: int = 0


def engine_call(
    engine: dp.Engine, sampling: dict[str, float], max_tokens: int, times: Times
) -> Callable[[list[int]], int]:
    """Return a function that generates with the engine and returns the number of tokens."""

    def call(tokens: list[int]) -> int:
        stats = engine.generate(tokens, seed=1, max_tokens=max_tokens, **sampling).stats
        times.drafted += stats.drafted
        times.drafting += stats.seconds["draft"]
        times.emitted += stats.emitted
        times.rounds += stats.rounds
        return stats.emitted

    return call


def transformers_call(model: Any, sampling: dict[str, float], max_tokens: int) -> Callable[[list[int]], int]:
    """Return a function that generates with transformers and returns the number of tokens."""
    options = {"do_sample": False} if sampling["temperature"] == 0 else {"do_sample": True, **sampling, "top_k": 0}

    def call(tokens: list[int]) -> int:
        ids = torch.tensor([tokens], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **options)
        return out.shape[1] - len(tokens)

    return call


def time_decoders(target: Any, tokenizer: Any, unpacked: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Time the decoders in alternation on every prompt, in rotating order."""
    prompts = held_out_prompts()[: 8 * options.prompts_of_a_kind]
    table = {}
    for name, sampling in TIMED_SAMPLINGS.items():
        drafters = {"plain": None, "head": options.drafter, "suffix+head": f"suffix+{options.drafter}"}
        engines = {decoder: dp.load(target, drafter, tokenizer=tokenizer) for decoder, drafter in drafters.items()}
        times = {decoder: Times() for decoder in (*engines, "transformers")}
        calls = {
            decoder: engine_call(engine, sampling, options.clocked_tokens, times[decoder])
            for decoder, engine in engines.items()
        }
        calls["transformers"] = transformers_call(unpacked, sampling, options.clocked_tokens)
        for call in calls.values():
            call(encode("Hello!", tokenizer))  # the first text of a process includes one-time costs
        _alternate(prompts, tokenizer, calls, times)
        table[name] = {decoder: summary(times[decoder], times["plain"]) for decoder in calls}
        print(name, json.dumps(table[name]), flush=True)
    return table


def _alternate(
    prompts: list[Prompt], tokenizer: Any, calls: dict[str, Callable[[list[int]], int]], times: dict[str, Times]
) -> None:
    order = list(calls)
    for n, prompt in enumerate(prompts):
        tokens = encode(prompt.text, tokenizer)
        for decoder in order[n % len(order) :] + order[: n % len(order)]:
            start = time.perf_counter()
            count = calls[decoder](tokens)
            times[decoder].each_token.append((time.perf_counter() - start) / count)


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
    parser.add_argument("--four-bits", action="store_true", help="only compare counts on int4 and float32 weights")
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
    if options.four_bits:
        four_bits(options)
        return
    if options.seconds_a_cell is None:
        options.seconds_a_cell = float("inf") if options.device.startswith("cuda") else 45.0
    result = measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    common = {"device": options.device, "dtype": torch.float32}
    loaded = dp.load(options.target, None, **common)
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
        unpacked = dp.load(options.target, None, **common, pack=False).hf
        result["prompts_of_a_kind"], result["clocked_tokens"] = options.prompts_of_a_kind, options.clocked_tokens
        result["clock"] = time_decoders(loaded.hf, loaded.tokenizer, unpacked, options)
    return result


if __name__ == "__main__":
    main()
