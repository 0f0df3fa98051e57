"""Fixed-size tests: against scipy, against known sample sizes, and with the power they claim."""

import math

import pytest
import torch
from scipy.stats import chi2, power_divergence

from draftproof.auditor.power import chi2_tail, g_test, holm, texts_needed, visible


@pytest.mark.parametrize(("x", "degrees"), [(0.5, 1), (12.0, 5), (130.0, 63), (700.0, 511)])
def test_the_tail_is_that_of_scipy(x, degrees):
    tail = float(chi2_tail(torch.tensor(x, dtype=torch.float64), degrees))
    assert tail == pytest.approx(float(chi2.sf(x, degrees)), rel=1e-6)


def test_the_g_test_is_that_of_scipy_where_no_cell_is_small():
    dist = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    seen = torch.tensor([130, 180, 290, 400])
    expected = power_divergence(seen.numpy(), (dist * 1000).numpy(), lambda_="log-likelihood").pvalue
    assert g_test(seen, dist) == pytest.approx(float(expected), rel=1e-9)


def test_the_impossible_fails_outright_and_small_cells_are_pooled():
    dist = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert g_test(torch.tensor([500, 499, 1]), dist) == 0.0
    rare = torch.tensor([0.5, 0.497, 0.001, 0.001, 0.001], dtype=torch.float64)
    assert g_test(torch.tensor([500, 497, 3, 0, 0]), rare) > 0.9  # three small cells, one count among them
    assert g_test(torch.tensor([7]), torch.ones(1).double()) == 1.0


def test_holm_rejects_step_by_step():
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([0.2, 0.3], 0.05) == [False, False]
    assert holm([], 0.05) == []


def test_known_sample_sizes():
    assert texts_needed(64, 1e-2, 1e-6) == pytest.approx(2.4e5, rel=0.02)
    assert texts_needed(64, 1e-3, 1e-6) == pytest.approx(2.4e7, rel=0.02)
    assert visible(64, texts_needed(64, 0.02, 1e-6), 1e-6) == pytest.approx(0.02, rel=1e-3)


def found(total_variation, runs=400):
    """Return how often a G-test of that size finds the hardest bias to see: mass moved between two halves."""
    cells, aim, alpha = 32, 0.05, 1e-3
    dist = torch.full((cells,), 1 / cells, dtype=torch.float64)
    wrong = dist.clone()
    wrong[: cells // 2] += total_variation / (cells // 2)
    wrong[cells // 2 :] -= total_variation / (cells // 2)
    n = texts_needed(cells, aim, alpha)
    numbers = torch.Generator().manual_seed(5)
    drawn = wrong.expand(runs, cells).multinomial(n, replacement=True, generator=numbers)
    return sum(g_test(row.bincount(minlength=cells), dist) < alpha for row in drawn) / runs


@pytest.mark.statistical
def test_the_power_is_what_is_claimed():
    """0.9 at the asked bias; 400 runs put it within ± 0.08 but for a chance of 1e-6 (σ = 0.015). Half the bias: far
    less, so that the test can fail."""
    assert found(0.05) > 0.82
    assert found(0.025) < 0.5
    assert math.isclose(found(0.0), 0.0, abs_tol=0.02)
