"""Test integer sums: right, and the same in any order and share."""

from functools import reduce
from typing import no_type_check

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from draftproof.kernels.device.math import add_to, grain_of, in_grains, zero_sums

N = 64
STEPS = 32


@triton.jit
@no_type_check
def _total(x, out, most, first, stop, N: tl.constexpr):
    """Sum some steps of N numbers each."""
    most = most + tl.zeros((), tl.float32)
    sums = zero_sums(1, N)
    for step in range(first, stop):
        sums = add_to(sums, tl.load(x + step * N + tl.arange(0, N))[None, :], most)
    tl.atomic_add(out + tl.arange(0, 1), in_grains(sums), sem="relaxed")
    tl.store(out + 1, (grain_of(most) * 2.0**60).to(tl.int64))


def total(x: torch.Tensor, most: float, *, cut: int = STEPS) -> tuple[int, float]:
    """Sum all of x by two launches that share its steps; return the sum in grains and its value."""
    out = torch.zeros(2, dtype=torch.int64, device=x.device)
    _total[(1,)](x, out, most, 0, cut, N=N)
    _total[(1,)](x, out, most, cut, STEPS, N=N)
    grains, worth = out.tolist()
    return grains, grains * worth * 2.0**-60


@pytest.fixture
def masses(device):
    """Numbers from 10⁻⁹ to 1."""
    return torch.rand(STEPS * N, generator=torch.Generator().manual_seed(6)).pow(9).to(device)


def test_sums_are_right(masses):
    exact = masses.double().sum().item()
    for most in (exact, 1.7 * exact, 1e4 * exact):
        _, found = total(masses, most)
        assert abs(found - exact) <= STEPS * N * most * 2.0**-39


def test_no_order_or_share_matters(masses):
    most = masses.double().sum().item()
    grains, _ = total(masses, most)
    others = masses.flip(0)
    steps = masses.view(STEPS, N)
    assert not torch.equal(
        reduce(torch.add, steps), reduce(torch.add, steps.flip(0))
    )  # for float32 sums it does matter
    assert [total(x, most, cut=cut)[0] for x in (masses, others) for cut in (0, 1, 9, 31)] == [grains] * 8


def test_counts_are_exact(device):
    ones = torch.ones(STEPS * N, device=device)
    assert total(ones, 2.0**20)[1] == STEPS * N
