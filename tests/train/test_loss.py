"""The loss has the gradient it says; and the kernel is its twin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftproof.train.loss import CHUNK, LEAST_OVERLAP, checked, distance, of_logits

BLENDS = [0.0, 0.4, 1.0]
KERNELS = Path(__file__).parent.parent / "kernels"


def distribution_of(numbers, rows, width, dtype=torch.float64, spread=1.0):
    """Scores of the first tokens, and the log-sum-exp of a few more: some mass is out of reach."""
    every = spread * torch.randn(rows, width + 3, dtype=dtype, generator=numbers)
    return every[:, :width].contiguous(), every.logsumexp(-1)


@pytest.mark.parametrize("blend", BLENDS)
def test_the_slope_is_that_of_the_loss(blend):
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 9, dtype=torch.float64, generator=numbers, requires_grad=True)
    scores, lse = distribution_of(numbers, 6, 9)
    p = (scores - lse[:, None]).exp()
    overlap = torch.minimum(p, logits.softmax(-1)).sum(-1)
    wanted = (1 - blend) * -(p * logits.log_softmax(-1)).sum(-1) - blend * overlap.log()
    (slope,) = torch.autograd.grad(wanted.sum(), logits)
    loss, accepted, given = of_logits(logits.detach().clone(), scores, lse, blend)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(accepted, overlap.detach())
    torch.testing.assert_close(given, slope)


def test_chunks_add_up_to_the_mean():
    numbers = torch.Generator().manual_seed(2)
    states = torch.randn(CHUNK + 50, 8, generator=numbers, requires_grad=True)
    rows = torch.randn(5, 8, generator=numbers)
    scores, lse = distribution_of(numbers, CHUNK + 50, 5, torch.float32)
    loss, _ = distance(states, rows, scores, lse, 0.0)
    loss.backward()
    got, states.grad = states.grad, None
    wanted = -((scores - lse[:, None]).exp() * (states @ rows.T).log_softmax(-1)).sum(-1).mean()
    wanted.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach())
    torch.testing.assert_close(got, states.grad, rtol=1e-4, atol=1e-9)


@pytest.fixture
def compared():
    """The kernel: on a GPU where there is one, else in Triton's interpreter (chosen in ../conftest.py)."""
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1")
    from draftproof.train.loss_kernel import compared

    return compared


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize(("width", "spread"), [(5, 1.0), (1000, 3.0), (2048, 12.0)])
def test_the_kernel_is_its_twin(compared, blend, width, spread):
    """Distributions that hardly meet are among them: there the slope is limited."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.Generator().manual_seed(3)
    logits = (spread * torch.randn(7, width, generator=numbers)).to(device)
    scores, lse = (part.to(device) for part in distribution_of(numbers, 7, width, torch.float32, spread))
    scores[0], logits[1] = logits[0], scores[1]  # equal distributions but for what is out of reach
    wanted = of_logits(logits.clone(), scores, lse, blend)
    for got, its in zip(compared(logits.clone(), scores, lse, blend), wanted, strict=True):
        torch.testing.assert_close(got, its, rtol=1e-5, atol=5e-6)
    assert spread < 10 or wanted[1].min() < LEAST_OVERLAP


def test_in_half_precision_only_the_slope_is_rounded(compared):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.Generator().manual_seed(4)
    logits = (2 * torch.randn(3, 300, generator=numbers)).to(device, torch.bfloat16)
    scores, lse = distribution_of(numbers, 3, 300, torch.float32, 2.0)
    scores, lse = scores.to(device, torch.bfloat16), lse.to(device)
    loss, overlap, slope = of_logits(logits.clone(), scores, lse, 0.4)
    got = compared(logits, scores, lse, 0.4)
    torch.testing.assert_close(got[0], loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], overlap, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[2], slope.to(torch.bfloat16), rtol=2**-7, atol=1e-6)
    assert got[2].data_ptr() == logits.data_ptr()


def test_rows_that_do_not_lie_end_to_end_are_refused(compared):
    wide = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="must be contiguous"):
        compared(wide[:, :4], wide[:, 4:], torch.zeros(4), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_agrees_is_used(compared, dtype):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert checked(compared, device, dtype, 100) is compared


def breaks(logits, scores, lse, blend):
    raise RuntimeError("no compiler")


def forgets_what_is_out_of_reach(logits, scores, lse, blend):
    return of_logits(logits, scores, scores.float().logsumexp(-1), blend)


@pytest.mark.parametrize(
    ("kernel", "said"), [(breaks, "does not run: no compiler"), (forgets_what_is_out_of_reach, "is off by 0.")]
)
def test_a_kernel_that_does_not_is_left_and_named(kernel, said):
    with pytest.warns(UserWarning, match=f"without its kernel, which {said}"):
        assert checked(kernel, torch.device("cpu"), torch.bfloat16, 100) is of_logits


def test_the_kernel_compiles_without_a_gpu(tmp_path):
    """In a process of its own: Triton either compiles or interprets, whichever it was imported for."""
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(KERNELS),
        "TRITON_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, str(Path(__file__).parent / "compile_slope.py"), "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["compare"] * 4
