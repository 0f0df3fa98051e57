"""A head trained as it drafts: from its second step on it reads its own states in place of the target's.

All positions of a text are trained at once, each as if a draft began there (the "training-time test" of EAGLE-3,
2503.01840): at step j, position n goes on from what step j - 1 made of position n - 1, and sees the keys that a draft
would find: the target's up to n - j, behind them those of the steps in between.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftproof.models.head.network import Head

ALIGNED: Final = 8

Keys = list[tuple[Tensor, Tensor]]
"""Keys and values of each step so far."""


def unroll(
    head: Head, embedded: Float[Tensor, "B N H"], states: Sequence[Float[Tensor, "B N H"]], depth: int
) -> list[Float[Tensor, "B N H"]]:
    """What `head.out` gives at every position after 1, 2 … `depth` steps. The first `depth` positions mean nothing:
    no draft could have begun before the text.

    states    the target's, after each tap
    embedded  the token behind each position
    """
    positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
    # float32 between the layers: under autocast the sums would lose what half precision cannot hold
    h = head.fuse([state.float() for state in states]).float()
    outs, kept = [], Keys()
    for step in range(depth):
        if step:
            h = torch.cat([h[:, :1], h[:, :-1]], 1)
        q, k, v = head.heads(embedded, h, positions)
        kept.append((k, v))
        attended = _causal(q, k, v) if step == 0 else _drafted(q, kept)
        h = head.rest(h, attended).float()
        outs.append(head.out(h))
    return outs


def _causal(q: Float[Tensor, "B h N d"], k: Float[Tensor, "B g N d"], v: Float[Tensor, "B g N d"]) -> Tensor:
    grouped = q.shape[1] > k.shape[1]
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _drafted(q: Float[Tensor, "B h N d"], kept: Keys) -> Float[Tensor, "B h N d"]:
    """Attention to the first step's keys up to `steps` positions back, and to one key of each step since."""
    (keys, values), *later = kept
    B, g, N, d = keys.shape
    steps = len(later)
    folded = q.reshape(B, g, -1, N, d) * d**-0.5
    scores = (folded.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (-1, N))
    column = torch.arange(N, device=q.device)
    scores = scores.masked_fill(column[None, :] > column[:, None] - steps, float("-inf"))
    own = [(folded * _later(k, steps - 1 - i)[:, :, None]).sum(-1, keepdim=True) for i, (k, _) in enumerate(later)]
    # rows of a whole number of ALIGNED numbers, or a GPU multiplies them without its fast units
    nothing = scores.new_full((*scores.shape[:-1], -steps % ALIGNED), float("-inf"))
    # in one precision: autocast would copy all scores to float32, and the weights back. Sums are made in float32 anyway
    with torch.autocast(q.device.type, enabled=False):
        weights = torch.cat([scores, *(score.to(scores.dtype) for score in own), nothing], -1).softmax(-1)
    # split, not sliced: the gradient of each slice would be a tensor as large as all of them
    first, *single = weights.split([N, *(1 for _ in later), -steps % ALIGNED], -1)
    out: Tensor = (first.flatten(2, 3) @ values).unflatten(2, (-1, N))
    for i, (weight, (_, v)) in enumerate(zip(single, later, strict=False)):  # the last of them is nothing
        out = out + weight * _later(v, steps - 1 - i)[:, :, None]
    return out.reshape(q.shape)


def _later(states: Float[Tensor, "B g N d"], positions: int) -> Float[Tensor, "B g N d"]:
    """Each position finds what was made so many positions before it."""
    return states.roll(positions, 2) if positions else states
