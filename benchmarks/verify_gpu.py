"""Measure the time of one verification on a GPU, from raw logits to the verdict, beside the peers' times.

    PYTHONPATH=src python benchmarks/verify_gpu.py --out benchmarks/results/verify_gpu.json
    PYTHONPATH=src python benchmarks/verify_gpu.py --plot docs/verify_gpu.png      # from that file; needs no GPU
    PYTHONPATH=src python benchmarks/verify_gpu.py --fits --out benchmarks/results/verify_gpu_fits.json
    PYTHONPATH=src python benchmarks/verify_gpu.py --markdown                      # the same as a table, with stages

A CUDA graph holds one call for each of several input sets, together several times the L2 cache, so that every call
finds it cold; the time is that of a replay divided by the number of calls, median of many replays. Eager time is
measured too. The peers' times are those of KERNELS.md, measured on the same kind of machine with the same settings.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, no_type_check

import torch
import triton

import draftproof as dp
from draftproof.kernels import verify_rows
from draftproof.kernels.call import Call
from draftproof.kernels.compile import Step, run_all
from draftproof.kernels.launch import plan
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import Workspace
from gpu_cases import BARS, BATCHES, CASES, COLD, MIXED, PEERS, SETTINGS, WARM, Case, K, V
from gpu_compile import PROCESSES, compile_part, side_by_side
from gpu_fits import fits, measure_fits, plans_of_fits, summary
from gpu_inputs import Inputs, drawn, inputs
from gpu_report import plot, stages, table


def sampling_of(case: Case, B: int) -> tuple[list[dp.SamplingParams], list[dp.SamplingParams]]:
    """Return the sampling of each request and of its draft."""
    if case.setting == "every row different":
        return [MIXED[b % len(MIXED)] for b in range(B)], [WARM] * B
    sampling = SETTINGS[case.setting]
    same = case.draft == "drawn, same sampling" and sampling.temperature > 0
    return [sampling] * B, [sampling if same else WARM] * B


def sets(given: Inputs, B: int) -> list[Inputs]:
    """Split inputs into sets of B requests."""
    n = len(given.tokens)
    return [
        Inputs(**{name: getattr(given, name)[b : b + B] for name in Inputs.__dataclass_fields__})
        for b in range(0, n, B)
    ]


def prepared(given: Inputs, samplings: list[dp.SamplingParams], drafts: list[dp.SamplingParams]) -> Parameters:
    """Return the kernels' parameters for a set."""
    return Parameters.of(samplings, drafts, seeds=given.seeds, positions=given.positions, lengths=given.lengths)


def median_of_replays(run: Callable[[], None], calls: int, replays: int = 30) -> float:
    """Return microseconds per call, from a graph that holds several."""
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


@triton.jit
@no_type_check
def nothing(x):
    """Do nothing: the launch itself is timed."""
    pass


def launch_alone(repeats: int = 200) -> float:
    """Return the time in a graph of a launch that does nothing."""
    x = torch.zeros(1, device="cuda")

    def run() -> None:
        for _ in range(repeats):
            nothing[(1,)](x)

    return round(median_of_replays(run, repeats), 2)


