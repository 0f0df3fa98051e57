"""Run the layer of a draft head on four-bit weights as one compiled call; see models/compiled_pass.py."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.models.compiled_pass import Attended, CompiledLayers, DecoderSizes, blocked_weights, compiled_refusal
from draftproof.models.head.network import Head
from draftproof.models.int4_linear import MERGE_MULTIPLE, Int4Linear, cut


class CompiledHead:
    """The layer of a `Head`, laid out for the compiled pass."""

    def __init__(self, head: Any, sizes: DecoderSizes) -> None:
        gate_up, half = head.gate_up.int4, head.shape.intermediate
        gate, up = cut(gate_up, 0, half), cut(gate_up, half, 2 * half)
        layer = blocked_weights(None, [head.qkv.int4], head.attended, head.mlp_norm, gate, up, head.down)
        entry = head.embedding_norm.weight, head.state_norm.weight
        self._layers, self._frequencies = CompiledLayers([layer], sizes, None, entry), head.frequencies

    @classmethod
    def of(cls, head: Head) -> "CompiledHead | None":
        """Lay out a head; None if its weights have another form, or nothing is compiled on this machine."""
        linears: Sequence[Any] = (head.qkv, head.attended, head.gate_up, head.down)
        shape = head.shape
        sizes = DecoderSizes(
            shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.eps,
            shape.head_dim**-0.5,
        )  # fmt: skip
        fits = (
            compiled_refusal() is None
            and sizes.fit
            and shape.intermediate % MERGE_MULTIPLE == 0
            and all(type(each) is Int4Linear and each.out_features % MERGE_MULTIPLE == 0 for each in linears)
        )
        return cls(head, sizes) if fits else None

    def __call__(
        self,
        embedded: Float[Tensor, "N H"],
        h: Float[Tensor, "N H"],
        positions: Int[Tensor, " N"],
        spans: Sequence[Attended],
        keys: Float[Tensor, "slots g d"],
        values: Float[Tensor, "slots g d"],
    ) -> Float[Tensor, "N H"]:
        """Return the states after some tokens of each span; keys and values are written to a pool."""
        states, angles = h.float().clone(memory_format=torch.contiguous_format), positions[:, None] * self._frequencies
        return self._layers(states, spans, angles, [keys], [values], {}, embedded.contiguous())
