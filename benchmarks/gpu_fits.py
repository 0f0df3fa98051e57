"""Measure how verification time depends on how well the draft fits: token against block, median and worst batch.

Part of `verify_gpu.py --fits`. A draft that fits well is rejected rarely, but its residual is small then, and drawing
from it can take longer than everything else: one fit of the draft alone hides that. Every batch is timed by itself, in
a CUDA graph that holds it several times at different addresses, so that each call finds the L2 cache cold.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import draftproof as dp
from draftproof.kernels.call import Call
from draftproof.kernels.compile import Step, run_all
from draftproof.kernels.launch import plan
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import Workspace
from gpu_cases import SETTINGS, K
from gpu_inputs import Inputs, inputs

NOISES = (0.01, 0.03, 0.1, 0.3, 0.7, 1.0, 3.0)
VOCABULARIES = (32000, 128256, 152064)
DTYPES = ("float32", "bfloat16")
FIT_SETTINGS = ("temperature", "top-k 50, top-p 0.9")
FIT_BATCHES = {1: 48, 8: 24, 64: 6, 256: 2}
"""Batch sizes, and how many batches of each are timed."""
RULES = ("token", "block")
COLD_BYTES = 1.2e8
"""Bytes that a graph reads at least: more than twice the L2 cache."""


@dataclass(frozen=True)
class Fit:
    """One kind of draft: the target's logits plus Gaussian noise of this size."""

    V: int
    dtype: str
    setting: str
    noise: float


def fits(quick: bool) -> list[Fit]:
    """Return all kinds; with `quick` one vocabulary, and the others at one size of noise."""
    every = [Fit(*case) for case in product(VOCABULARIES, DTYPES, FIT_SETTINGS, NOISES)]
    return [f for f in every if not quick or f.V == 128256 or f.noise == 0.03]


def measure_fits(
    cases: list[Fit], median_of_replays: Callable[[Callable[[], None], int, int], float]
) -> Iterator[dict[str, Any]]:
    """Yield a line for each kind of draft and batch size: median and worst time of both rules, and their ratios."""
    for fit in cases:
        sampling = SETTINGS[fit.setting]
        pool = inputs(max(b * n for b, n in FIT_BATCHES.items()), K, fit.V, sampling,
                      dtype=getattr(torch, fit.dtype), noise=fit.noise)  # fmt: skip
        for B, count in FIT_BATCHES.items():
            workspace = Workspace.empty(B, K, fit.V, "cuda")
            times: dict[str, list[float]] = {rule: [] for rule in RULES}
            accepted = []
            for n in range(count):
                for rule in RULES:
                    plans = _plans(pool, n * B, B, sampling, rule, workspace)

                    def run(plans: list[list[Step]] = plans) -> None:
                        for steps in plans:
                            run_all(steps, torch.device("cuda", 0))

                    times[rule].append(median_of_replays(run, len(plans), 9))
                accepted.append(workspace.accepted[:B].float().mean().item())
            yield _line(fit, B, times, statistics.mean(accepted))
        del pool
        torch.cuda.empty_cache()


def _plans(
    pool: Inputs, first: int, B: int, sampling: dp.SamplingParams, rule: str, workspace: Workspace
) -> list[list[Step]]:
    """Return the launches for several copies of one batch."""
    part = {name: getattr(pool, name)[first : first + B] for name in Inputs.__dataclass_fields__}
    size = B * (2 * K + 1) * pool.target.shape[-1] * pool.target.itemsize
    plans = []
    for _ in range(max(2, round(COLD_BYTES / size + 0.5))):
        given = Inputs(**{name: tensor.clone() for name, tensor in part.items()})
        parameters = Parameters.of(
            [sampling] * B, [sampling] * B, seeds=given.seeds, positions=given.positions, lengths=given.lengths
        )
        call = Call(given.target, given.tokens, given.draft, parameters, rule)
        plans.append(plan(call, workspace, overlap=True))
    return plans


def _line(fit: Fit, B: int, times: dict[str, list[float]], accepted: float) -> dict[str, Any]:
    medians = {rule: statistics.median(values) for rule, values in times.items()}
    worst = {rule: max(values) for rule, values in times.items()}
    return {
        **vars(fit),
        "B": B,
        "accepted": round(accepted, 2),
        "median": {rule: round(value, 1) for rule, value in medians.items()},
        "worst": {rule: round(value, 1) for rule, value in worst.items()},
        "median ratio": round(medians["token"] / medians["block"], 3),
        "worst ratio": round(worst["token"] / worst["block"], 3),
    }


def plans_of_fits(cases: list[Fit]) -> Iterator[list[Step]]:
    """Yield the launches of every case, to be compiled."""
    one = torch.ones(1, dtype=torch.long, device="cuda")
    for V, dtype, setting in {(f.V, f.dtype, f.setting): None for f in cases}:
        x = torch.zeros(1, K + 1, V, dtype=getattr(torch, dtype), device="cuda")
        for B, rule in product(FIT_BATCHES, RULES):
            sampling = [SETTINGS[setting]] * B
            numbers = one.repeat(B)
            parameters = Parameters.of(sampling, sampling, seeds=numbers, positions=numbers, lengths=numbers)
            target, draft = x.expand(B, -1, -1), x[:, :K].expand(B, -1, -1)
            call = Call(target, one.expand(B, K).contiguous(), draft, parameters, rule)
            yield plan(call, Workspace.empty(B, K, V, "cuda"), overlap=True)


def summary(lines: list[dict[str, Any]]) -> str:
    """Return the largest ratios, and the cases they belong to."""
    text = []
    for name, limit in (("median ratio", 1.15), ("worst ratio", 1.3)):
        line = max(lines, key=lambda line: line[name])
        above = sum(line[name] > limit for line in lines)
        text.append(f"{name}, token / block: at most {line[name]} ({above} of {len(lines)} above {limit}): {line}")
    return "\n".join(text)
