"""The engine on a CPU with the bundled model: against its own plain decoding and against transformers, in one run.

    python benchmarks/engine_cpu.py [--limit 3] [--max-tokens 96] [--out benchmarks/results/engine_cpu.json]

Greedy, one prompt at a time, prompts of six kinds (src/draftproof/bench/prompts.jsonl). The contenders take turns on
every prompt; a kind's figure is the median over its prompts of the ratio to plain decoding. All of them say the same
text, and the run checks that they do. Also measured: what a pass over five tokens costs in passes over one, and what a
round spends outside the model.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers

import draftproof as dp
from draftproof.models import bundled

HERE = Path(__file__).parent


def prompts(limit: int) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for line in (files("draftproof.bench") / "prompts.jsonl").read_text().splitlines():
        row = json.loads(line)
        kinds[row["kind"]].append(row["prompt"])
    return {kind: texts[:limit] for kind, texts in kinds.items()}


def peer(model: Any, tokens: list[int], max_tokens: int, **options: Any) -> list[int]:
    """transformers' own generate, greedy."""
    ids = torch.tensor([tokens])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **options
    )
    return out[0, len(tokens) :].tolist()


def contenders(max_tokens: int) -> tuple[dict[str, Callable[[list[int]], list[int]]], dict[str, dp.Engine]]:
    theirs, _ = bundled.load()
    engines = {name: dp.load(drafter=None if name == "plain" else name) for name in ("plain", "ngram", "suffix")}
    calls: dict[str, Callable[[list[int]], list[int]]] = {
        "transformers": lambda t: peer(theirs, t, max_tokens),
        "transformers prompt lookup": lambda t: peer(theirs, t, max_tokens, prompt_lookup_num_tokens=10),
    }
    for name, engine in engines.items():
        calls[name] = lambda t, engine=engine: engine.generate(t, temperature=0, max_tokens=max_tokens).tokens
    return calls, engines


def kinds_table(limit: int, max_tokens: int) -> tuple[dict[str, Any], dict[str, dp.Engine]]:
    calls, engines = contenders(max_tokens)
    tokenizer = engines["plain"].tokenizer
    table: dict[str, Any] = {}
    for kind, texts in prompts(limit).items():
        speeds: dict[str, list[float]] = defaultdict(list)
        parted = 0
        for text in texts:
            tokens = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            said = {}
            for name, call in calls.items():
                start = time.perf_counter()
                said[name] = call(list(tokens))
                speeds[name].append(len(said[name]) / (time.perf_counter() - start))
            parted += any(s != said["plain"] for s in said.values())
        table[kind] = {name: summary(values, speeds["plain"]) for name, values in speeds.items()}
        table[kind]["texts that part from plain"] = parted
        show(kind, table[kind])
    return table, engines


def summary(values: list[float], plain: list[float]) -> dict[str, float]:
    ratios = sorted(v / p for v, p in zip(values, plain, strict=True))
    return {
        "tokens_per_second": statistics.median(values),
        "against_plain": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def show(kind: str, row: dict[str, Any]) -> None:
    print(f"{kind}  (texts that part from plain by rounding: {row['texts that part from plain']})")
    for name, r in row.items():
        if isinstance(r, dict):
            print(
                f"  {name:<27} {r['tokens_per_second']:6.1f} tok/s  {r['against_plain']:5.2f}x plain"
                f"  ({r['lowest']:.2f} to {r['highest']:.2f})",
                flush=True,
            )


def pass_costs(engine: dp.Engine, context: int = 128, repeats: int = 15) -> dict[int, float]:
    """Milliseconds of a pass over n tokens behind `context` others, the widths taking turns."""
    model = engine.model
    cache = model.new_cache(1, context + 32)
    with torch.inference_mode():
        model(torch.randint(1000, 2000, (1, context)), cache, scored=1)
        cache.keep(torch.tensor([context]))
        times: dict[int, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for width in (1, 2, 3, 5, 8):
                start = time.perf_counter()
                model(torch.randint(1000, 2000, (1, width)), cache)
                times[width].append(time.perf_counter() - start)
    return {width: 1e3 * statistics.median(values) for width, values in times.items()}


def overhead(engine: dp.Engine, **sampling: Any) -> float:
    """The share of a round that is not the model: drafting, warping, verifying and keeping."""
    text = "Repeat this list three times: red, green, blue, yellow, purple, orange, black, white."
    stats = engine.generate(text, max_tokens=96, seed=1, **sampling).stats
    spent = {stage: s for stage, s in stats.seconds.items() if stage != "prefill"}
    return 1 - spent["score"] / sum(spent.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
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
        "command": "python benchmarks/engine_cpu.py",
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
