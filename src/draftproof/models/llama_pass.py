"""Run the packed passes of a Llama model on four-bit weights, with little around the products.

Through transformers' modules, what is around the products of one token takes as long as they. Here projections that
share inputs are joined, states stay in float32, and the operations between products are few: the norm is one call of
torch's weight normalisation, the rotation one complex product. It computes what the modules compute, up to rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM, PreTrainedModel

from draftproof.models.int4_linear import MERGE_MULTIPLE, Int4Linear, Int4Weight, join_linears
from draftproof.models.packed import PackedPass, Piece


class LlamaLayer(NamedTuple):
    """The weights of a layer, joined where they share inputs. Norms are as wide as the states: one more than inputs."""

    attention_norm: Float[Tensor, " H"]
    qkv: Int4Weight
    out: Int4Weight
    mlp_norm: Float[Tensor, " H"]
    gate_up: Int4Weight
    down: Int4Weight


class Sizes(NamedTuple):
    """The sizes of a model, and the epsilon of its norms."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float


class LlamaPass:
    """The packed passes of a Llama model whose linear layers are `Int4Linear`.

    Keys and values are stored in the order of complex numbers: element i of the first half of a head, then element i
    of the second. Queries have the same order, so that scores do not change.
    """

    def __init__(self, net: LlamaForCausalLM) -> None:
        config, first = net.config, net.model.layers[0]
        self._embed, self._head = net.model.embed_tokens, net.lm_head
        self.sizes = Sizes(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            first.self_attn.head_dim,
            config.intermediate_size,
            config.rms_norm_eps,
        )
        self._layers = [_joined(layer) for layer in net.model.layers]
        self._norm = net.model.norm.weight.detach().float()
        self._frequencies = net.model.rotary_emb.inv_freq.detach().float()
        # The norm of (x, √(H·eps)) is √(|x|² + H·eps): a column of this value in the states is the norm's epsilon.
        self._eps_column = (self.sizes.hidden * self.sizes.eps) ** 0.5
        self._scale = first.self_attn.scaling

    @classmethod
    def of(cls, net: PreTrainedModel) -> "LlamaPass | None":
        """Return the passes of a model; None if it is not a Llama model on four-bit weights."""
        if type(net) is not LlamaForCausalLM or not net.model.layers:
            return None
        config, rotary = net.config, net.model.rotary_emb
        usual = (
            config.hidden_act == "silu"
            and getattr(rotary, "rope_type", "default") == "default"
            and getattr(rotary, "attention_scaling", 1.0) == 1.0
            and all(_is_joinable(layer) for layer in net.model.layers)
        )
        return cls(net) if usual else None

    def __call__(
        self,
        this: PackedPass,
        positions: Int[Tensor, " N"],
        keys: Sequence[Float[Tensor, "slots g d"]],
        values: Sequence[Float[Tensor, "slots g d"]],
        scored: int | Int[Tensor, " J"],
        layers: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Return the logits that are wanted, then the states after `layers`; keys and values are written to a pool."""
        size, slots = self.sizes, this.slots
        states = torch.empty((len(this.tokens), size.hidden + 1))
        x = states[:, :-1]
        x.copy_(self._embed(this.tokens))
        states[:, -1] = self._eps_column
        work = _Workspace(len(this.tokens), size, self._rotation(positions))
        pieces = [_SpanPiece.of(piece, size) for piece in this.pieces(0, size.heads // size.kv_heads, torch.float32)]
        found: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers, start=1):
            work.rotate(layer.qkv.product(work.normed(states, layer.attention_norm)))
            keys[index - 1].index_copy_(0, slots, work.keys)
            values[index - 1].index_copy_(0, slots, work.values)
            for piece in pieces:
                piece.attend(work, keys[index - 1], values[index - 1], self._scale)
            x.add_(layer.out.product(work.attended))
            both = layer.gate_up.product(work.normed(states, layer.mlp_norm))
            gate, up = both.narrow(1, 0, size.intermediate), both.narrow(1, size.intermediate, size.intermediate)
            x.add_(layer.down.product(silu(gate).mul_(up)))
            if index in layers and index < len(self._layers):
                found[index] = x.clone()
        final = work.scaled(states) * self._norm
        if len(self._layers) in layers:
            found[len(self._layers)] = final
        wanted = final[-scored:] if isinstance(scored, int) else final[scored]
        return (self._head(wanted), *(found[layer] for layer in layers))

    def _rotation(self, positions: Int[Tensor, " N"]) -> Complex[Tensor, "N 1 half"]:
        angles = positions[:, None, None] * self._frequencies
        return torch.complex(angles.cos(), angles.sin())


class _Workspace:
    """The buffers of one pass, written by every layer, and views of them."""

    def __init__(self, tokens: int, size: Sizes, rotation: Complex[Tensor, "N 1 half"]) -> None:
        heads, shared, half = size.heads, size.kv_heads, size.head_dim // 2
        self.tokens, self.size, self._rotation = tokens, size, rotation
        self._inputs = torch.empty((tokens, size.hidden), dtype=torch.bfloat16)
        self._length = torch.full((tokens, 1), size.hidden**0.5)
        pairs = torch.empty((tokens, heads + 2 * shared, half, 2))
        self._split = pairs.transpose(2, 3)
        self._rotating = torch.view_as_complex(pairs)[:, : heads + shared]
        whole = pairs.flatten(2)
        self.queries = whole[:, :heads]
        self.keys, self.values = whole[:, heads : heads + shared], whole[:, heads + shared :]
        self.attended = torch.empty((tokens, heads * size.head_dim), dtype=torch.bfloat16)

    def scaled(self, states: Float[Tensor, "N wide"]) -> Float[Tensor, "N H"]:
        """Divide each state by its root mean square."""
        return torch._weight_norm_interface(states, self._length, 0)[0].narrow(1, 0, self.size.hidden)

    def normed(self, states: Float[Tensor, "N wide"], weight: Float[Tensor, " H"]) -> Tensor:
        return torch.mul(self.scaled(states), weight, out=self._inputs)

    def rotate(self, qkv: Tensor) -> None:
        """Write queries, keys and values, in float32 and in pairs; queries and keys are rotated to their positions."""
        self._split.copy_(qkv.view(self._split.shape))
        self._rotating.mul_(self._rotation)


class _SpanPiece(NamedTuple):
    """One span of a pass: where its tokens and its row's slots are. Heads that share keys are one longer query."""

    first: int
    width: int
    start: int
    slots: int
    bias: Float[Tensor, "1 1 G S"] | None

    @classmethod
    def of(cls, piece: Piece, size: Sizes) -> "_SpanPiece":
        return cls(piece.tokens.start, piece.width, piece.keys.start, piece.keys.stop - piece.keys.start, piece.bias)

    def attend(self, work: _Workspace, keys: Tensor, values: Tensor, scale: float) -> None:
        """Write what the span's tokens attend to, in bfloat16 and in the order of the model."""
        size = work.size
        shared, group, half = size.kv_heads, size.heads // size.kv_heads, size.head_dim // 2
        # One view of a row's extent, as [1, heads, slots, size].
        shape, strides = (1, shared, self.slots, size.head_dim), (0, size.head_dim, shared * size.head_dim, 1)
        offset = self.start * shared * size.head_dim
        own = work.queries.narrow(0, self.first, self.width)
        made = scaled_dot_product_attention(
            own.transpose(0, 1).reshape(1, shared, group * self.width, size.head_dim),
            keys.as_strided(shape, strides, offset),
            values.as_strided(shape, strides, offset),
            attn_mask=self.bias,
            scale=scale,
        )
        rows = work.attended.narrow(0, self.first, self.width)
        rows.view(self.width, shared, group, 2, half).copy_(
            made.view(shared, group, self.width, half, 2).permute(2, 0, 1, 4, 3)
        )


def _joined(layer: Any) -> LlamaLayer:
    """Join the projections of a layer; its modules then share the joined codes, so that they are in memory once."""
    attention, mlp = layer.self_attn, layer.mlp
    return LlamaLayer(
        layer.input_layernorm.weight.detach().float(),
        join_linears([attention.q_proj, attention.k_proj, attention.v_proj]),
        attention.o_proj.int4,
        layer.post_attention_layernorm.weight.detach().float(),
        join_linears([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj.int4,
    )


def _is_joinable(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    return all(
        type(linear) is Int4Linear and linear.bias is None and linear.out_features % MERGE_MULTIPLE == 0
        for linear in linears
    )
