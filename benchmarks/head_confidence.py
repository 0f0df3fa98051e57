"""Measure whether a head should end a draft by its own confidence: the bundled model and head on a CPU.

    python benchmarks/head_confidence.py [--prompts-of-each-kind 2] [--tokens 64]

Every configuration decodes the same prompts, in turns. Time is the process's own CPU time on one thread, so that other
programs on the machine change it little, less that of a text of one token. Speed is relative to plain decoding. The
modelled speed of a chain is computed from its counts alone, which are the same on every machine under any load.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import draftproof as dp
from draftproof.bench import prompts
from draftproof.drafters.head import HeadDrafter
from draftproof.models.head.attach import SHIPPED, fitted
from draftproof.models.tokenizer import encode
from tune_drafters import ROUND, pass_cost

RESULTS = Path(__file__).parent / "results" / "head_confidence.json"
STEP = 0.055
"""Cost of a step of the head, in passes of the target over one token: drafting time over scoring time."""
CHAINS: dict[str, tuple[int | str, float | str]] = {
    "3 tokens": (3, 0.0),
    "4 tokens": (4, 0.0),
    "5 tokens": (5, 0.0),
    "auto": ("auto", 0.0),
    "auto, confidence 0.05": ("auto", 0.05),
    "auto, confidence 0.15": ("auto", 0.15),
    "auto, confidence 0.3": ("auto", 0.3),
    "8 tokens, confidence 0.15": (8, 0.15),
}
"""Draft length and confidence of each configuration."""
TREES: dict[str, tuple[int | str, float | str]] = {
    "tree of 8": (8, 0.0),
    "tree of 8, confidence 0.03": (8, 0.03),
    "tree of 8, confidence 0.1": (8, 0.1),
}


def engines(plain: dp.Engine, temperature: float) -> dict[str, dp.Engine]:
    """Make an engine for each configuration; trees only for greedy decoding, where they are chosen."""
    head = fitted(SHIPPED, plain.hf)
    made = {"plain": plain}
    for table, branches, rule in ((CHAINS, 1, "block"), (TREES, 2, "tree")):
        for name, (length, confidence) in table.items():
            if branches == 1 or temperature == 0:
                drafter = HeadDrafter(head, confidence=confidence, branches=branches)
                made[name] = dp.load(plain.hf, drafter, rule=rule, num_draft_tokens=length, tokenizer=plain.tokenizer)
    return made


def measure(plain: dp.Engine, temperature: float, limit: int, tokens: int) -> dict[str, Any]:
    """Decode every prompt with every engine, in turns; return tokens per pass, draft length and relative speed."""
    table = engines(plain, temperature)
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, list[int]] = {name: [0, 0, 0] for name in table}
    for i, prompt in enumerate(prompts.pick(prompts.read(), limit=limit)):
        ids = encode(prompt.prompt, plain.tokenizer)
        for name, engine in table.items():
            times = [time.process_time()]
            for most in (1, tokens):
                stats = engine.generate(ids, temperature=temperature, seed=i, max_tokens=most).stats
                times.append(time.process_time())
            seconds[name] += (times[2] - times[1]) - (times[1] - times[0])
            counts[name] = [
                a + b for a, b in zip(counts[name], (stats.emitted, stats.rounds, stats.drafted), strict=True)
            ]
        print(f"temperature {temperature:g}, {prompt.id}", flush=True)
    pace = {name: seconds[name] / counts[name][0] for name in table}
    return {
        name: {
            "tokens_per_pass": round(emitted / rounds, 3),
            "drafted_per_round": round(drafted / rounds, 2),
            "modelled_speed": None if name in TREES else modelled_speed(emitted / rounds, drafted / rounds),
            "speed": round(pace["plain"] / pace[name], 3),
        }
        for name, (emitted, rounds, drafted) in counts.items()
    }


def modelled_speed(tokens_per_pass: float, drafted: float) -> float:
    """Return the speed over plain decoding that these counts give at assumed costs."""
    return round(tokens_per_pass * (1 + ROUND) / (pass_cost(1 + drafted) + ROUND + STEP * drafted), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts-of-each-kind", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = dp.load(drafter=None, weights="float32")
    results = {"command": "python benchmarks/head_confidence.py", "torch": torch.__version__}
    for temperature in (0.0, 1.0):
        results[f"temperature {temperature:g}"] = measure(
            plain, temperature, options.prompts_of_each_kind, options.tokens
        )
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
