"""Time of one verification on a GPU, from raw logits to the verdict, beside the peers' and the memory's own.

    PYTHONPATH=src python benchmarks/verify_gpu.py --out benchmarks/results/verify_gpu.json

A CUDA graph holds one call for each of several input sets, together several times the L2 cache, so that every call
finds it cold; the time is that of a replay divided by the number of calls, median of many replays. Eager time besides.
The peers' times are those of KERNELS.md, measured on the same kind of machine with the same settings.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton

import draftproof as dp
from draftproof.kernels import Parameters, Workspace, verify_rows
from draftproof.kernels.call import Call
from draftproof.kernels.launch import Step, plan
from gpu_inputs import Inputs, inputs

K, V = 4, 128256
BATCHES = (1, 8, 64, 256)
COLD = 240e6  # bytes of input that a graph goes through at least: four times the L2
WARM = dp.Sampling(temperature=0.8)
SETTINGS: dict[str, dp.Sampling] = {
    "temperature": WARM,
    "top-k 50, top-p 0.9": dp.Sampling(temperature=0.8, top_k=50, top_p=0.9),
    "top-p 0.95": dp.Sampling(temperature=0.8, top_p=0.95),
    "greedy": dp.Sampling(temperature=0.0),
}
MIXED = [SETTINGS["temperature"], SETTINGS["top-k 50, top-p 0.9"], SETTINGS["top-p 0.95"], dp.Sampling(min_p=0.05)]
BARS = {  # microseconds, for the BATCHES (issue 6)
    ("float32", "temperature"): (11, 17, 82, 310),
    ("float32", "top-k 50, top-p 0.9"): (20, 32, 120, 450),
    ("float32", "top-p 0.95"): (35, 55, 220, 850),
    ("float32", "greedy"): (4.5, 8.5, 44, 155),
    ("bfloat16", "temperature"): (9, 14, 50, 185),
    ("bfloat16", "top-k 50, top-p 0.9"): (18, 28, 85, 320),
}
PEERS = {  # the fastest peer of KERNELS.md, float32, for the BATCHES
    "temperature": (23.4, 48.2, 291, 1077),
    "top-k 50, top-p 0.9": (135, 164, 675, 2326),
    "greedy": (12.0, None, 56.3, 182),
}


@dataclass(frozen=True)
class Case:
    """What one line of the table is about."""

    dtype: str
    setting: str
    rule: str = "token"
    draft: str = "drawn, same sampling"
    rows: str = "zipf"


CASES = [
    *(Case(dtype, setting) for dtype, setting in BARS),
    Case("bfloat16", "top-p 0.95"),
    Case("bfloat16", "greedy"),
    *(Case("float32", "temperature", rule) for rule in ("block", "coupled")),
    Case("bfloat16", "temperature", "block"),
    Case("float32", "top-k 50, top-p 0.9", "block"),
    Case("float32", "temperature", draft="chosen"),
    Case("float32", "top-k 50, top-p 0.9", draft="drawn, temperature only"),
    Case("float32", "top-p 0.95", draft="drawn, temperature only"),
    Case("float32", "every row different", draft="drawn, temperature only"),
    *(Case("float32", setting, rows="flat") for setting in ("temperature", "top-k 50, top-p 0.9", "top-p 0.95")),
]


def sampling_of(case: Case, B: int) -> tuple[list[dp.Sampling], list[dp.Sampling]]:
    """Of each request and its draft."""
    if case.setting == "every row different":
        return [MIXED[b % len(MIXED)] for b in range(B)], [WARM] * B
    sampling = SETTINGS[case.setting]
    same = case.draft == "drawn, same sampling" and sampling.temperature > 0
    return [sampling] * B, [sampling if same else WARM] * B


def sets(given: Inputs, B: int) -> list[Inputs]:
    """The same inputs in sets of B requests."""
    n = len(given.tokens)
    return [
        Inputs(**{name: getattr(given, name)[b : b + B] for name in Inputs.__dataclass_fields__})
        for b in range(0, n, B)
    ]


def prepared(given: Inputs, samplings: list[dp.Sampling], drafts: list[dp.Sampling]) -> Parameters:
    return Parameters.of(samplings, drafts, seeds=given.seeds, positions=given.positions, lengths=given.lengths)


def median_of_replays(run: Callable[[], None], calls: int, replays: int = 30) -> float:
    """Microseconds a call, from a graph that holds several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return statistics.median(times) * 1e3 / calls


