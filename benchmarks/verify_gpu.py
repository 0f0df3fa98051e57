"""Time of one verification on a GPU, from raw logits to the verdict, beside the peers' and the memory's own.

    PYTHONPATH=src python benchmarks/verify_gpu.py --out benchmarks/results/verify_gpu.json

CUDA-graph replay with a cold L2, median of many; eager time besides. The peers' times are those of KERNELS.md,
measured on the same kind of machine with the same settings.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_inputs import Inputs, inputs

import draftproof as dp
from draftproof.kernels import Parameters, Workspace, verify_rows
from draftproof.kernels.call import Call
from draftproof.kernels.launch import plan

K, V = 4, 128256
BATCHES = (1, 8, 64, 256)
WARM = dp.Sampling(temperature=0.8)
SETTINGS: dict[str, dp.Sampling] = {
    "temperature": WARM,
    "top-k 50, top-p 0.9": dp.Sampling(temperature=0.8, top_k=50, top_p=0.9),
    "top-p 0.95": dp.Sampling(temperature=0.8, top_p=0.95),
    "greedy": dp.Sampling(temperature=0.0),
}
BARS = {  # microseconds, for B = 1, 8, 64, 256 (issue 6)
    ("float32", "temperature", "token"): (11, 17, 82, 310),
    ("float32", "top-k 50, top-p 0.9", "token"): (20, 32, 120, 450),
    ("float32", "top-p 0.95", "token"): (35, 55, 220, 850),
    ("float32", "greedy", "token"): (4.5, 8.5, 44, 155),
    ("bfloat16", "temperature", "token"): (9, 14, 50, 185),
    ("bfloat16", "top-k 50, top-p 0.9", "token"): (18, 28, 85, 320),
}
PEERS = {  # the fastest peer of KERNELS.md, fp32
    "temperature": (23.4, 48.2, 291, 1077),
    "top-k 50, top-p 0.9": (135, 164, 675, 2326),
    "greedy": (12.0, None, 56.3, 182),
}
MIXED = [SETTINGS["temperature"], SETTINGS["top-k 50, top-p 0.9"], SETTINGS["top-p 0.95"], dp.Sampling(min_p=0.05)]


def cold_median(run: Callable[[], Any], repeats: int) -> float:
    """Median time in microseconds of a captured call, with the L2 cache full of something else."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    other = torch.zeros(64 * 2**20, dtype=torch.int32, device="cuda")
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        # read, not written: dirty lines would be written back on our time. It also keeps the device busy until the
        # graph is queued, so that the host's latency is not in the time
        other.sum()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) * 1e3


def eager_median(run: Callable[[], Any], repeats: int = 50) -> float:
    """Time of a call from Python, in microseconds, when the host is what limits it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def prepared(given: Inputs, samplings: list[dp.Sampling], drafts: list[dp.Sampling]) -> Parameters:
    return Parameters.of(
        samplings, drafts, seeds=given.seeds, positions=given.positions, lengths=given.lengths
    )


def measure(
    given: Inputs, samplings: list[dp.Sampling], drafts: list[dp.Sampling], rule: str, *, drawn: bool = True, eager: bool = False
) -> dict[str, Any]:
    B = len(given.tokens)
    parameters = prepared(given, samplings, drafts)
    draft = given.draft if drawn else None
    workspace = Workspace.empty(B, K, given.target.shape[-1], "cuda", filtered=parameters.filtered)
    repeats = 200 if B < 256 else 60

    def run() -> Any:
        return verify_rows(
            given.target, given.tokens, draft, parameters=parameters, rule=rule, workspace=workspace
        )

    call = Call(given.target, given.tokens, draft, parameters, rule)
    steps = plan(call, workspace, overlap=True)
    stages = {}
    for n in range(1, len(steps) + 1):

        def some(n: int = n) -> None:
            for i, step in enumerate(steps[:n]):
                step.kernel[step.grid](*step.arguments, num_warps=step.warps, launch_pdl=i > 0)

        stages[steps[n - 1].kernel.__name__] = cold_median(some, repeats)
    times = list(stages.values())
    each = {name: round(t - s, 1) for (name, t), s in zip(stages.items(), [0.0, *times], strict=False)}
    result = {"time": round(times[-1], 1), "stages": each, "accepted": round(run().accepted.float().mean().item(), 2)}
    if eager:
        result["eager"] = round(eager_median(run), 1)
    return result


def bench(dtypes: tuple[torch.dtype, ...], batches: tuple[int, ...], flat: bool) -> list[dict[str, Any]]:
    lines = []
    for dtype in dtypes:
        for name, sampling in SETTINGS.items():
            for n, B in enumerate(batches):
                given = inputs(B, K, V, sampling if sampling.temperature else WARM, dtype=dtype, flat=flat)
                same = [sampling] * B
                plain = [WARM] * B
                cases = [("token", same, True)]
                if name == "temperature":
                    cases += [("block", same, True), ("coupled", same, True), ("token", plain, False)]
                elif name != "greedy":
                    cases += [("block", same, True)]
                for rule, drafts, drawn in cases:
                    dtype_name = str(dtype).removeprefix("torch.")
                    bar = BARS.get((dtype_name, name, rule)) if drawn and not flat else None
                    line = {
                        "dtype": dtype_name,
                        "setting": name,
                        "rule": rule,
                        "draft": "drawn" if drawn else "chosen",
                        "B": B,
                        "rows": "flat" if flat else "zipf",
                        **measure(given, same, drafts, rule, drawn=drawn, eager=B in (1, 64)),
                        "bar": None if bar is None else bar[BATCHES.index(B)],
                        "peer": PEERS.get(name, (None,) * 4)[BATCHES.index(B)] if rule == "token" else None,
                    }
                    lines.append(line)
                    print(line, flush=True)
                del given
                torch.cuda.empty_cache()
    return lines


def bench_mixed(batches: tuple[int, ...]) -> list[dict[str, Any]]:
    lines = []
    for B in batches:
        given = inputs(B, K, V, WARM)
        each = [MIXED[b % len(MIXED)] for b in range(B)]
        line = {"dtype": "float32", "setting": "every row different", "rule": "token", "B": B}
        line |= measure(given, each, [WARM] * B, "token")
        lines.append(line)
        print(line, flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/verify_gpu.json"))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--flat", action="store_true", help="flat rows too")
    options = parser.parse_args()
    dtypes = tuple(getattr(torch, name) for name in options.dtypes)
    lines = bench(dtypes, tuple(options.batches), False) + bench_mixed(tuple(options.batches))
    if options.flat:
        lines += bench(dtypes[:1], tuple(options.batches), True)
    made = {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "K": K,
        "V": V,
        "unit": "microseconds, median, CUDA graph, L2 cold; stages: differences between prefixes of the launches",
        "lines": lines,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
