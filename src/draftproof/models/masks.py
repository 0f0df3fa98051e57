"""Who may look at whom in a pass: positions and masks from lengths, and from the tree where there is one."""

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
    """`visible[b, t, s]`: may token t of row b look at slot s? `columns`: the position each slot stands for."""

    positions: Int[Tensor, "B T"]
    columns: Int[Tensor, "#B S"]
    visible: Bool[Tensor, "B T S"]

    def windowed(self, size: int) -> "View":
        """Only the last `size` positions, as transformers' sliding window counts them."""
        near = self.positions[:, :, None] - self.columns[:, None, :] < size
        return View(self.positions, self.columns, self.visible & near)

    def chunked(self, size: int) -> "View":
        """Only positions of the same chunk."""
        same = self.positions[:, :, None] // size == self.columns[:, None, :] // size
        return View(self.positions, self.columns, self.visible & same)


def chain(slots: Int[Tensor, "B T"], reach: int) -> View:
    """A token sees what lies before it in its row, and itself."""
    columns = torch.arange(reach, device=slots.device)[None]
    return View(slots, columns, columns[:, None, :] <= slots[:, :, None])


def tree(slots: Int[Tensor, "B T"], reach: int, parents: Int[Tensor, "B K"]) -> View:
    """A slot sees the row before the root, its ancestors, and itself; siblings share a position."""
    T = slots.shape[1]
    up = lineage(parents)  # [B, T, T]
    positions = slots[:, :1] + up.sum(2) - 1
    offset = torch.arange(reach, device=slots.device) - slots[:, :1]  # [B, S], 0 is the root
    inside = (offset >= 0) & (offset < T)
    offset_in = offset.clamp(0, T - 1)
    columns = torch.where(inside, positions.gather(1, offset_in), offset + slots[:, :1])
    related = up.gather(2, offset_in[:, None, :].expand(-1, T, -1))
    return View(positions, columns, (offset < 0)[:, None, :] | (related & inside[:, None, :]))


def additive(visible: Bool[Tensor, "B h T S"], dtype: torch.dtype) -> Float[Tensor, "B h T S"]:
    """The mask as a bias, for attention that adds its mask to the scores."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


Bias = Callable[[Int[Tensor, "b S"], torch.dtype], Float[Tensor, "b h 1 S"]]
"""From the position of each slot to what each head adds to its score."""


def take_over(twin: PreTrainedModel) -> Bias | None:
    """The bias of a model with ALiBi, which from now on expects it in the mask; None for every other model."""
    if twin.config.model_type == "bloom":
        return _bloom(twin)
    if twin.config.model_type == "falcon" and twin.config.alibi:
        return _falcon(twin)
    return None


def _bloom(twin: PreTrainedModel) -> Bias:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    def none(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(mask.shape[0] * num_heads, 1, mask.shape[-1], dtype=dtype, device=mask.device)

    twin.base_model.build_alibi_tensor = none
    return _tabled(build_alibi_tensor, twin.config.n_head, 1.0)


def _falcon(twin: PreTrainedModel) -> Bias:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    twin.base_model.use_alibi = False
    twin.base_model.rotary_emb = Unturned(twin.config.hidden_size // twin.config.num_attention_heads)
    heads = twin.config.num_attention_heads
    return _tabled(build_alibi_tensor, heads, 1 / math.sqrt(twin.config.hidden_size // heads))


def _tabled(build: Callable[[Tensor, int, torch.dtype], Tensor], heads: int, scale: float) -> Bias:
    def bias(positions: Int[Tensor, "b S"], dtype: torch.dtype) -> Float[Tensor, "b h 1 S"]:
        # The table is as long as the buffer is wide: no slot stands for a position beyond its index.
        ones = torch.ones(1, positions.shape[1], dtype=torch.long, device=positions.device)
        table = build(ones, heads, dtype).view(heads, -1) * scale  # [h, S]
        return table[:, positions].transpose(0, 1)[:, :, None, :]

    return bias


class Unturned(nn.Module):
    """A rotary embedding that turns nothing: without ALiBi, Falcon's layers insist on one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor, position_ids: Int[Tensor, "b T"]) -> tuple[Tensor, Tensor]:
        flat = x.new_zeros(*position_ids.shape, self.size)
        return flat + 1, flat