def eager_median(run: Callable[[], Any], repeats: int = 40) -> float:
    """Time of a call from Python until the device has done it, in microseconds."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def launch(steps: list[Step]) -> None:
    for n, step in enumerate(steps):
        step.kernel[step.grid](*step.arguments, num_warps=step.warps, launch_pdl=n > 0)


def measure(case: Case, each: list[Inputs], *, eager: bool, stages: bool) -> dict[str, Any]:
    B = len(each[0].tokens)
    samplings, drafts = sampling_of(case, B)
    parameters = [prepared(given, samplings, drafts) for given in each]
    workspace = Workspace.empty(B, K, V, "cuda", filtered=parameters[0].filtered)
    calls = [
        Call(g.target, g.tokens, None if case.draft == "chosen" else g.draft, p, case.rule)
        for g, p in zip(each, parameters, strict=True)
    ]
    plans = [plan(call, workspace, overlap=True) for call in calls]
    names = [step.kernel.__name__ for step in plans[0]]
    upto = {}
    for n in range(1 if stages else len(names), len(names) + 1):

        def run(n: int = n) -> None:
            for steps in plans:
                launch(steps[:n])

        upto[names[n - 1]] = median_of_replays(run, len(plans))
    times = list(upto.values())
    result: dict[str, Any] = {"time": round(times[-1], 1)}
    if stages:
        result["stages"] = {n: round(t - s, 1) for (n, t), s in zip(upto.items(), [0.0, *times], strict=False)}
    if eager:
        call = calls[0]
        result["eager"] = round(
            eager_median(
                lambda: verify_rows(
                    call.target_logits, call.draft_tokens, call.draft_logits, parameters=parameters[0],
                    rule=case.rule, workspace=workspace,
                )
            ),
            1,
        )  # fmt: skip
    result["accepted"] = round(workspace.accepted[:B].float().mean().item(), 2)
    return result


def floor(case: Case, B: int) -> float:
    """Microseconds to read every logit that is needed once, at the copy bandwidth of KERNELS.md."""
    draft = 0 if case.draft == "chosen" or case.setting == "greedy" or case.rule == "coupled" else K
    return B * (K + 1 + draft) * V * (4 if case.dtype == "float32" else 2) / 4.17e6


def bench(cases: list[Case], batches: list[int], *, stages: bool) -> list[dict[str, Any]]:
    lines = []
    kept: tuple[Any, list[Inputs]] = (None, [])
    for B in batches:
        for case in sorted(cases, key=lambda c: (c.rows, c.dtype, c.setting)):
            dtype = getattr(torch, case.dtype)
            drafted = sampling_of(case, 1)[1][0]
            if kept[0] != (B, case.rows, case.dtype, drafted):
                kept = (None, [])
                torch.cuda.empty_cache()
                n = max(2, round(COLD / (B * (2 * K + 1) * V * dtype.itemsize) + 0.5))
                made = sets(inputs(B * n, K, V, drafted, dtype=dtype, flat=case.rows == "flat"), B)
                kept = ((B, case.rows, case.dtype, drafted), made)
            at = BATCHES.index(B)
            bar = BARS.get((case.dtype, case.setting)) if case.rule == "token" and case.rows == "zipf" else None
            line = {**vars(case), "B": B, **measure(case, kept[1], eager=B in (1, 64), stages=stages)}
            line |= {"floor": round(floor(case, B), 1), "bar": bar and bar[at]}
            line["peer"] = PEERS[case.setting][at] if case.setting in PEERS and case.dtype == "float32" else None
            lines.append(line)
            print(line, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/verify_gpu.json"))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--only", nargs="+", help="settings")
    parser.add_argument("--barred", action="store_true", help="only what has a bar")
    parser.add_argument("--no-stages", action="store_true")
    options = parser.parse_args()
    cases = CASES[: len(BARS)] if options.barred else CASES
    cases = [case for case in cases if not options.only or case.setting in options.only]
    lines = bench(cases, options.batches, stages=not options.no_stages)
    made = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "K": K,
        "V": V,
        "unit": "microseconds a call; stages are differences between prefixes of the launches",
        "lines": lines,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
