"""Run a rectangular pass over a slot cache packed: its buffers are a pool in which every row has one extent."""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.models.cache import SlotCache, outside_inference_mode
from draftproof.models.interface import Cache, Forward
from draftproof.models.packed import Span, check_pass
from draftproof.models.rows import PackedModel


class PackedModelWithLimit(PackedModel, Protocol):
    """A model whose passes can be packed, with the number of positions it supports."""

    @property
    def max_length(self) -> int | None: ...


def over_slots(
    model: PackedModelWithLimit,
    tokens: Int[Tensor, "B T"],
    cache: Cache,
    parents: Int[Tensor, "B K"] | None,
    scored: int | None,
    layers: Sequence[int],
) -> Forward:
    """Score `tokens` as the continuation of each cached row; arguments as in `Model`."""
    if not isinstance(cache, SlotCache):
        raise ValueError(f"cache is a {type(cache).__name__}: take one from this model's new_cache()")
    check_pass(tokens, parents, scored, len(cache.lengths))
    B, T = tokens.shape
    shapes = model.kv_shapes()
    with torch.inference_mode():
        cache.reserve(T, model.max_length)
        keys, values = cache.flat_buffers(shapes)
        lengths = cache.lengths.tolist()
        spans = [
            Span(b * cache.capacity, before, T, None if parents is None else parents[b])
            for b, before in enumerate(lengths)
        ]
        wanted: int | Tensor = B * T
        if scored is not None and scored < T:
            wanted = scored if B == 1 else (torch.arange(B * T).view(B, T)[:, T - scored :]).flatten()
        logits, hidden = model.packed(
            model.packed_pass(tokens.flatten(), spans), keys, values, scored=wanted, layers=layers
        )
        made = logits.view(B, -1, logits.shape[-1]), *(states.view(B, T, -1) for states in hidden)
    first, *rest = (outside_inference_mode(output) for output in made)
    return Forward(first, tuple(rest))
