"""How far a head's law is from the target's, with a gradient that is ready after the forward pass.

The output matrix is frozen and its products are by far the largest tensors of the training: each chunk of logits is
turned into the gradient of its states at once, and only that is kept.
"""

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK: Final = 8192
"""Positions whose logits exist at the same time."""

LEAST_OVERLAP: Final = 0.02
"""Where laws hardly meet, the gradient of the acceptance would grow without bound."""


def distance(
    states: Float[Tensor, "M H"], rows: Float[Tensor, "R H"], p: Float[Tensor, "M R"], blend: float
) -> tuple[Float[Tensor, ""], Float[Tensor, " M"]]:
    """The mean of (1 - blend) · cross-entropy + blend · (-log acceptance) over positions, and their acceptance.

    `p` is the target's law on the vocabulary of `rows`; what it leaves out is out of reach and counts as refused.
    """
    loss, overlap = _Distance.apply(states, rows, p, blend)
    return loss, overlap


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, p: Tensor, blend: float) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(states)
        total, overlaps = states.new_zeros(()), [states.new_zeros(0)]
        for start in range(0, len(states), CHUNK):
            part = slice(start, start + CHUNK)
            loss, overlap, slope = of_logits(states[part].to(rows.dtype) @ rows.T, p[part], blend)
            gradient[part] = slope.to(rows.dtype) @ rows
            total = total + loss.sum()
            overlaps.append(overlap)
        ctx.save_for_backward(gradient)
        overlap = torch.cat(overlaps)
        ctx.mark_non_differentiable(overlap)
        return total / len(states), overlap

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * (grad / len(gradient)), None, None, None


def of_logits(
    logits: Float[Tensor, "m R"], p: Float[Tensor, "m R"], blend: float
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"], Float[Tensor, "m R"]]:
    """Loss and acceptance at each position, and the slope of the loss; in float32 at least.

    In place wherever it can be: on a GPU this is bound by the memory it touches, and half of a training's time.
    """
    log_q = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    entropy = -(p * log_q).sum(-1)
    q = log_q.exp_()
    overlap = torch.minimum(q, p).sum(-1)
    refusal = -overlap.clamp(min=torch.finfo(overlap.dtype).tiny).log()
    mass = p.sum(-1, dtype=q.dtype)
    if blend == 0:
        return entropy, overlap, q.mul_(mass[:, None]).sub_(p)
    # (1 - blend) · (q · mass - p) - blend · (below - q · Σ below) / overlap, where `below` is q where it is less than p
    pull = blend / overlap.clamp(min=LEAST_OVERLAP)
    below = q.masked_fill(q >= p, 0)
    scale = (1 - blend) * mass + pull * below.sum(-1)
    slope = q.mul_(scale[:, None]).sub_(below.mul_(pull[:, None])).sub_(p, alpha=1 - blend)
    return (1 - blend) * entropy + blend * refusal, overlap, slope
