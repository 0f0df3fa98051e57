"""The training unrolls a head exactly as drafting runs it."""

import pytest
import torch

from draftproof.models.head.network import Head
from draftproof.models.head.taps import embeddings, shape_for
from draftproof.train.unroll import unroll
from train.tiny_target import tiny_llama

N, DEPTH = 18, 4


@pytest.fixture(scope="module")
def scene():
    model = tiny_llama()
    tokens = torch.randint(100, (2, N + 2), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)
        head = Head(shape_for(model))
        states = [output.hidden_states[tap][:, :N] for tap in head.shape.taps]
        embedded = embeddings(model)[tokens[:, 1:-1]]
        return head, embedded, states, unroll(head, embedded, states, DEPTH)


@pytest.mark.parametrize("start", [4, 7, 13])
@torch.no_grad()
def test_every_position_is_trained_as_it_drafts(scene, start):
    head, embedded, states, outs = scene
    cache = head.new_cache(2, 64)
    positions = torch.arange(start + 1)[None].expand(2, -1)
    fused = head.fuse([state[:, : start + 1] for state in states])
    h = head.step(embedded[:, : start + 1], fused, positions, cache)[:, -1:]
    for step in range(DEPTH):
        at = start + step
        if step:
            h = head.step(embedded[:, at : at + 1], h, torch.full((2, 1), at), cache)
        torch.testing.assert_close(head.out(h), outs[step][:, at : at + 1], rtol=0, atol=1e-5)
        if step:  # a head that kept reading the target's states would give the first step's output
            assert (outs[step] - outs[0])[:, at].abs().max() > 1e-3
