"""Network of a DFlash drafter (arXiv 2602.06036): it predicts a block of tokens in one pass over mask tokens.

Every layer takes keys and values of the text so far from the target's states, so the text is read once and only as
projections. The block itself is the last token and masks. Its positions attend to the text and to each other, so its
tokens are independent given the text: each has a distribution of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from draftproof.core.distribution import DraftVocab
from draftproof.models.head.layer import DecoderLayer, LayerShape
from draftproof.models.head.network import HeadCache, attend
from draftproof.models.head.rotary import Rotary


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """The sizes and options of a DFlash drafter.

    taps             the target's layers whose states it reads, counted as in `TargetFeatures.layers`
    block            positions of a block, the last token included: it drafts one token less
    mask_token       the token whose embedding stands for a token to be predicted
    windows          for each layer, the positions it can look back or None
    causal           for each layer, whether a position sees only the block's earlier ones
    embedding_scale  factor on embeddings (Gemma)
    output_scale, softcap  applied to the logits; no cap if 0
    """

    layer: LayerShape
    taps: tuple[int, ...]
    target_hidden: int
    block: int
    mask_token: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0


class DFlash(nn.Module):
    """The network of a DFlash drafter. Its weights are undefined until they are loaded (dflash_file.py)."""

    def __init__(self, shape: DFlashShape, rotary: Rotary) -> None:
        super().__init__()
        self.shape, self.rotary = shape, rotary
        hidden, eps = shape.layer.hidden, shape.layer.eps
        self.fc = nn.Linear(len(shape.taps) * shape.target_hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList([DecoderLayer(shape.layer) for _ in shape.windows])
        self.norm = nn.RMSNorm(hidden, eps=eps)

    def new_cache(self, rows: int, capacity: int = 0) -> HeadCache:
        """Return a cache whose slots hold the keys and values of all layers, one layer's heads after another's."""
        layer, weight = self.shape.layer, self.norm.weight
        heads = layer.kv_heads * len(self.layers)
        return HeadCache.empty(rows, capacity, heads, layer.head_dim, weight.device, weight.dtype)

    def fuse(self, states: Sequence[Float[Tensor, "*N T"]]) -> Float[Tensor, "*N H"]:
        """Combine the target's states after each tap into what all layers read of a position."""
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(list(states), -1)))
        return fused

    def read(self, fused: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"], cache: HeadCache) -> None:
        """Write the keys and values of n positions of the text, at the slots of their positions."""
        layers = cast(Iterable[DecoderLayer], self.layers)
        parts = [layer.self_attn.keys_values(fused, positions, self.rotary) for layer in layers]
        keys, values = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        cache.write(keys, values, positions, 0)

    def predict(
        self, embedded: Float[Tensor, "B n H"], starts: Int[Tensor, " B"], cache: HeadCache, reach: int
    ) -> Float[Tensor, "B n H"]:
        """Compute the states of a block that begins at position starts[b], after a text that was read up to there.

        `reach` is the number of slots that the longest row needs, the block included.
        """
        x = embedded * self.shape.embedding_scale
        positions = starts[:, None] + torch.arange(x.shape[1], device=starts.device)
        for index, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(normed, positions, self.rotary)
            keys, values = self._of_layer(cache, index).write(k, v, positions, reach)
            q = layer.self_attn.queries(normed, positions, self.rotary)
            x = layer.rest(x, attend(q, keys, values, self._visible(index, positions, reach)))
        state: Tensor = self.norm(x)
        return state

    def _visible(self, index: int, positions: Int[Tensor, "B n"], reach: int) -> Bool[Tensor, "B n S"]:
        """Return the slots that each position of the block attends to in a layer."""
        slots, window = torch.arange(reach, device=positions.device), self.shape.windows[index]
        ends = positions if self.shape.causal[index] else positions[:, -1:].expand_as(positions)
        visible = slots <= ends[:, :, None]
        if window is not None:
            distance = positions[:, :, None] - slots
            visible &= distance.abs() < window
        return visible

    def _of_layer(self, cache: HeadCache, index: int) -> HeadCache:
        """Return the part of the cache that belongs to one layer; it shares the cache's buffers."""
        heads = self.shape.layer.kv_heads
        part = slice(index * heads, (index + 1) * heads)
        return HeadCache(cache.keys[:, :, part], cache.values[:, :, part])


@dataclass(frozen=True, slots=True)
class FittedDFlash:
    """A DFlash drafter with embeddings and output rows; see `FittedHead`."""

    network: DFlash
    table: Float[Tensor, "V H"]
    rows: nn.Module
    vocab: DraftVocab
    dtype: torch.dtype = torch.float32

    def embedded(self, tokens: Int[Tensor, "*N"]) -> Float[Tensor, "*N H"]:
        return nn.functional.embedding(tokens, self.table).to(self.dtype)

    def logits(self, states: Float[Tensor, "*N H"]) -> Float[Tensor, "*N R"]:
        """Return the logits over the draft vocabulary of the token at each position."""
        shape = self.network.shape
        logits: Tensor = self.rows(states).float() * shape.output_scale
        return torch.tanh(logits / shape.softcap) * shape.softcap if shape.softcap else logits
