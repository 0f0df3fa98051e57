"""Draws, thinning and the race have the distribution of the weights: tails are reached, zeros never are."""

import pytest
import torch
from scipy.stats import binom

from draftproof.core.distribution import residual
from draftproof.core.draw import CHUNK, FEW_ROWS, TRIALS, chunk_sums, close, draw, invert, pick, race_weights
from draftproof.core.rng import Philox, Purpose
from draftproof.rules.token import thin
from g_test import g_test

ALPHA = 1e-6


def rng(n, seed=0):
    return Philox(torch.arange(n) + seed * 10_000_019, torch.full((n,), 11))


def test_inverting_skips_zeros_and_never_leaves_the_weights():
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]])
    ends = torch.tensor([[0.0, 0.2499, 0.25, 1 - 2.0**-53, 1.0]], dtype=torch.float64)
    assert invert(weights, ends).tolist() == [[1, 1, 3, 3, 3]]


def test_chunk_sums_add_up_for_any_vocabulary():
    for V in (1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7):
        w = torch.rand(2, V, dtype=torch.float64)
        assert chunk_sums(w).shape[-1] == -(-V // CHUNK)
        torch.testing.assert_close(chunk_sums(w).sum(-1), w.sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("V", [3, CHUNK, 1200, 4 * CHUNK])
def test_row_by_row_and_batched_draws_agree(V, dtype):
    """Token for token, with random numbers at both ends of [0, 1) and rows with zeros."""
    rows = 3 * FEW_ROWS
    weights = torch.rand(rows, V, dtype=dtype, generator=torch.Generator().manual_seed(4))
    weights[weights < 0.4] = 0
    weights[:, -1] = torch.where(weights.sum(-1) == 0, 1.0, weights[:, -1])
    first, second = (part[:, 0].clone() for part in rng(rows).pair(Purpose.CLOSE, torch.zeros(1, dtype=torch.long)))
    first[:4], second[2:6] = torch.tensor([0.0, 1 - 2.0**-53] * 2), torch.tensor([0.0, 1 - 2.0**-53] * 2)
    many = draw(weights, first, second)
    parts = zip(weights.split(FEW_ROWS), first.split(FEW_ROWS), second.split(FEW_ROWS), strict=True)
    assert torch.equal(many, torch.cat([draw(*part) for part in parts]))
    assert (weights.gather(-1, many[:, None]) > 0).all()


def test_picking_skips_zeros_and_never_leaves_the_weights():
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).numpy()
    ends = [0.0, 0.2499, 0.25, 1 - 2.0**-53, 1.0]
    assert [pick(weights, weights.sum(keepdims=True), 0.5, end) for end in ends] == [1, 1, 3, 3, 3]


def spread(V=1200, n=40, seed=1):
    """Return a distribution with mass on tokens of several chunks, and zeros in between."""
    g = torch.Generator().manual_seed(seed)
    p = torch.zeros(V)
    p[torch.randperm(V, generator=g)[:n]] = torch.rand(n, generator=g).pow(2) + 0.01
    return p / p.sum()


def counts(sampler, p, S, batch=2_000):
    """Count the tokens of S draws, made in batches because each row copies chunks of its own."""
    tokens = torch.cat([sampler(p.expand(batch, -1), rng(batch, seed)) for seed in range(S // batch)])
    return torch.bincount(tokens[tokens >= 0], minlength=len(p))


@pytest.mark.statistical
@pytest.mark.parametrize("sampler", [close, race_weights])
def test_draws_have_the_distribution_of_the_weights_across_chunks(sampler):
    """1e5 draws, 40 cells over 3 chunks: a bias of TV 0.015 is detected at alpha with power > 0.9.

    The control tests the same counts against a slightly more peaked distribution (TV about 0.03).
    """
    p = spread()
    seen = counts(sampler, p, 100_000)
    assert g_test(seen, p) > ALPHA
    assert g_test(seen, p**1.1) < ALPHA


@pytest.mark.statistical
def test_thinning_has_the_distribution_of_the_residual():
    """4e4 draws: TV 0.025 is detected at alpha. The control tests them against p, as if the residual were skipped."""
    p, q = spread(seed=1), spread(seed=2) * 0.5 + spread(seed=1) * 0.5

    def thinned(rows, key):
        return thin(rows, torch.ones(len(rows)).double(), lambda some, x: q.double()[x], key)

    seen = counts(thinned, p, 40_000, batch=500)
    assert seen.sum() > 0.999 * 40_000  # TV is about 1/2, and 16 trials are made
    assert g_test(seen, residual(p[None], q[None])[0]) > ALPHA
    assert g_test(seen, p) < ALPHA


def test_thinning_returns_pad_if_the_residual_is_empty():
    p = spread()[None]
    one = torch.ones(1).double()
    assert thin(p, one, lambda rows, x: p.gather(-1, x).double(), rng(1)).tolist() == [-1]
    assert TRIALS == 16


def test_the_tail_of_a_large_vocabulary_is_reached():
    """Half of 150 000 tokens share a mass of 5e-3: with 24-bit numbers most could never be drawn.

    2 000 draws: the count of tail tokens is binomial, and nearly all of them are different ones.
    """
    V, S, tail = 150_000, 2_000, 5e-3
    p = torch.zeros(V)
    p[: V // 2] = torch.arange(1, V // 2 + 1).float().pow(-1.2)
    p[: V // 2] *= (1 - tail) / p[: V // 2].sum()
    p[V // 2 :] = tail / (V - V // 2)
    for sampler in (close, race_weights):
        tokens = torch.cat([sampler(p.expand(50, -1), rng(50, seed)) for seed in range(S // 50)])
        hits = int((tokens >= V // 2).sum())
        assert binom.cdf(hits, S, tail) > ALPHA / 2
        assert binom.sf(hits - 1, S, tail) > ALPHA / 2
        assert hits - len(tokens[tokens >= V // 2].unique()) <= 1


def test_one_24_bit_number_would_leave_most_of_the_tail_out_of_reach():
    """The control, without sampling: one inverse CDF applied to all 24-bit numbers that fall into a thin tail."""
    V, tail = 150_000, 5e-4
    p = torch.full((1, V), tail / (V - 1), dtype=torch.float64)
    p[0, 0] = 1 - tail
    grid = torch.arange(int((1 - tail) * 2**24), 2**24, dtype=torch.float64)[None] * 2.0**-24
    assert len(invert(p, grid).unique()) < 0.1 * V
    n = 2_000
    first = 1 - tail * rng(1).uniform(Purpose.CLOSE, torch.arange(n))[0]
    second = rng(1).uniform(Purpose.THIN, torch.arange(n))[0]
    tokens = torch.cat([draw(p.expand(50, -1), u, v) for u, v in zip(first.split(50), second.split(50), strict=True)])
    assert len(tokens.unique()) > 0.97 * n  # 2 000 draws out of 150 000: 13 repeats expected
