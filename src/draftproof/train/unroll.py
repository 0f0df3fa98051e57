"""Unroll a head over the steps of a draft: from its second step on it reads its own states, as when it drafts.

All positions of a text are trained at once, each as if a draft began there (the "training-time test" of EAGLE-3,
2503.01840). At step j, position n continues from the state that step j - 1 made at position n - 1. It attends to the
keys that a draft would see: the first step's up to position n - j, then one of each later step.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftproof.models.head.network import Head

ALIGNED: Final = 8
"""Numbers per row to which attention scores are padded: GPUs multiply aligned rows with their tensor cores."""

Keys = list[tuple[Tensor, Tensor]]
"""The keys and values of each step so far."""


def unroll(
    head: Head, embedded: Float[Tensor, "B N H"], states: Sequence[Float[Tensor, "B N H"]], depth: int
) -> list[Float[Tensor, "B N H"]]:
    """Return the outputs of `head.out` at every position after 1, 2 … `depth` steps.

    The first `depth` positions are meaningless: their drafts would have begun before the text.

    states    the target's hidden states after each tap
    embedded  the embedding of the token after each position
    """
    positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
    # float32 between the layers: under autocast the residual sums would be rounded to half precision
    h = head.fuse([state.float() for state in states]).float()
    outs, keys = [], Keys()
    for step in range(depth):
        if step:
            h = torch.cat([h[:, :1], h[:, :-1]], 1)
        q, k, v = head.heads(embedded, h, positions)
        keys.append((k, v))
        attended = _causal(q, k, v) if step == 0 else _drafted(q, keys)
        h = head.rest(h, attended).float()
        outs.append(head.out(h))
    return outs


def _causal(q: Float[Tensor, "B h N d"], k: Float[Tensor, "B g N d"], v: Float[Tensor, "B g N d"]) -> Tensor:
    grouped = q.shape[1] > k.shape[1]
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _drafted(q: Float[Tensor, "B h N d"], steps_so_far: Keys) -> Float[Tensor, "B h N d"]:
    """Attend to the first step's keys up to `steps` positions back, and to one key of each later step."""
    (keys, values), *later = steps_so_far
    B, g, N, d = keys.shape
    steps = len(later)
    folded = q.reshape(B, g, -1, N, d) * d**-0.5
    scores = (folded.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (-1, N))
    column = torch.arange(N, device=q.device)
    scores = scores.masked_fill(column[None, :] > column[:, None] - steps, float("-inf"))
    own_scores = [
        (folded * _shifted(k, steps - 1 - i)[:, :, None]).sum(-1, keepdim=True) for i, (k, _) in enumerate(later)
    ]
    padding = scores.new_full((*scores.shape[:-1], -steps % ALIGNED), float("-inf"))
    # Without autocast, which would copy all scores to float32 and the weights back. softmax sums in float32 anyway.
    with torch.autocast(q.device.type, enabled=False):
        weights = torch.cat([scores, *(score.to(scores.dtype) for score in own_scores), padding], -1).softmax(-1)
    # split, not sliced: the gradient of each slice would be a full-size tensor
    first, *single = weights.split([N, *(1 for _ in later), -steps % ALIGNED], -1)
    out: Tensor = (first.flatten(2, 3) @ values).unflatten(2, (-1, N))
    for i, (weight, (_, v)) in enumerate(zip(single, later, strict=False)):  # the last weights are padding
        out = out + weight * _shifted(v, steps - 1 - i)[:, :, None]
    return out.reshape(q.shape)


def _shifted(states: Float[Tensor, "B g N d"], positions: int) -> Float[Tensor, "B g N d"]:
    """Move states to later positions: each position reads the state made this many positions before it."""
    return states.roll(positions, 2) if positions else states
