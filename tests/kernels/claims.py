"""What is claimed of the kernels on a GPU, each as a function that measures it. No pytest: any machine can run them."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

import draftproof as dp
from draftproof.kernels import Parameters, Workspace, verify_rows
from kernels.twins import Input, kernel, parameters, reference

S = dp.Sampling
RULES = ("token", "block", "coupled")
SETTINGS = {
    "temperature": S(temperature=0.8),
    "greedy": S(temperature=0.0),
    "top-k": S(temperature=0.9, top_k=50),
    "large top-k": S(temperature=1.3, top_k=1500),
    "top-p": S(top_p=0.95),
    "top-k, top-p, min-p": S(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01),
    "min-p": S(min_p=0.05),
}
WARM = S(temperature=0.8)
MOST_DIFFERENT = 1e-5
"""Rows that may differ from the reference by rounding: about one in a million does where a value falls on a border."""


def mixed(B: int) -> list[dp.Sampling]:
    every = list(SETTINGS.values())
    return [every[b % len(every)] for b in range(B)]


def on_device(B: int, K: int, V: int, samplings: list[dp.Sampling], seed: int, dtype: torch.dtype) -> Input:
    """Like `twins.make`, made on the device: rows with a head of larger logits, as a language model's have."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    target = normal(B, K + 1, V)
    target += 7.0 * (torch.rand(B, K + 1, V, generator=generator, device="cuda") < 40 / V) * normal(B, K + 1, 1).abs()
    draft = (target[:, :K] + 0.7 * normal(B, K, V)).to(dtype)
    weights = dp.warp(draft, [WARM] * B).probs().flatten(0, 1)
    tokens = weights.multinomial(1, generator=generator).view(B, K)
    numbers = torch.randint(2**40, (3, B), generator=generator, device="cuda")
    lengths, drafts = numbers[2] % (K + 1), [WARM] * B
    return Input(target.to(dtype), draft, tokens, lengths, samplings, drafts, numbers[0], numbers[1] % 9999)


def differing(given: Input, rule: str) -> int:
    """Rows in which kernel and reference say different things."""
    got, want = kernel(given, rule), reference(given, rule)
    assert not bool(got.faults.any()), f"faults {got.faults.unique().tolist()}"
    return int((got.tokens != want.tokens).any(1).sum())


