"""Measure the engine on a CPU with the bundled model, against its own plain decoding and transformers, in one run.

    python benchmarks/engine_cpu.py [--limit 2] [--max-tokens 80] [--out benchmarks/results/engine_cpu.json]

Greedy, one prompt at a time, prompts of six kinds (src/draftproof/bench/prompts.jsonl). The contenders take turns on
every prompt in rotating order. A kind's figure is the median over its prompts of the ratio to plain decoding, prefill
included, with its lowest and highest value. All contenders must generate the same text, and the run checks that. Also
measured: the cost of a pass over several tokens, and the share of a round outside the model. About nine minutes on two
idle cores.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import draftproof as dp
from draftproof.bench.prompts import pick, read
from draftproof.models import bundled

HERE = Path(__file__).parent

OURS = ("plain", "ngram", "suffix")

MORE = {"chat": 2, "code-editing": 2, "summarising": 4}
"""Factors on the number of prompts, for the kinds with the boldest claims and the largest spread."""


@dataclass(frozen=True, slots=True)
class Said:
    """A contender's text, its speed, and its number of passes if known."""

    tokens: list[int]
    tokens_per_second: float
    passes: int | None


Contender = Callable[[list[int], int], tuple[list[int], int | None]]


def peer(model: Any, **options: Any) -> Contender:
    """Return a contender that calls transformers' own generate, greedily."""

    def call(tokens: list[int], max_tokens: int) -> tuple[list[int], None]:
        ids = torch.tensor([tokens])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **options
        )
        return out[0, len(tokens) :].tolist(), None

    return call


def ours(engine: dp.Engine) -> Contender:
    def call(tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
        output = engine.generate(tokens, temperature=0, max_tokens=max_tokens)
        return output.tokens, output.stats.rounds

    return call


def contenders() -> tuple[dict[str, Contender], dict[str, dp.Engine]]:
    theirs, _ = bundled.load()
    engines = {name: dp.load(drafter=None if name == "plain" else name, weights="float32") for name in OURS}
    calls = {"transformers": peer(theirs), "transformers prompt lookup": peer(theirs, prompt_lookup_num_tokens=10)}
    return calls | {name: ours(engine) for name, engine in engines.items()}, engines


def prompts(tokenizer: Any, limit: int) -> dict[str, list[list[int]]]:
    """Return the tokens of prompts of each kind, picked at even distances."""
    kinds: dict[str, list[list[int]]] = {}
    for kind in dict.fromkeys(p.kind for p in read()):
        found = pick(read(), [kind])
        count = min(len(found), limit * MORE.get(kind, 1))
        turns = [[{"role": "user", "content": found[i * len(found) // count].prompt}] for i in range(count)]
        kinds[kind] = [
            tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns
        ]
    return kinds


def kinds_table(limit: int, max_tokens: int) -> tuple[dict[str, Any], dict[str, dp.Engine]]:
    calls, engines = contenders()
    kinds = prompts(engines["plain"].tokenizer, limit)
    for call in calls.values():
        call(next(iter(kinds.values()))[0], 4)  # first passes allocate and tune
    table: dict[str, Any] = {}
    for kind, texts in kinds.items():
        runs = [in_turn(calls, tokens, max_tokens, turn) for turn, tokens in enumerate(texts)]
        table[kind] = {name: summary(runs, name) for name in calls}
        table[kind]["prompts"] = len(runs)
        table[kind]["texts that part from plain"] = sum(
            any(said.tokens != run["plain"].tokens for said in run.values()) for run in runs
        )
        show(kind, table[kind])
    return table, engines


def in_turn(calls: dict[str, Contender], tokens: list[int], max_tokens: int, turn: int) -> dict[str, Said]:
    names = list(calls)
    first = turn % len(names)
    said = {}
    for name in (*names[first:], *names[:first]):
        start = time.perf_counter()
        text, passes = calls[name](list(tokens), max_tokens)
        said[name] = Said(text, len(text) / (time.perf_counter() - start), passes)
    return said


def summary(runs: list[dict[str, Said]], name: str) -> dict[str, float]:
    ratios = sorted(run[name].tokens_per_second / run["plain"].tokens_per_second for run in runs)
    figures = {
        "tokens_per_second": statistics.median(run[name].tokens_per_second for run in runs),
        "against_plain": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }
    passes = [len(run[name].tokens) / run[name].passes for run in runs if run[name].passes]
    return figures | ({"tokens_per_pass": statistics.median(passes)} if passes else {})


def show(kind: str, row: dict[str, Any]) -> None:
    print(f"{kind}  ({row['prompts']} prompts; texts that part by rounding: {row['texts that part from plain']})")
    for name, r in row.items():
        if isinstance(r, dict):
            print(
                f"  {name:<27} {r['tokens_per_second']:6.1f} tok/s  {r['against_plain']:5.2f}x plain"
                f"  ({r['lowest']:.2f} to {r['highest']:.2f})"
                + (f"  {r['tokens_per_pass']:.2f} tokens a pass" if "tokens_per_pass" in r else ""),
                flush=True,
            )


def pass_costs(engine: dp.Engine, context: int = 128, repeats: int = 15) -> dict[int, float]:
    """Measure the milliseconds of a pass over n tokens after `context` others; the widths take turns."""
    model = engine.model
    cache = model.new_cache(1, context + 32)
    with torch.inference_mode():
        model(torch.randint(1000, 2000, (1, context)), cache, scored=1)
        cache.keep(torch.tensor([context]))
        times: dict[int, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for width in (1, 2, 3, 5, 8, 13, 17):
                start = time.perf_counter()
                model(torch.randint(1000, 2000, (1, width)), cache)
                times[width].append(time.perf_counter() - start)
    return {width: 1e3 * statistics.median(values) for width, values in times.items()}


def overhead(engine: dp.Engine, **sampling: Any) -> float:
    """Return the share of a round outside the model (drafting, warping, verifying, rollback), median of three."""
    text = "Repeat this list three times: red, green, blue, yellow, purple, orange, black, white."
    shares = []
    for seed in range(3):
        stats = engine.generate(text, max_tokens=48, seed=seed, **sampling).stats
        spent = {stage: s for stage, s in stats.seconds.items() if stage != "prefill"}
        shares.append(1 - spent["score"] / sum(spent.values()))
    return statistics.median(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=int, default=2, help="prompts of each kind; some kinds have more")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engine_cpu.json")
    options = parser.parse_args()
    table, engines = kinds_table(options.limit, options.max_tokens)
    passes = pass_costs(engines["plain"])
    print(
        "pass over n tokens, ms:", {n: round(ms, 1) for n, ms in passes.items()}, f"5 / 1 = {passes[5] / passes[1]:.2f}"
    )
    shares = {
        "temperature 0.8": overhead(engines["suffix"], temperature=0.8),
        "temperature 0.8, top-k 50": overhead(engines["suffix"], temperature=0.8, top_k=50),
        "greedy": overhead(engines["suffix"], temperature=0),
    }
    print("round outside the model:", {name: f"{share:.1%}" for name, share in shares.items()})
    result = {
        "command": f"python benchmarks/engine_cpu.py --limit {options.limit} --max-tokens {options.max_tokens}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "prompts_of_a_kind": options.limit,
        "max_tokens": options.max_tokens,
        "kinds": table,
        "pass_ms": passes,
        "round_outside_the_model": shares,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
