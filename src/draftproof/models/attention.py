"""The attention function of our model copies: packed (packed.py), or over a slot cache.

Query heads that share keys are folded into one longer query.

transformers' own `sdpa` repeats keys and values for every query head as soon as there is a mask: at a context of
1 000 tokens that copy costs more than the attention. This kernel is registered under a name of its own and used only
by our copy of a model (weight_sharing.py); the user's models are unaffected.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftproof.models.masks import additive_mask
from draftproof.models.packed import attended_with_extras, running

ATTENTION_NAME = "draftproof"
"""The `attn_implementation` under which transformers finds `folded_attention`."""

STEADY_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN, which compiles a kernel for every new shape: a growing text would stall again and again."""


def register() -> None:
    """Register `folded_attention` with transformers; calling it again has no effect."""
    AttentionInterface.register(ATTENTION_NAME, folded_attention)


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
    """Compute attention for query `[B, heads, T, size]`, key and value `[B, shared heads, S, size]`.

    transformers calls it. A pass over a pool attends row by row. In a rectangular one, no mask means plain causal
    attention: one token that attends to every slot, or a first pass over an empty cache.
    """
    this = running.get()
    if this is not None:
        return this.attention(query, key, value, attention_mask, scaling, extras), None
    B, heads, T, size = query.shape
    shared = key.shape[1]
    if extras.get("position_bias") is not None:  # transformers serves or refuses it
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **extras
        )
        return result
    group = heads // shared
    softcap, sinks = extras.get("softcap"), extras.get("s_aux")
    if softcap is not None or sinks is not None:
        if attention_mask is None and T > 1:
            key, value = key[:, :, :T], value[:, :, :T]
            attention_mask = torch.ones((1, 1, T, T), dtype=torch.bool, device=query.device).tril()
        bias = None if attention_mask is None else additive_mask(attention_mask, query.dtype).repeat(1, 1, group, 1)
        folded = query.reshape(B, shared, group * T, size)
        out = attended_with_extras(folded, key, value, bias, scaling, softcap, sinks)
        return out.reshape(B, heads, T, -1).transpose(1, 2).contiguous(), None
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
    # reshape, not view: some CUDA kernels return their result in another memory order.
    return out.reshape(B, heads, T, -1).transpose(1, 2).contiguous(), None


def steady_attention(device: torch.device) -> AbstractContextManager[None]:
    """Exclude cuDNN attention on a GPU, where torch prefers it on the newest devices; see STEADY_BACKENDS."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(STEADY_BACKENDS)
