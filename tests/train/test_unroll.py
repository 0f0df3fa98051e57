"""The training unrolls a head exactly as drafting runs it; and the loss has the gradient it says."""

import pytest
import torch

from draftproof.models.head import Head
from draftproof.models.tapped import embeddings, shape_for
from draftproof.train.loss import CHUNK, distance, of_logits
from draftproof.train.unroll import unroll
from train.pupils import pupil

N, DEPTH = 18, 4


@pytest.fixture(scope="module")
def scene():
    model = pupil()
    tokens = torch.randint(100, (2, N + 2), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        shown = model(tokens, output_hidden_states=True)
        head = Head(shape_for(model))
        states = [shown.hidden_states[tap][:, :N] for tap in head.shape.taps]
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
        if step:  # a head that kept reading the target would be another
            assert (outs[step] - outs[0])[:, at].abs().max() > 1e-3


@pytest.mark.parametrize("blend", [0.0, 0.4, 1.0])
def test_the_slope_is_that_of_the_loss(blend):
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 9, dtype=torch.float64, generator=numbers, requires_grad=True)
    p = torch.randn(6, 12, dtype=torch.float64, generator=numbers).softmax(-1)[:, :9]  # some mass is out of reach
    overlap = torch.minimum(p, logits.softmax(-1)).sum(-1)
    wanted = (1 - blend) * -(p * logits.log_softmax(-1)).sum(-1) - blend * overlap.log()
    (slope,) = torch.autograd.grad(wanted.sum(), logits)
    loss, accepted, given = of_logits(logits.detach().clone(), p, blend)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(accepted, overlap.detach())
    torch.testing.assert_close(given, slope)


def test_chunks_add_up_to_the_mean():
    numbers = torch.Generator().manual_seed(2)
    states = torch.randn(CHUNK + 50, 8, generator=numbers, requires_grad=True)
    rows = torch.randn(5, 8, generator=numbers)
    p = torch.randn(CHUNK + 50, 5, generator=numbers).softmax(-1)
    loss, _ = distance(states, rows, p, 0.0)
    loss.backward()
    got, states.grad = states.grad, None
    wanted = -(p * (states @ rows.T).log_softmax(-1)).sum(-1).mean()
    wanted.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach())
    torch.testing.assert_close(got, states.grad, rtol=1e-4, atol=1e-9)
