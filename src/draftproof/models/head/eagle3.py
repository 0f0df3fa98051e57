"""Network of a published EAGLE-3 head (Li et al. 2025, 2503.01840), with the options that published heads have.

`network.Head` is the one that `draftproof train` trains: this network with a norm for each tap, and its matrices joined
for speed. Both have the methods that drafters/head_reader.py calls. Modules have the names of the checkpoints' tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from draftproof.models import pool
from draftproof.models.head.layer import DecoderLayer, LayerShape
from draftproof.models.head.network import HeadCache, LayerAttention, attend
from draftproof.models.head.rotary import Rotary

TAP_NORMS: Final = ("none", "each", "together")
"""Norms of the target's states before they are joined into one: none, one for each tap, or one over all of them."""


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """The sizes and options of an EAGLE-3 head.

    taps                  the target's layers whose states it reads, counted as in `TargetFeatures.layers`
    target_hidden         the width of those states
    tap_norm              one of TAP_NORMS
    norm_before_residual  the first layer's residual is the normed state, not the state itself
    norm_output           the state that the next step reads is the normed one
    """

    layer: LayerShape
    layers: int
    taps: tuple[int, ...]
    target_hidden: int
    tap_norm: str = "none"
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3(nn.Module):
    """The network of a published head. Its weights are undefined until they are loaded (eagle3_file.py)."""

    def __init__(self, shape: Eagle3Shape, rotary: Rotary) -> None:
        super().__init__()
        self.shape, self.rotary = shape, rotary
        H, eps, taps = shape.layer.hidden, shape.layer.eps, len(shape.taps)
        if shape.tap_norm == "each":
            self.fc_norm = nn.ModuleList([nn.RMSNorm(shape.target_hidden, eps=eps) for _ in shape.taps])
        if shape.tap_norm == "together":
            self.input_norm = nn.RMSNorm(taps * shape.target_hidden, eps=eps)
        self.fc = nn.Linear(taps * shape.target_hidden, H, bias=False)
        first = DecoderLayer(shape.layer, inputs=2)
        self.layers = nn.ModuleList([first, *(DecoderLayer(shape.layer) for _ in range(1, shape.layers))])
        self.norm = nn.RMSNorm(H, eps=eps)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.shape.taps

    @property
    def kv_shapes(self) -> list[pool.LayerShape]:
        """Return the sizes of each layer's keys and values."""
        layer = self.shape.layer
        shape = pool.LayerShape(layer.kv_heads, layer.head_dim, layer.head_dim, self.norm.weight.dtype)
        return [shape] * self.shape.layers

    def new_cache(self, rows: int, capacity: int = 0) -> HeadCache:
        """Return a cache whose slots hold the keys and values of all layers, one layer's heads after another's."""
        layer, weight = self.shape.layer, self.norm.weight
        heads = layer.kv_heads * self.shape.layers
        return HeadCache.empty(rows, capacity, heads, layer.head_dim, weight.device, weight.dtype)

    def fuse(self, states: Sequence[Float[Tensor, "*N T"]]) -> Float[Tensor, "*N H"]:
        """Combine the target's states after each tap into one state."""
        if self.shape.tap_norm == "each":
            states = [norm(tap) for norm, tap in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(list(states), -1)
        if self.shape.tap_norm == "together":
            joined = self.input_norm(joined)
        fused: Tensor = self.fc(joined)
        return fused

    def step(
        self,
        embedded: Float[Tensor, "B n H"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        cache: HeadCache,
        *,
        slots: Int[Tensor, "B n"] | None = None,
        visible: Bool[Tensor, "B n S"] | None = None,
        reach: int | None = None,
    ) -> Float[Tensor, "B n H"]:
        """Compute the states at n positions of each row; see `network.Head.step`."""
        slots = positions if slots is None else slots
        reach = int(slots.max()) + 1 if reach is None else reach
        if visible is None and slots.numel() > 1:
            visible = torch.arange(reach, device=slots.device) <= slots[:, :, None]

        def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, *self._of_layer(cache, index).write(k, v, slots, reach), visible)

        return self.over(embedded, h, positions, attention)

    def over(
        self,
        embedded: Float[Tensor, "B n H"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        attention: LayerAttention,
    ) -> Float[Tensor, "B n H"]:
        """Compute the states at n positions of each row, with an attention that also writes keys and values."""
        for index, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            residual, x = (h, layer.input_layernorm(h)) if index else self._first_input(embedded, h)
            k, v = layer.self_attn.keys_values(x, positions, self.rotary)
            q = layer.self_attn.queries(x, positions, self.rotary)
            h = layer.rest(residual, attention(index, q, k, v))
        return self.norm(h) if self.shape.norm_output else h

    def out(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N H"]:
        """Apply the final norm, unless `step` has: logits are out(h) @ rows.T, with the head's own output rows."""
        return h if self.shape.norm_output else self.norm(h)

    def _first_input(self, embedded: Float[Tensor, "B n H"], h: Float[Tensor, "B n H"]) -> tuple[Tensor, Tensor]:
        """Return the first layer's residual, and the input of its attention."""
        first = cast(DecoderLayer, self.layers[0])
        normed = first.hidden_norm(h)
        x = torch.cat([first.input_layernorm(embedded), normed], -1)
        return (normed if self.shape.norm_before_residual else h), x

    def _of_layer(self, cache: HeadCache, index: int) -> HeadCache:
        """Return the part of the cache that belongs to one layer; it shares the cache's buffers."""
        heads = self.shape.layer.kv_heads
        part = slice(index * heads, (index + 1) * heads)
        return HeadCache(cache.keys[:, :, part], cache.values[:, :, part])
