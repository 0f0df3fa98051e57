"""Build positions and attention masks for ragged rows and trees, and ALiBi biases that follow them.

transformers derives ALiBi from the slot index, which is not the position in a tree. `take_over_alibi` moves the bias
of Bloom and Falcon into the mask, where it is computed from positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.core.tree import lineage


@dataclass(frozen=True, slots=True)
class View:
    """The positions of a pass and the cache slots that each token may attend to.

    `columns` is the position of each slot; `visible[b, t, s]`: token t of row b may attend to slot s.
    """

    positions: Int[Tensor, "B T"]
    columns: Int[Tensor, "#B S"]
    visible: Bool[Tensor, "B T S"]

    def windowed(self, size: int) -> "View":
        """Restrict attention to the last `size` positions, counted as transformers' sliding window counts them."""
        near = self.positions[:, :, None] - self.columns[:, None, :] < size
        return View(self.positions, self.columns, self.visible & near)

    def chunked(self, size: int) -> "View":
        """Restrict attention to positions of the same chunk of `size`."""
        same = self.positions[:, :, None] // size == self.columns[:, None, :] // size
        return View(self.positions, self.columns, self.visible & same)


def chain_view(slots: Int[Tensor, "B T"], reach: int) -> View:
    """Return the causal view of tokens at these slots: each attends to the slots up to its own."""
    columns = torch.arange(reach, device=slots.device)[None]
    return View(slots, columns, columns[:, None, :] <= slots[:, :, None])


def tree_view(slots: Int[Tensor, "B T"], reach: int, parents: Int[Tensor, "B K"]) -> View:
    """Return the view of a tree: a slot attends to the row before the root, its ancestors and itself.

    A slot's position is its depth below the root, so siblings share one.
    """
    T = slots.shape[1]
    up = lineage(parents)  # [B, T, T]
    positions = slots[:, :1] + up.sum(2) - 1
    offset = torch.arange(reach, device=slots.device) - slots[:, :1]  # [B, S], 0 is the root
    inside = (offset >= 0) & (offset < T)
    offset_in = offset.clamp(0, T - 1)
    columns = torch.where(inside, positions.gather(1, offset_in), offset + slots[:, :1])
    related = up.gather(2, offset_in[:, None, :].expand(-1, T, -1))
    return View(positions, columns, (offset < 0)[:, None, :] | (related & inside[:, None, :]))


def additive_mask(visible: Bool[Tensor, "B h T S"], dtype: torch.dtype) -> Float[Tensor, "B h T S"]:
    """Convert a boolean mask into a bias, for attention that adds its mask to the scores."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


AlibiBias = Callable[[Int[Tensor, "b S"], torch.dtype], Float[Tensor, "b h 1 S"]]
"""Maps the position of each slot to what each head adds to its score."""


def take_over_alibi(model: PreTrainedModel) -> AlibiBias | None:
    """Switch off a model's own ALiBi and return its bias, to be added to the mask; None for models without ALiBi.

    Modifies `model`, which must be our copy (weight_sharing.py).
    """
    if model.config.model_type == "bloom":
        return _take_over_bloom(model)
    if model.config.model_type == "falcon" and model.config.alibi:
        return _take_over_falcon(model)
    return None


def _take_over_bloom(model: PreTrainedModel) -> AlibiBias:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    def zeros(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(mask.shape[0] * num_heads, 1, mask.shape[-1], dtype=dtype, device=mask.device)

    model.base_model.build_alibi_tensor = zeros
    return _bias_by_position(build_alibi_tensor, model.config.n_head, 1.0)


def _take_over_falcon(model: PreTrainedModel) -> AlibiBias:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    heads = model.config.num_attention_heads
    head_dim = model.config.hidden_size // heads
    model.base_model.use_alibi = False
    model.base_model.rotary_emb = IdentityRotary(head_dim)
    return _bias_by_position(build_alibi_tensor, heads, 1 / math.sqrt(head_dim))


def _bias_by_position(build: Callable[[Tensor, int, torch.dtype], Tensor], heads: int, scale: float) -> AlibiBias:
    """Look up the model's own ALiBi table by position instead of by slot."""

    def bias(positions: Int[Tensor, "b S"], dtype: torch.dtype) -> Float[Tensor, "b h 1 S"]:
        # One entry for each slot is enough: no slot's position exceeds its index.
        ones = torch.ones(1, positions.shape[1], dtype=torch.long, device=positions.device)
        table = build(ones, heads, dtype).view(heads, -1) * scale  # [h, S]
        return table[:, positions].transpose(0, 1)[:, :, None, :]

    return bias


class IdentityRotary(nn.Module):
    """A rotary embedding of angle zero: Falcon's layers require one when ALiBi is off."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor, position_ids: Int[Tensor, "b T"]) -> tuple[Tensor, Tensor]:
        zeros = x.new_zeros(*position_ids.shape, self.size)
        return zeros + 1, zeros