def large_shapes() -> dict[str, Any]:
    """Every rule and dtype at the sizes engines have."""
    rows = different = 0
    for V, B in ((128256, 14), (262144, 7), (32001, 56)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for rule in RULES:
                given = on_device(B, 4, V, mixed(B), V + B, dtype)
                different += differing(given, rule)
                rows += B
    assert different <= 1, f"{different} of {rows} rows differ"
    return {"rows": rows, "different": different}


def many_rows(most: int = 1_000_000, seconds: float = 150.0) -> dict[str, Any]:
    """A million rows, every rule and setting in turn. As many as there is time for."""
    start, rows, lines = time.time(), 0, {}
    cases = [(rule, name) for rule in RULES for name in SETTINGS]
    n = 0
    while rows < most and time.time() - start < seconds:
        rule, name = cases[n % len(cases)]
        B = 4096
        given = on_device(B, 3, 4096, [SETTINGS[name]] * B, 10_000 + n, torch.float32)
        at = lines.setdefault(f"{rule}, {name}", {"rows": 0, "different": 0})
        at["rows"] += B
        at["different"] += differing(given, rule)
        rows, n = rows + B, n + 1
    different = sum(line["different"] for line in lines.values())
    assert different <= max(3.0, MOST_DIFFERENT * rows), f"{different} of {rows} rows differ: {lines}"
    return {"rows": rows, "different": different, "lines": lines, "seconds": round(time.time() - start)}


V_LAW, K_LAW, HORIZON = 8, 2, 3
ALPHA = 1e-6


def law_cases() -> Iterator[tuple[str, str, dp.Sampling, bool]]:
    small = {
        "temperature": S(temperature=0.8),
        "greedy": S(temperature=0.0),
        "top-k": S(temperature=0.8, top_k=5),
        "top-p": S(temperature=0.9, top_p=0.85),
        "min-p": S(min_p=0.1),
    }
    for rule in RULES:
        for name, sampling in small.items():
            yield rule, name, sampling, True
        yield rule, "chosen draft", small["temperature"], False


def law(
    rule: str, sampling: dp.Sampling, drawn: bool, samples: int = 4_000_000, drawn_with: dp.Sampling = WARM
) -> dict[str, float]:
    """G-test of the joint law of three tokens: what a round emits, then plain draws from the target.

    512 cells at most: at ALPHA a total variation of a few thousandths is seen. `drawn_with` is how the draft's tokens
    are drawn; it is declared to be WARM.
    """
    generator = torch.Generator("cuda").manual_seed(crc32(f"{rule} {sampling} {drawn}".encode()))
    target = 1.5 * torch.randn(1, K_LAW + 1, V_LAW, generator=generator, device="cuda")
    draft = target[:, :K_LAW] + 0.8 * torch.randn(1, K_LAW, V_LAW, generator=generator, device="cuda")
    p = dp.warp(target, [sampling]).probs()[0].double()
    q = dp.warp(draft, [drawn_with]).probs()[0]
    counts = torch.zeros(V_LAW**HORIZON, dtype=torch.long, device="cuda")
    B, done = 50_000, 0
    workspace = Workspace.empty(B, K_LAW, V_LAW, "cuda")
    full = torch.full((B,), K_LAW, device="cuda")
    rows = Parameters.of([sampling] * B, [WARM] * B, seeds=full, positions=full, lengths=full)
    while done < samples:
        rows["seeds"].copy_(torch.arange(done, done + B, device="cuda"))
        got = verify_rows(
            target.expand(B, -1, -1), drawn_from(q, B, generator), draft.expand(B, -1, -1) if drawn else None,
            parameters=rows, rule=rule, workspace=workspace,
        )  # fmt: skip
        text = torch.where(got.tokens >= 0, got.tokens, drawn_from(p.float(), B, generator))
        counts += torch.bincount(text[:, 0] * V_LAW**2 + text[:, 1] * V_LAW + text[:, 2], minlength=len(counts))
        done += B
    expected = (p[0][:, None, None] * p[1][None, :, None] * p[2][None, None, :]).flatten()
    return g_test(counts.double().cpu(), expected.cpu() * done)


def drawn_from(rows: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n draws from each row of probabilities, [n, rows]."""
    return torch.stack([row.multinomial(n, replacement=True, generator=generator) for row in rows], 1).contiguous()


def g_test(counts: Tensor, expected: Tensor) -> dict[str, float]:
    """p-value of the counts; cells that expect less than 5 are put together, an impossible one fails outright."""
    if bool(counts[expected < 1e-9].sum() > 0):
        return {"p": 0.0, "cells": 0, "samples": float(counts.sum())}
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    g = 2 * float(torch.where(counts > 0, counts * (counts / expected).log(), 0.0).sum())
    freedom = len(counts) - 1
    return {"p": chi_square_tail(g, freedom), "cells": freedom + 1, "samples": float(counts.sum())}


def chi_square_tail(x: float, freedom: int) -> float:
    """By Wilson and Hilferty's cube root: near enough for a threshold, and needs no library."""
    if freedom == 0:
        return 1.0
    z = ((max(x, 0.0) / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def graph_replay() -> dict[str, Any]:
    """A captured call follows its parameters and inputs when they change in place, and allocates nothing."""
    given = on_device(8, 4, 32000, mixed(8), 1, torch.float32)
    rows, workspace = parameters(given), Workspace.empty(8, 4, 32000, "cuda")

    def run() -> Any:
        return verify_rows(given.target, given.tokens, given.draft, parameters=rows, rule="block", workspace=workspace)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.memory_allocated() == before, "a call with a workspace allocated memory"
    for n in range(20):
        fresh = on_device(8, 4, 32000, mixed(8), 50 + n, torch.float32)
        for name in ("target", "draft", "tokens"):
            getattr(given, name).copy_(getattr(fresh, name))
        for name in ("seeds", "positions", "lengths"):
            rows[name].copy_(getattr(fresh, name))
        graph.replay()
        assert torch.equal(got.tokens, reference(fresh, "block").tokens), n
    return {"replays": 20}


def determinism() -> dict[str, Any]:
    """The same verdict in a hundred runs, and whatever the batch around a row."""
    given = on_device(64, 4, 32000, mixed(64), 2, torch.bfloat16)
    for rule in RULES:
        want = kernel(given, rule).tokens
        for _ in range(100):
            assert torch.equal(kernel(given, rule).tokens, want), rule
        for B in (1, 3, 17):
            names = ("target", "draft", "tokens", "lengths", "seeds", "positions")
            last = {n: getattr(given, n)[-B:] for n in names}
            part = replace(given, **last, samplings=given.samplings[-B:], drafts=given.drafts[-B:])
            assert torch.equal(kernel(part, rule).tokens, want[-B:]), (rule, B)
    return {"runs": 100, "batches": [1, 3, 17, 64]}


__all__ = ["ALPHA", "determinism", "graph_replay", "large_shapes", "law", "law_cases", "many_rows"]
