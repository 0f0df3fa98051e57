"""ALiBi (Press et al., 2022) for passes over slots: the bias goes into the mask, where a slot's position is known.

BLOOM and Falcon count positions from a 2-D mask of one length for all rows. On our copy of the model (shadow.py) that
count is switched off; the numbers themselves still come from transformers' own tables.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

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
