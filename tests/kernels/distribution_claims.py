"""Test the distribution of what the kernels emit, on a GPU, by millions of samples. Needs no pytest."""

import math
from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor

import draftproof as dp
from draftproof.kernels import verify_rows
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import Workspace

S = dp.SamplingParams
RULES = ("token", "block", "coupled")
WARM = S(temperature=0.8)
V_DIST, K_DIST, HORIZON = 8, 2, 3
ALPHA = 1e-6


def distribution_cases() -> Iterator[tuple[str, str, dp.SamplingParams, bool]]:
    """Yield rule, name, sampling and whether the draft was drawn."""
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


def dist(
    rule: str, sampling: dp.SamplingParams, drawn: bool, samples: int = 4_000_000, drawn_with: dp.SamplingParams = WARM
) -> dict[str, float]:
    """Run a G-test of the joint distribution of three tokens: those a round emits, then plain draws from the target.

    512 cells at most: at ALPHA a total variation of a few thousandths is detected. `drawn_with` is how the draft's
    tokens are drawn; it is declared to be WARM.
    """
    generator = torch.Generator("cuda").manual_seed(crc32(f"{rule} {sampling} {drawn}".encode()))
    target = 1.5 * torch.randn(1, K_DIST + 1, V_DIST, generator=generator, device="cuda")
    draft = target[:, :K_DIST] + 0.8 * torch.randn(1, K_DIST, V_DIST, generator=generator, device="cuda")
    p = dp.warp(target, [sampling]).probs()[0].double()
    q = dp.warp(draft, [drawn_with]).probs()[0]
    counts = torch.zeros(V_DIST**HORIZON, dtype=torch.long, device="cuda")
    B, done = 50_000, 0
    workspace = Workspace.empty(B, K_DIST, V_DIST, "cuda")
    full = torch.full((B,), K_DIST, device="cuda")
    rows = Parameters.of([sampling] * B, [WARM] * B, seeds=full, positions=full, lengths=full)
    while done < samples:
        rows["seeds"].copy_(torch.arange(done, done + B, device="cuda"))
        got = verify_rows(
            target.expand(B, -1, -1), drawn_from(q, B, generator), draft.expand(B, -1, -1) if drawn else None,
            parameters=rows, rule=rule, workspace=workspace,
        )  # fmt: skip
        text = torch.where(got.tokens >= 0, got.tokens, drawn_from(p.float(), B, generator))
        counts += torch.bincount(text[:, 0] * V_DIST**2 + text[:, 1] * V_DIST + text[:, 2], minlength=len(counts))
        done += B
    expected = (p[0][:, None, None] * p[1][None, :, None] * p[2][None, None, :]).flatten()
    return g_test(counts.double().cpu(), expected.cpu() * done)


def drawn_from(rows: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw n tokens from each row of probabilities, [n, rows]."""
    return torch.stack([row.multinomial(n, replacement=True, generator=generator) for row in rows], 1).contiguous()


def g_test(counts: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the p-value of the counts; cells that expect less than 5 are merged, an impossible count gives 0."""
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
    """Return the tail probability by Wilson and Hilferty's cube root: accurate enough for a threshold, no library."""
    if freedom == 0:
        return 1.0
    z = ((max(x, 0.0) / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
