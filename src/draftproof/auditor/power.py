"""Tests with a size chosen beforehand: counts against a known distribution, many of them at one error rate, how many are enough.

No sample size is free of what it can see: `texts_needed` says how many texts show a given bias nine times in ten.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

POWER: Final = 0.9
"""The chance with which a bias of the stated size is found."""
POWER_SCORE: Final = 1.2815515655446004
"""The standard normal's POWER quantile."""
SMALLEST_CELL: Final = 5.0
"""Cells with fewer expected are pooled into one: their counts are too coarse for the test's distribution."""


def g_test(seen: Int[Tensor, " W"], dist: Float[Tensor, " W"]) -> float:
    """The p-value of these counts under this distribution; 0 if something impossible was seen."""
    if bool((seen[dist <= 0] > 0).any()):
        return 0.0
    expected = dist.double() * float(seen.sum())
    small = expected < SMALLEST_CELL
    counts = torch.cat([seen[~small].double(), seen[small].double().sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) < 2:
        return 1.0
    g = 2 * torch.special.xlogy(counts, counts / expected).sum()
    return float(chi2_tail(g.clamp_min(0.0), len(counts) - 1))


def chi2_tail(x: Float[Tensor, ""], degrees: int) -> Float[Tensor, ""]:
    """The chance that a χ² of these degrees of freedom exceeds x."""
    tail: Tensor = torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), x.double() / 2)
    return tail


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses fall, with a chance of at most alpha that any true one does."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    falls = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        falls[i] = True
    return falls


def texts_needed(cells: int, total_variation: float, alpha: float) -> int:
    """How many texts a G-test over so many cells needs to see a bias of this total variation, whatever its shape, with
    chance POWER."""
    return math.ceil(_shift_needed(cells, alpha) / (4 * total_variation**2))


def visible(cells: int, texts: int, alpha: float) -> float:
    """The smallest total variation that so many texts show with chance POWER."""
    return math.sqrt(_shift_needed(cells, alpha) / (4 * max(texts, 1)))


def _shift_needed(cells: int, alpha: float) -> float:
    """By how much a bias must move the centre of G to be seen.

    n texts move it by 2n·KL, and KL ≥ 2·TV² (Pinsker), the worst shape. G is then near a non-central χ²; its quantiles
    are taken from the normal distribution of the same mean and variance.
    """
    degrees = max(1, cells - 1)
    critical = _chi2_critical(degrees, alpha)
    shift = critical
    for _ in range(60):  # solves degrees + shift − z·√(2·degrees + 4·shift) = critical; a contraction
        shift = max(0.0, critical - degrees + POWER_SCORE * math.sqrt(2 * degrees + 4 * shift))
    return shift


def _chi2_critical(degrees: int, alpha: float) -> float:
    low, high = 0.0, 10.0 * degrees + 200.0
    for _ in range(80):
        middle = (low + high) / 2
        beyond = float(chi2_tail(torch.tensor(middle, dtype=torch.float64), degrees))
        low, high = (middle, high) if beyond > alpha else (low, middle)
    return high
