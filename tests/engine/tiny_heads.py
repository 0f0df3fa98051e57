"""A tiny draft head, trained on the tiny target for a second or two with fixed seeds."""

import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from draftproof.models.head import file as headfile
from draftproof.models.head.export import export
from draftproof.models.head.network import FittedHead, Head, attend
from draftproof.models.head.taps import embeddings, output_rows, shape_for
from engine.tiny import V, llama

IDS = (3, 0, 5, 1, 6, 2, 7, 4)
"""Token ids by falling frequency, as in a head's file; a reduced vocabulary is a prefix of them."""
STEPS, ROWS, LENGTH = 150, 48, 14


@cache
@torch.enable_grad()
def trained(steps: int = STEPS, taps: tuple[int, ...] | None = None) -> Head:
    """Train a head by one-step cross-entropy on random texts: good at the next token, worse at later ones."""
    model = llama()
    head = Head(shape_for(model, taps), seed=1)
    numbers = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    rows = output_rows(model, torch.tensor(IDS))
    for _ in range(steps):
        tokens = torch.randint(V, (ROWS, LENGTH), generator=numbers)
        states, p = _target_outputs(tokens, head.taps)
        log_q = (_head_states(head, tokens, states) @ rows.T).log_softmax(-1)
        loss = -(p[:, 1:, list(IDS)] * log_q).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head.requires_grad_(False)


@torch.no_grad()
def _target_outputs(tokens: Tensor, taps: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    out = llama()(tokens, output_hidden_states=True, use_cache=False)
    return [out.hidden_states[tap] for tap in taps], out.logits.softmax(-1)


def _head_states(head: Head, tokens: Tensor, states: list[Tensor]) -> Tensor:
    """Run the head on whole texts: at t, on the target's states at t and the token at t + 1."""
    n = tokens.shape[1] - 1
    h = head.fuse([tap[:, :-1] for tap in states])
    q, k, v = head.heads(embeddings(llama())[tokens[:, 1:]], h, torch.arange(n)[None])
    causal = torch.ones((n, n), dtype=torch.bool).tril().expand(len(tokens), n, n)
    return head.out(head.rest(h, attend(q, k, v, causal)))


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Return a folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="tiny-head-")


@cache
def published() -> Path:
    """Return the folder of an EAGLE-3 head over 6 tokens: one that was trained here, and exported."""
    folder = Path(_folder().name)
    meta = headfile.meta_for(llama(), IDS[:6], target="tiny", training={}, licence="")
    headfile.save(folder / "head", trained(taps=(1,)), meta)
    export(folder / "head", folder / "out", llama())
    return folder / "out"


@cache
def on_target(size: int = V, steps: int = STEPS) -> FittedHead:
    """Return the head over its `size` most frequent tokens."""
    return FittedHead.on(trained(steps), torch.tensor(IDS), llama(), size=size)
