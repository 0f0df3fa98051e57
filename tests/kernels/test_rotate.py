"""A head's queries and keys are rotated by one kernel as by torch, whatever their layout in memory."""

import pytest
import torch

from draftproof.core import device as core_device
from draftproof.kernels import layer
from draftproof.models.head.network import gated, rotate, rotated_by_torch


@pytest.fixture(autouse=True)
def _kernels(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cpu",))


def numbers(*shape, device, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@pytest.mark.parametrize("layout", ["heads first", "tokens first", "a part of more"])
@pytest.mark.parametrize(("B", "heads", "n", "size"), [(1, 3, 1, 8), (2, 4, 3, 12), (3, 1, 5, 64)])
def test_the_numbers_are_torchs(layout, B, heads, n, size, device):
    frequencies = 10000.0 ** -(torch.arange(0, size, 2) / size).to(device)
    if layout == "heads first":
        x = numbers(B, heads, n, size, device=device)
    elif layout == "tokens first":
        x = numbers(B, n, heads, size, device=device).transpose(1, 2)
    else:
        x = numbers(B, n, heads + 2, size, device=device).transpose(1, 2)[:, 1:-1]
    for positions in (torch.arange(n)[None] + 5000, torch.randint(4000, (B, n))):
        wanted = rotated_by_torch(x, positions.to(device), frequencies)
        made = layer.rotate(x, positions.to(device), frequencies)
        assert made.shape == wanted.shape
        assert (made - wanted).abs().max() < 1e-5
        assert made.transpose(1, 2).is_contiguous()


def test_gradients_flow_through_torch(device):
    x = numbers(1, 2, 3, 8, device=device).requires_grad_()
    positions, frequencies = torch.arange(3, device=device)[None], torch.ones(4, device=device)
    assert rotate(x, positions, frequencies).requires_grad
    assert gated(numbers(2, 8, device=device).requires_grad_()).requires_grad
    with torch.no_grad():
        made = rotate(x, positions, frequencies)
    assert not made.requires_grad
    assert (made - rotated_by_torch(x, positions, frequencies)).abs().max() < 1e-5
