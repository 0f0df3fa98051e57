"""Test that the random numbers on the device are the reference's, bit for bit."""

from typing import no_type_check

import pytest
import torch

from draftproof.core.rng import Philox, Purpose

pytest.importorskip("triton")
import triton
import triton.language as tl

from draftproof.kernels.device.philox import ACCEPT, POSITION, exponential, pair


@triton.jit
@no_type_check
def _numbers(seeds, starts, out, N: tl.constexpr):
    b = tl.program_id(0)
    lanes = tl.arange(0, N)
    seed, start = tl.load(seeds + b), tl.load(starts + b)
    first, second = pair(seed, start, ACCEPT, lanes, 0)
    at = out + b * 3 * N + lanes
    tl.store(at, first)
    tl.store(at + N, second)
    tl.store(at + 2 * N, exponential(seed, start, POSITION, lanes, 1))


def test_numbers_are_the_reference_numbers(device):
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 123456789012345])
    starts = torch.tensor([0, 1, 2**20, 77, 2**31])
    out = torch.empty(5, 3, 64, dtype=torch.float64, device=device)
    _numbers[(5,)](seeds.to(device), starts.to(device), out, N=64)
    rng, lanes = Philox(seeds, starts), torch.arange(64)
    first, second = rng.pair(Purpose.ACCEPT, lanes)
    assert torch.equal(out[:, 0].cpu(), first)
    assert torch.equal(out[:, 1].cpu(), second)
    exact = rng.exponential(Purpose.POSITION, lanes, 1)
    assert torch.allclose(out[:, 2].cpu(), exact, rtol=1e-14, atol=0)
