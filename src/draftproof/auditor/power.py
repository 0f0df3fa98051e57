"""Test counts against a known distribution with fixed-size tests, and compute the sample size that a bias needs.

`texts_needed` returns how many texts show a given bias nine times in ten.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

POWER: Final = 0.9
"""Probability with which a bias of the stated size is found."""
POWER_SCORE: Final = 1.2815515655446004
"""The standard normal's quantile at POWER."""
SMALLEST_CELL: Final = 5.0
"""Expected count below which cells are pooled: smaller counts do not follow the χ² approximation."""


def g_test(seen: Int[Tensor, " W"], dist: Float[Tensor, " W"]) -> float:
    """Return the p-value of a G-test of these counts; 0 if a cell of probability 0 was seen."""
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
    """Return the probability that a χ² variable of these degrees of freedom exceeds x."""
    tail: Tensor = torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), x.double() / 2)
    return tail


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Return which hypotheses are rejected by Holm's method: any true one with probability at most alpha."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected


def texts_needed(cells: int, total_variation: float, alpha: float) -> int:
    """Return how many texts a G-test needs to find a bias of this total variation, of any shape, with power POWER."""
    return math.ceil(_shift_needed(cells, alpha) / (4 * total_variation**2))


def visible(cells: int, texts: int, alpha: float) -> float:
    """Return the smallest total variation that this many texts show with power POWER."""
    return math.sqrt(_shift_needed(cells, alpha) / (4 * max(texts, 1)))


def _shift_needed(cells: int, alpha: float) -> float:
    """Return the non-centrality of G that is needed to find a bias.

    n texts give 2n·KL, and KL ≥ 2·TV² (Pinsker), the worst shape. G is then near a non-central χ²; its quantiles are
    taken from the normal distribution of the same mean and variance.
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
