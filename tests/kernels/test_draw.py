"""Test a drafter's draws in kernels: same random numbers, same token and distribution as the reference."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import draftproof as dp
from draftproof.core import device as core_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.types import History
from draftproof.drafters.sample import Draws

S = dp.SamplingParams
NO_HISTORY = History([], [])
BATCHES = {
    "temperature": [S(temperature=0.7), S(), S(temperature=1.6)],
    "one greedy": [S(temperature=0.7), S(temperature=0.0), S()],
    "filters": [S(top_k=5), S(temperature=0.9, top_p=0.6), S(min_p=0.1)],
}


@pytest.fixture
def logits(device):
    return (3 * torch.randn(3, 700, generator=torch.Generator().manual_seed(1))).to(device)


def rng(device, shared):
    seeds = torch.tensor([-(2**61), 3, 2**40], device=device)
    return Philox(seeds, torch.tensor([5, 900, 17], device=device), shared)


def both(monkeypatch, batch, logits, shared, j, vocab=None):
    """Draw with the kernels and with the reference."""
    draws = Draws(batch, rng(logits.device, shared), vocab)
    monkeypatch.setattr(core_device, "KERNEL_DEVICES", ())
    want = draws(logits, [NO_HISTORY] * 3, j)
    monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu"))
    return draws(logits, [NO_HISTORY] * 3, j), want


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_token_and_distribution_are_the_reference_s(monkeypatch, name, shared, logits):
    for j in (0, 1) if name == "filters" else (0, 1, 2, 16):
        (dist, tokens), (want_dist, want_tokens) = both(monkeypatch, BATCHES[name], logits, shared, j)
        assert tokens.tolist() == want_tokens.tolist()
        assert dist.point.tolist() == want_dist.point.tolist()
        assert dist.plain == want_dist.plain
        assert torch.equal(dist.cutoff, want_dist.cutoff)
        assert torch.allclose(dist.lse, want_dist.lse, atol=1e-6)
        assert torch.allclose(dist.probs(), want_dist.probs(), atol=1e-6)


def test_half_precision_and_a_part_of_a_row(monkeypatch, logits):
    """A drafter with more tokens than the target: the rest of its row is not read."""
    part = logits.to(torch.bfloat16)[:, :600]
    (dist, tokens), (want_dist, want_tokens) = both(monkeypatch, BATCHES["temperature"], part, False, 1)
    assert tokens.tolist() == want_tokens.tolist()
    assert dist.logits.dtype == torch.float32
    assert torch.allclose(dist.lse, want_dist.lse, atol=1e-6)


def test_a_drafter_with_fewer_tokens_than_the_target(monkeypatch, logits, device):
    vocab = DraftVocab.of(torch.arange(700, device=device), 900)
    for shared in (False, True):
        (dist, tokens), (want_dist, want_tokens) = both(monkeypatch, BATCHES["one greedy"], logits, shared, 0, vocab)
        assert tokens.tolist() == want_tokens.tolist()
        assert dist.point.tolist() == want_dist.point.tolist()
        assert dist.vocab is vocab


def test_a_row_that_is_not_a_distribution_has_a_nan_lse(monkeypatch, logits):
    logits[1, 9] = torch.nan
    (dist, tokens), _ = both(monkeypatch, BATCHES["temperature"], logits.clone(), False, 0)
    assert dist.lse.isnan().tolist() == [False, True, False]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 700


def test_what_was_drawn_stays_when_the_next_is(monkeypatch, logits):
    """The kernels' workspace is reused for every token; nothing of an earlier one may lie in it."""
    monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu"))
    draws = Draws(BATCHES["filters"], rng(logits.device, False))
    dist, tokens = draws(logits, [NO_HISTORY] * 3, 0)
    before = [part.clone() for part in (tokens, dist.lse, dist.cutoff, dist.point)]
    draws(logits + torch.arange(700, device=logits.device) / 50, [NO_HISTORY] * 3, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, (tokens, dist.lse, dist.cutoff, dist.point), strict=True))


def test_greedy_batches_are_left_to_the_reference(monkeypatch, logits):
    monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu"))
    draws = Draws([S(temperature=0)] * 3, rng(logits.device, False))
    draws(logits, [NO_HISTORY] * 3, 0)
    assert draws._device is None


def test_penalties_are_applied_before_the_draw(monkeypatch, logits):
    batch = [S(presence_penalty=5.0, temperature=0.5), S(), S(repetition_penalty=1.5, top_k=9)]
    seen = [History([3], logits[b].topk(4).indices.tolist()) for b in range(3)]
    draws, results = Draws(batch, rng(logits.device, False)), []
    for runs in (True, False):
        monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu") if runs else ())
        results.append(draws(logits, seen, 0))
    (dist, tokens), (want_dist, want_tokens) = results
    assert draws._device is not None
    assert tokens.tolist() == want_tokens.tolist()
    assert torch.allclose(dist.probs(), want_dist.probs(), atol=1e-6)


@pytest.mark.slow
def test_a_draw_compiles_without_a_gpu(tmp_path):
    program = Path(__file__).parent / "compile_draw.py"
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(program), "90", "4096"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[:4] == ["scan", "draw", "scan", "coupled"]
