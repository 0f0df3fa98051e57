"""Attention for passes over a slot cache: heads that share keys are folded into one longer query.

transformers' own `sdpa` repeats keys and values for every query head as soon as there is a mask: at a context of
1 000 tokens that copy costs more than the attention. Registered under our own name, it is used only by our copy of
a model (shadow.py); models of the user never see it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def steady_attention(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU all but cuDNN's, which compiles anew for every shape: a text that grows would wait for it again and
    again. torch prefers it on the newest devices."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(KERNELS)


NAME = "draftproof"


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Called by transformers for query `[B, heads, T, size]`, key and value `[B, shared heads, S, size]`.

    Without a mask the pass is plain: one token that sees everything, or a first pass over nothing remembered.
    """
    B, heads, T, size = query.shape
    shared = key.shape[1]
    if any(extras.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        # Let transformers serve or refuse what is more than dot products.
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **extras
        )
        return result
    group = heads // shared
    if attention_mask is None and T > 1:
        out = nn.functional.scaled_dot_product_attention(
            query, key[:, :, :T], value[:, :, :T], scale=scaling, is_causal=True, enable_gqa=group > 1
        )
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is not None and group > 1 and T > 1:
        attention_mask = attention_mask.repeat(1, 1, group, 1)
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(B, shared, group * T, size), key, value, attn_mask=attention_mask, scale=scaling
    )
    # reshape: some of CUDA's kernels leave their result in another order
    return out.reshape(B, heads, T, -1).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the name known to transformers; saying it twice changes nothing."""
    AttentionInterface.register(NAME, folded_attention)
