"""A head's states over a pool, as a GPU computes them, are those over a rectangular cache: one layer, and several."""

import pytest
import torch

from draftproof.core import device as core_device
from draftproof.kernels import attention
from draftproof.models.extents import PAGE
from draftproof.models.head.attach_published import fitted_eagle3
from draftproof.models.head.rows import HeadRows
from engine.fake_graphs import reference_attention
from engine.tiny_heads import on_target
from models import reference_checkpoints as reference
from models.numbered_weights import VOCABULARY
from models.tiny_targets import tiny_target

pytest.importorskip("triton")
LENGTHS, WIDTHS, T = [5, 0, 3], [4, 2, 0], 4
"""Entries of each row before a pass, and in it; the third row is padding, and has ended."""


@pytest.fixture(params=["own", "everything", "full vocabulary"])
def head(request, tmp_path, monkeypatch):
    monkeypatch.setattr(core_device, "HOST", "none")
    monkeypatch.setattr(attention, "decode_attention", reference_attention)
    if request.param == "own":
        return on_target(6)
    return fitted_eagle3(reference.written("eagle3", request.param, tmp_path), tiny_target(VOCABULARY, 16, 8))


def numbers(head, rows, n):
    generator = torch.Generator().manual_seed(rows + n)
    V, H = head.table.shape
    tokens = torch.randint(min(V, 8), (rows, n), generator=generator)
    return tokens, torch.randn((rows, n, H), generator=generator)


@torch.inference_mode()
def test_states_whose_places_only_the_device_knows(head):
    """Rows lie anywhere in the pool; what is written for padding is read by nobody."""
    pool = HeadRows(head, pages=4)
    starts = torch.tensor([2 * PAGE, 0, PAGE])
    before, now = numbers(head, 3, max(LENGTHS)), numbers(head, 3, T)
    lengths, widths = torch.tensor(LENGTHS), torch.tensor(WIDTHS)
    pool.device_states(*before, torch.stack([starts, torch.zeros_like(starts), lengths]))
    held = [buffer[: 4 * PAGE].clone() for buffer in (*pool.pool.keys, *pool.pool.values)]
    made = pool.device_states(*now, torch.stack([starts, lengths, widths]))
    for b, (length, width) in enumerate(zip(LENGTHS, WIDTHS, strict=True)):
        cache = head.head.new_cache(1, 16)
        for (tokens, states), at, n in ((before, 0, length), (now, length, width)):
            if n:
                embedded, positions = head.embedded(tokens[b : b + 1, :n]), torch.arange(at, at + n)[None]
                wanted = head.head.step(embedded, states[b : b + 1, :n], positions, cache)
        if width:
            torch.testing.assert_close(made[b : b + 1, :width], wanted)
    for buffer, old in zip((*pool.pool.keys, *pool.pool.values), held, strict=True):
        changed = (buffer[: 4 * PAGE] != old).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert changed == [0, 1, *range(2 * PAGE + 5, 2 * PAGE + 9)]


@torch.inference_mode()
def test_gathered_states_are_the_same(head):
    pool, starts = HeadRows(head, pages=4), torch.tensor([3 * PAGE, PAGE])
    tokens, states = numbers(head, 2, 6)
    places = torch.stack([starts, torch.zeros_like(starts), torch.full_like(starts, 6)])
    wanted = pool.device_states(tokens, states, places)
    made = pool.gathered_states(2 * PAGE, tokens, states, torch.arange(6).expand(2, 6), starts)
    torch.testing.assert_close(made, wanted)


def test_a_pool_on_a_cpu_serves_heads_that_were_trained_here(tmp_path):
    published = fitted_eagle3(reference.written("eagle3", "everything", tmp_path), tiny_target(VOCABULARY, 16, 8))
    with pytest.raises(TypeError, match="a pool does not serve Eagle3 on cpu"):
        HeadRows(published, pages=1)
