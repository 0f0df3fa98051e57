"""Measure verification on a CPU against transformers' own path, in one run: time and peak extra memory.

    python benchmarks/verify_cpu.py [--out benchmarks/results/verify_cpu.json] [--repeats 30]

Both start from the same raw logits and drafts: processors (temperature, or temperature + top-k 50 + top-p 0.9) on both
sides, then the acceptance test and the residual or bonus token. transformers' `_speculative_sampling` takes one row, so
it is looped over a batch. The contenders take turns; medians are reported. Compare ratios: absolute times vary from run
to run.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.utils import _speculative_sampling

import draftproof as dp
from draftproof.core.draw import draw

K = 5
SETTINGS = {
    "temperature": (dp.SamplingParams(temperature=0.8), [TemperatureLogitsWarper(0.8)]),
    "filters": (
        dp.SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(50), TopPLogitsWarper(0.9)],
    ),
}


def rows(B: int, V: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits with a Zipf-like head over a Gaussian bulk; the drafter's are the target's with Gaussian noise."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn((B, K + 1, V), generator=g)
    head = 9 - 1.1 * torch.arange(1, 401).float().log()
    places = torch.rand((B, K + 1, V), generator=g).topk(400).indices
    target = target.scatter_add(-1, places, head.expand(B, K + 1, -1))
    return target, target[:, :K] + 0.8 * torch.randn((B, K, V), generator=g)


def peer(target: Tensor, tokens: Tensor, draft: Tensor, processors: LogitsProcessorList) -> None:
    """Run transformers' path of assisted generation: processors position by position, then its sampling, row by row."""
    prefix = torch.zeros((1, 8), dtype=torch.long)
    for b in range(len(target)):
        p, q = target[b : b + 1].clone(), draft[b : b + 1].clone()
        for i in range(K + 1):
            p[:, i] = processors(prefix, p[:, i])
        for i in range(K):
            q[:, i] = processors(prefix, q[:, i])
        _speculative_sampling(torch.cat([prefix, tokens[b : b + 1]], 1), q, K, p)


def peak_memory(call: Callable[[Tensor], object], draft: Tensor) -> int:
    """Return the peak bytes that the call held, from torch's own allocation records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call(draft)
    held = most = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def measure(B: int, V: int, setting: str, repeats: int) -> dict[str, dict[str, float]]:
    sampling, processors = SETTINGS[setting]
    target, draft = rows(B, V)
    probs = dp.warp(draft, [sampling] * B).probs().flatten(0, 1)
    drafts = [probs.multinomial(1, generator=torch.Generator().manual_seed(s)).view(B, K) for s in range(8)]
    contenders: dict[str, Callable[[Tensor], object]] = {
        "transformers": lambda x: peer(target, x, draft, LogitsProcessorList(processors))
    }
    for rule in ("token", "block", "coupled"):
        contenders[rule] = lambda x, rule=rule: dp.verify(
            target, x, draft, sampling=sampling, draft_sampling=sampling, rule=rule
        )
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 2):
        for name, call in contenders.items():
            start = time.perf_counter()
            call(drafts[turn % len(drafts)])
            if turn >= 2:  # warm-up
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    memory = {name: max(peak_memory(call, x) for x in drafts[:3]) for name, call in contenders.items()}
    return {
        name: {
            "milliseconds": 1e3 * medians[name],
            "speedup": medians["transformers"] / medians[name],
            "peak_mib": memory[name] / 2**20,
        }
        for name in contenders
    }


def draw_cost(V: int, repeats: int) -> float:
    """Measure the milliseconds per row of the draw alone, from dense weights."""
    weights = torch.rand(1, V)
    u = torch.full((1,), 0.7, dtype=torch.float64)
    times = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        draw(weights, u, u)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "verify_cpu.json")
    parser.add_argument("--repeats", type=int, default=120)
    options = parser.parse_args()
    table = []
    print(f"{'V':>7} {'B':>2} {'sampling':<12} {'':<13} {'ms':>8} {'speedup':>8} {'peak MiB':>9}")
    for V in (49152, 151936):
        for B in (1, 8):
            for setting in SETTINGS:
                repeats = options.repeats if B == 1 else max(6, options.repeats // 4)
                for name, row in measure(B, V, setting, repeats).items():
                    table.append({"V": V, "B": B, "sampling": setting, "contender": name, **row})
                    print(
                        f"{V:>7} {B:>2} {setting:<12} {name:<13} {row['milliseconds']:8.2f} {row['speedup']:7.1f}x "
                        f"{row['peak_mib']:9.1f}",
                        flush=True,
                    )
    drawing = {V: draw_cost(V, options.repeats) for V in (49152, 151936)}
    print("draw alone, ms a row:", {V: round(ms, 3) for V, ms in drawing.items()})
    result = {
        "command": "python benchmarks/verify_cpu.py",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "draft_length": K,
        "draw_ms": drawing,
        "table": table,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
