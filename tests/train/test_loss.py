"""The loss returns its own gradient, and the kernel agrees with the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftproof.train.loss import LEAST_OVERLAP, LOGITS_CHUNK, checked_kernel, head_loss, loss_and_gradient

BLENDS = [0.0, 0.4, 1.0]
KERNELS = Path(__file__).parent.parent / "kernels"


def distribution_of(numbers, rows, width, dtype=torch.float64, spread=1.0):
    """Return scores of the first tokens and the log-sum-exp of a few more: some mass is outside the vocabulary."""
    every = spread * torch.randn(rows, width + 3, dtype=dtype, generator=numbers)
    return every[:, :width].contiguous(), every.logsumexp(-1)


@pytest.mark.parametrize("blend", BLENDS)
def test_the_gradient_is_that_of_the_loss(blend):
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 9, dtype=torch.float64, generator=numbers, requires_grad=True)
    scores, lse = distribution_of(numbers, 6, 9)
    p = (scores - lse[:, None]).exp()
    overlap = torch.minimum(p, logits.softmax(-1)).sum(-1)
    wanted = (1 - blend) * -(p * logits.log_softmax(-1)).sum(-1) - blend * overlap.log()
    (gradient,) = torch.autograd.grad(wanted.sum(), logits)
    loss, accepted, got = loss_and_gradient(logits.detach().clone(), scores, lse, blend)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(accepted, overlap.detach())
    torch.testing.assert_close(got, gradient)


def test_chunks_add_up_to_the_mean():
    numbers = torch.Generator().manual_seed(2)
    states = torch.randn(LOGITS_CHUNK + 50, 8, generator=numbers, requires_grad=True)
    rows = torch.randn(5, 8, generator=numbers)
    scores, lse = distribution_of(numbers, LOGITS_CHUNK + 50, 5, torch.float32)
    loss, _ = head_loss(states, rows, scores, lse, 0.0)
    loss.backward()
    got, states.grad = states.grad, None
    wanted = -((scores - lse[:, None]).exp() * (states @ rows.T).log_softmax(-1)).sum(-1).mean()
    wanted.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach())
    torch.testing.assert_close(got, states.grad, rtol=1e-4, atol=1e-9)


@pytest.fixture
def fused():
    """Return the kernel: on a GPU if there is one, else in Triton's interpreter (chosen in ../conftest.py)."""
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1")
    from draftproof.train.loss_kernel import fused_loss_and_gradient

    return fused_loss_and_gradient


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize(("width", "spread"), [(5, 1.0), (1000, 3.0), (2048, 12.0)])
def test_the_kernel_agrees_with_the_reference(fused, blend, width, spread):
    """Some distributions hardly overlap: there the gradient is limited."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.Generator().manual_seed(3)
    logits = (spread * torch.randn(7, width, generator=numbers)).to(device)
    scores, lse = (part.to(device) for part in distribution_of(numbers, 7, width, torch.float32, spread))
    scores[0], logits[1] = logits[0], scores[1]  # equal distributions except for the mass outside the vocabulary
    wanted = loss_and_gradient(logits.clone(), scores, lse, blend)
    for got, reference in zip(fused(logits.clone(), scores, lse, blend), wanted, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-5, atol=5e-6)
    assert spread < 10 or wanted[1].min() < LEAST_OVERLAP


def test_in_half_precision_only_the_gradient_is_rounded(fused):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.Generator().manual_seed(4)
    logits = (2 * torch.randn(3, 300, generator=numbers)).to(device, torch.bfloat16)
    scores, lse = distribution_of(numbers, 3, 300, torch.float32, 2.0)
    scores, lse = scores.to(device, torch.bfloat16), lse.to(device)
    loss, overlap, gradient = loss_and_gradient(logits.clone(), scores, lse, 0.4)
    got = fused(logits, scores, lse, 0.4)
    torch.testing.assert_close(got[0], loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], overlap, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[2], gradient.to(torch.bfloat16), rtol=2**-7, atol=1e-6)
    assert got[2].data_ptr() == logits.data_ptr()


def test_rows_that_are_not_contiguous_are_refused(fused):
    wide = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="must be contiguous"):
        fused(wide[:, :4], wide[:, 4:], torch.zeros(4), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_agrees_is_used(fused, dtype):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert checked_kernel(fused, device, dtype, 100) is fused


def breaks(logits, scores, lse, blend):
    raise RuntimeError("no compiler")


def forgets_the_mass_outside_the_vocabulary(logits, scores, lse, blend):
    return loss_and_gradient(logits, scores, scores.float().logsumexp(-1), blend)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(breaks, "does not run: no compiler"), (forgets_the_mass_outside_the_vocabulary, "is off by 0.")],
)
def test_a_kernel_that_disagrees_is_not_used_and_the_reason_is_given(kernel, reason):
    with pytest.warns(UserWarning, match=f"without its kernel, which {reason}"):
        assert checked_kernel(kernel, torch.device("cpu"), torch.bfloat16, 100) is loss_and_gradient


def test_the_kernel_compiles_without_a_gpu(tmp_path):
    """In another process: Triton either compiles or interprets, and decides at import."""
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(KERNELS),
        "TRITON_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, str(Path(__file__).parent / "compile_loss_kernel.py"), "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["compare"] * 4
