"""Compute the loss between a head's distribution and the target's, with the gradient made in the forward pass.

The output matrix is frozen, and its logits are by far the largest tensors of the training. Each chunk of logits is
reduced to the gradient of its states immediately, and only that is kept for the backward pass.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

LOGITS_CHUNK: Final = 8192
"""Positions whose logits over the head's vocabulary exist at the same time; bounds the memory of a step."""

LEAST_OVERLAP: Final = 0.02
"""Lower bound of the overlap in the gradient of -log acceptance, which would otherwise grow without bound."""

MAX_KERNEL_WIDTH: Final = 16384
"""Tokens of a row up to which the kernel is used: it holds a whole row in registers."""

CHECK_ROWS: Final = 64
CHECK_TOLERANCE: Final = 0.01
"""Rows on which a kernel is compared with the reference, and the largest relative error: bfloat16 keeps 8 bits."""

LossFunction = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
"""The signature of `loss_and_gradient`, which the kernel shares."""


def head_loss(
    states: Float[Tensor, "M H"],
    rows: Float[Tensor, "R H"],
    scores: Float[Tensor, "M R"],
    lse: Float[Tensor, " M"],
    blend: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, " M"]]:
    """Return the mean over positions of (1 - blend) · cross-entropy + blend · (-log acceptance), and their acceptance.

    The target's distribution on the vocabulary of `rows` is exp(scores - lse). Its mass outside this vocabulary cannot
    be drafted and counts as rejected.
    """
    loss, overlap = _HeadLoss.apply(states, rows, scores, lse, blend)
    return loss, overlap


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, scores: Tensor, lse: Tensor, blend: float
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(states)
        total, overlaps = states.new_zeros(()), [states.new_zeros(0)]
        loss_function = _loss_function(states.device, rows.dtype, len(rows))
        for start in range(0, len(states), LOGITS_CHUNK):
            part = slice(start, start + LOGITS_CHUNK)
            logits = states[part].to(rows.dtype) @ rows.T
            loss, overlap, logits_gradient = loss_function(logits, scores[part], lse[part], blend)
            gradient[part] = logits_gradient.to(rows.dtype) @ rows
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
def _loss_function(device: torch.device, dtype: torch.dtype, width: int) -> LossFunction:
    """Return the Triton kernel where it runs and is correct, else the reference."""
    if device.type != "cuda" or width > MAX_KERNEL_WIDTH or find_spec("triton") is None:
        return loss_and_gradient
    from draftproof.train.loss_kernel import fused_loss_and_gradient

    return checked_kernel(fused_loss_and_gradient, device, dtype, width)


def checked_kernel(kernel: LossFunction, device: torch.device, dtype: torch.dtype, width: int) -> LossFunction:
    """Return the kernel if it agrees with the reference on rows of this width; else warn and return the reference."""
    generator = torch.Generator().manual_seed(0)
    logits, scores = (3 * torch.randn(2, CHECK_ROWS, width, generator=generator)).to(device, dtype)
    lse = scores.float().logsumexp(-1) + 0.1
    try:
        pairs = zip(kernel(logits.clone(), scores, lse, 0.4), loss_and_gradient(logits, scores, lse, 0.4), strict=True)
        errors = [float((got - wanted).norm() / wanted.norm()) for got, wanted in pairs]
        if all(error < CHECK_TOLERANCE for error in errors):
            return kernel
        reason = f"is off by {max(errors):.2g}"
    except Exception as error:  # a compiler may fail in any way, and the reference still works
        reason = f"does not run: {error}"
    warnings.warn(f"the loss is computed without its kernel, which {reason}", stacklevel=2)
    return loss_and_gradient


def loss_and_gradient(
    logits: Float[Tensor, "m R"], scores: Float[Tensor, "m R"], lse: Float[Tensor, " m"], blend: float
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"], Float[Tensor, "m R"]]:
    """Return each position's loss and acceptance, and the gradient of the loss with respect to the logits.

    Computed in float32 or wider, and in place where possible: the time goes into memory traffic.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    p = scores.to(wide).sub(lse[:, None]).exp_()
    log_q = logits.log_softmax(-1, dtype=wide)
    cross_entropy = -(p * log_q).sum(-1)
    q = log_q.exp_()
    overlap = torch.minimum(q, p).sum(-1)
    rejection = -overlap.clamp(min=torch.finfo(overlap.dtype).tiny).log()
    mass = p.sum(-1)
    if blend == 0:
        return cross_entropy, overlap, q.mul_(mass[:, None]).sub_(p)
    # (1 - blend) · (q · mass - p) - blend · (below - q · Σ below) / overlap, where `below` is q where it is less than p
    pull = blend / overlap.clamp(min=LEAST_OVERLAP)
    below = q.masked_fill(q >= p, 0)
    scale = (1 - blend) * mass + pull * below.sum(-1)
    gradient = q.mul_(scale[:, None]).sub_(below.mul_(pull[:, None])).sub_(p, alpha=1 - blend)
    return (1 - blend) * cross_entropy + blend * rejection, overlap, gradient