def eager_median(run: Callable[[], Any], repeats: int = 40) -> float:
    """Return the time of a call from Python until the device has finished, in microseconds."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(case: Case, each: list[Inputs], *, eager: bool, stages: bool) -> dict[str, Any]:
    """Measure one case on sets of inputs."""
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

        def all_sets(n: int = n) -> None:
            for steps in plans:
                run_all(steps[:n], each[0].target.device)

        upto[names[n - 1]] = median_of_replays(all_sets, len(plans))
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
    """Return microseconds to read every needed logit once, at the copy bandwidth of KERNELS.md."""
    draft = 0 if case.draft == "chosen" or case.setting == "greedy" or case.rule == "coupled" else K
    return B * (K + 1 + draft) * V * (4 if case.dtype == "float32" else 2) / 4.17e6


def pool(dtype: str, flat: bool) -> Inputs:
    """Make requests enough for two sets of the largest batch; smaller sets are parts of it."""
    return inputs(2 * BATCHES[-1], K, V, WARM, dtype=getattr(torch, dtype), flat=flat)


def cold_sets(given: Inputs, B: int) -> list[Inputs]:
    """Return sets of B requests that together are several times the cache, at least two."""
    count = max(2, round(COLD / (B * (2 * K + 1) * V * given.target.itemsize) + 0.5))
    return sets(given, B)[:count]


def line_of(case: Case, B: int, each: list[Inputs], *, stages: bool) -> dict[str, Any]:
    """Measure one case and batch size; return its line of the report."""
    at = BATCHES.index(B)
    barred = case.rule == "token" and case.rows == "zipf" and case.draft == "drawn, same sampling"
    bar = BARS.get((case.dtype, case.setting)) if barred else None
    peers = PEERS.get((case.dtype, case.setting, case.rule), {}) if case.rows == "zipf" else {}
    line = {**vars(case), "B": B, **measure(case, each, eager=B in (1, 64), stages=stages)}
    line |= {"floor": round(floor(case, B), 1), "bar": bar and bar[at]}
    return line | {"peers": {name: times[at] for name, times in peers.items()}}


def bench(cases: list[Case], batches: list[int], *, stages: bool) -> Iterator[dict[str, Any]]:
    """Yield a line for each case and batch size."""
    for rows, dtype in (("zipf", "float32"), ("zipf", "bfloat16"), ("flat", "float32")):
        selected = [case for case in cases if (case.rows, case.dtype) == (rows, dtype)]
        if not selected:
            continue
        given = pool(dtype, rows == "flat")
        last = WARM  # what the pool's tokens were drawn with
        for case in sorted(selected, key=lambda case: str(sampling_of(case, 1)[1][0])):
            sampling = sampling_of(case, 1)[1][0]
            if sampling != last:
                given, last = replace(given, tokens=drawn(given.draft, sampling)), sampling
            for B in batches:
                yield line_of(case, B, cold_sets(given, B), stages=stages)
        del given
        torch.cuda.empty_cache()


def plans_of(cases: list[Case]) -> Iterator[list[Step]]:
    """Yield the launches of every case and batch size, to be compiled."""
    one = torch.ones(1, dtype=torch.long, device="cuda")
    for case in cases:
        x = torch.zeros(1, K + 1, V, dtype=getattr(torch, case.dtype), device="cuda")
        for B in BATCHES:
            given = Inputs(x.expand(B, -1, -1), x[:, :K].expand(B, -1, -1), one.expand(B, K).contiguous(),
                           *(one.repeat(B) for _ in range(3)))  # fmt: skip
            samplings, drafts = sampling_of(case, B)
            draft = None if case.draft == "chosen" else given.draft
            call = Call(given.target, given.tokens, draft, prepared(given, samplings, drafts), case.rule)
            yield plan(call, Workspace.empty(B, K, V, "cuda"), overlap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/verify_gpu.json"))
    parser.add_argument("--plot", type=Path, help="draw --out instead of measuring")
    parser.add_argument("--markdown", action="store_true", help="print --out instead of measuring")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--only", nargs="+", help="settings")
    parser.add_argument("--barred", action="store_true", help="only what has a bar")
    parser.add_argument("--no-stages", action="store_true")
    parser.add_argument("--fits", choices=("quick", "all"), nargs="?", const="all", help="by the fit of the draft")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot:
        return plot(json.loads(options.out.read_text())["lines"], options.plot)
    if options.markdown:
        return print(stages(json.loads(options.out.read_text())["lines"]))
    if options.compile:
        plans = plans_of_fits(fits(options.fits == "quick")) if options.fits else plans_of(CASES)
        return compile_part(plans, *options.compile)
    side_by_side(__file__, PROCESSES, *(["--fits", options.fits] if options.fits else []))
    cases = CASES[: len(BARS)] if options.barred else CASES
    cases = [case for case in cases if not options.only or case.setting in options.only]
    made: dict[str, Any] = {
        "command": "python benchmarks/verify_gpu.py" + (" --fits" if options.fits else ""),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "K": K,
        "V": V,
        "unit": "microseconds a call; stages are differences between prefixes of the launches",
        "launch": launch_alone(),
        "lines": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.fits:
        made["unit"] = "microseconds a call: median and worst over batches, each the median of its replays"
        for line in measure_fits(fits(options.fits == "quick"), median_of_replays):
            made["lines"].append(line)
            options.out.write_text(json.dumps(made, indent=1) + "\n")
        return print(summary(made["lines"]))
    for line in bench(cases, options.batches, stages=not options.no_stages):
        made["lines"].append(line)
        options.out.write_text(json.dumps(made, indent=1) + "\n")
    print(table(made["lines"]))


if __name__ == "__main__":
    main()
