"""How far a head's distribution is from the target's, with a gradient that is ready after the forward pass.

The output matrix is frozen and its products are by far the largest tensors of the training: each chunk of logits is
turned into the gradient of its states at once, and only that is kept.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK: Final = 8192
"""Positions whose logits exist at the same time."""

LEAST_OVERLAP: Final = 0.02
"""Where distributions hardly meet, the gradient of the acceptance would grow without bound."""

WIDEST: Final = 16384
"""Tokens of a row that the kernel holds at once."""

ROWS: Final = 64
ROUNDING: Final = 0.01
"""Rows by which a kernel is checked, and how far from its twin it may be: bfloat16 keeps 8 bits."""

Comparison = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
"""`of_logits`, or what gives the same."""


def distance(
    states: Float[Tensor, "M H"],
    rows: Float[Tensor, "R H"],
    scores: Float[Tensor, "M R"],
    lse: Float[Tensor, " M"],
    blend: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, " M"]]:
    """The mean of (1 - blend) · cross-entropy + blend · (-log acceptance) over positions, and their acceptance.

    The target's distribution on the vocabulary of `rows` is exp(scores - lse); what it leaves out is out of reach and counts as
    refused.
    """
    loss, overlap = _Distance.apply(states, rows, scores, lse, blend)
    return loss, overlap


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, scores: Tensor, lse: Tensor, blend: float
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(states)
        total, overlaps = states.new_zeros(()), [states.new_zeros(0)]
        compare = _comparison(states.device, rows.dtype, len(rows))
        for start in range(0, len(states), CHUNK):
            part = slice(start, start + CHUNK)
            loss, overlap, slope = compare(states[part].to(rows.dtype) @ rows.T, scores[part], lse[part], blend)
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
        return gradient * (grad / len(gradient)), None, None, None, None


@cache
def _comparison(device: torch.device, dtype: torch.dtype, width: int) -> Comparison:
    """The kernel where it runs, else its twin."""
    if device.type != "cuda" or width > WIDEST or find_spec("triton") is None:
        return of_logits
    from draftproof.train.loss_kernel import compared

    return checked(compared, device, dtype, width)


def checked(kernel: Comparison, device: torch.device, dtype: torch.dtype, width: int) -> Comparison:
    """The kernel if it gives what its twin gives, there and for rows like these; else the twin, and a warning."""
    numbers = torch.Generator().manual_seed(0)
    logits, scores = (3 * torch.randn(2, ROWS, width, generator=numbers)).to(device, dtype)
    lse = scores.float().logsumexp(-1) + 0.1
    try:
        pairs = zip(kernel(logits.clone(), scores, lse, 0.4), of_logits(logits, scores, lse, 0.4), strict=True)
        apart = [float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs]
        if all(share < ROUNDING for share in apart):
            return kernel
        reason = f"is off by {max(apart):.2g}"
    except Exception as error:  # a compiler may fail in any way, and then there is still the twin
        reason = f"does not run: {error}"
    warnings.warn(f"the loss is worked out without its kernel, which {reason}", stacklevel=2)
    return of_logits


def of_logits(
    logits: Float[Tensor, "m R"], scores: Float[Tensor, "m R"], lse: Float[Tensor, " m"], blend: float
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"], Float[Tensor, "m R"]]:
    """Loss and acceptance at each position, and the slope of the loss; in float32 at least, and in place wherever it
    can be: this is bound by the memory it touches."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    p = scores.to(wide).sub(lse[:, None]).exp_()
    log_q = logits.log_softmax(-1, dtype=wide)
    entropy = -(p * log_q).sum(-1)
    q = log_q.exp_()
    overlap = torch.minimum(q, p).sum(-1)
    refusal = -overlap.clamp(min=torch.finfo(overlap.dtype).tiny).log()
    mass = p.sum(-1)
    if blend == 0:
        return entropy, overlap, q.mul_(mass[:, None]).sub_(p)
    # (1 - blend) · (q · mass - p) - blend · (below - q · Σ below) / overlap, where `below` is q where it is less than p
    pull = blend / overlap.clamp(min=LEAST_OVERLAP)
    below = q.masked_fill(q >= p, 0)
    scale = (1 - blend) * mass + pull * below.sum(-1)
    slope = q.mul_(scale[:, None]).sub_(below.mul_(pull[:, None])).sub_(p, alpha=1 - blend)
    return (1 - blend) * entropy + blend * refusal, overlap, slope
