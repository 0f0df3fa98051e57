"""Run the packed passes of a Llama model on four-bit weights, with little around the products.

Through transformers' modules, what is around the products of one token takes as long as they. Here projections that
share inputs are joined, states stay in float32, and the operations between products are few and over memory in order:
the norm is one call of torch's weight normalisation, the rotation a complex product, for which rows of the query and
key projections are stored in pairs. It computes what the modules compute, up to rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import BFloat16, Complex, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from draftproof.models.blocked import can_lay_out_layer
from draftproof.models.compiled_pass import CompiledPass, DecoderSizes, compiled_refusal
from draftproof.models.int4_linear import Int4Linear, Int4Weight, cut, join, join_linears, reordered
from draftproof.models.llama import Llama
from draftproof.models.packed import PackedPass, Piece
from draftproof.models.pool import LayerShape

PASS_COSTS: Final = {"pass_growth": 0.11, "draft_cost": 0.1, "draft_start": 1.0, "block_cost": 0.5}
"""What a further token, a draft token and a further block of four tokens cost, in passes over one token, and the draft
tokens that beginning a draft costs as much as: rounded from one run on 2 cores with the bundled model and its head. The
engine assumes the costs until it has measured passes of its own."""

FEW_TOKENS: Final = 16
"""Tokens of a span up to which attention is two products and a softmax: in a loop of its own, torch's takes 1.4 times
as long for one token after 150. Within a pass the two could not be told apart (docs/decisions.md)."""


class LlamaLayer(NamedTuple):
    """The weights of a layer, joined where they share inputs."""

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

    Keys are stored in the order of complex numbers: element i of the first half of a head, then element i of the
    second. Queries have the same order, so that scores do not change.
    """

    def __init__(self, holder: Llama) -> None:
        net: Any = holder
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
    def of(cls, holder: Llama) -> "LlamaPass | CompiledPass | None":
        """Return the passes of a model, compiled where they can be; None if it is not on four-bit weights."""
        net: Any = holder
        config, rotary = net.config, net.model.rotary_emb
        usual = (
            config.hidden_act == "silu"
            and getattr(rotary, "rope_type", "default") == "default"
            and getattr(rotary, "attention_scaling", 1.0) == 1.0
            and len(net.model.layers) > 0
            and all(can_lay_out_layer(layer) for layer in net.model.layers)
        )
        if not usual:
            return None
        attention = net.model.layers[0].self_attn
        sizes = DecoderSizes.of(config, attention.head_dim, attention.scaling)
        return CompiledPass(net, sizes) if compiled_refusal() is None and sizes.fit else cls(net)

    @property
    def costs(self) -> Mapping[str, float]:
        """Return what passes and drafts cost before any was measured, as fields of `Costs`."""
        return PASS_COSTS

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """Return the sizes of each layer's keys and values."""
        size = self.sizes
        return (LayerShape(size.kv_heads, size.head_dim, size.head_dim, torch.float32),) * len(self._layers)

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
        group = size.heads // size.kv_heads
        spans = [_SpanAttention(piece, work, self._scale) for piece in this.pieces(0, group, torch.float32)]
        found: dict[int, Tensor] = {}
        for index, (layer, k, v) in enumerate(zip(self._layers, keys, values, strict=True), start=1):
            work.rotate(layer.qkv.product(work.normed(states, layer.attention_norm)))
            k.index_copy_(0, slots, work.keys)
            v.index_copy_(0, slots, work.values)
            for span in spans:
                span.attend(k, v)
            x.add_(layer.out.product(work.attended))
            gate, up = layer.gate_up.product(work.normed(states, layer.mlp_norm)).chunk(2, 1)
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
        self.size, self._rotation = size, rotation
        self._inputs = torch.empty((tokens, size.hidden), dtype=torch.bfloat16)
        self._length = torch.full((tokens, 1), size.hidden**0.5)
        self._projected = torch.empty((tokens, heads + 2 * shared, size.head_dim))
        self.values = self._projected[:, heads + shared :]
        self._pairs = torch.view_as_complex(self._projected.view(tokens, -1, half, 2))[:, : heads + shared]
        # Heads first: heads that share keys are then one longer query without a copy.
        rotated = torch.empty((heads + shared, tokens, size.head_dim))
        self._rotated = torch.view_as_complex(rotated.view(-1, tokens, half, 2)).transpose(0, 1)
        self.queries, self.keys = rotated[:heads], rotated[heads:].transpose(0, 1)
        self.attended = torch.empty((tokens, heads * size.head_dim), dtype=torch.bfloat16)
        self.results = self.attended.view(tokens, heads, size.head_dim).transpose(0, 1)

    def scaled(self, states: Float[Tensor, "N wide"]) -> Float[Tensor, "N H"]:
        """Divide each state by its root mean square."""
        return torch._weight_norm_interface(states, self._length, 0)[0].narrow(1, 0, self.size.hidden)

    def normed(self, states: Float[Tensor, "N wide"], weight: Float[Tensor, " H"]) -> Tensor:
        return torch.mul(self.scaled(states), weight, out=self._inputs)

    def rotate(self, qkv: BFloat16[Tensor, "N wide"]) -> None:
        """Write queries, keys and values, in float32; queries and keys are rotated to their positions."""
        self._projected.copy_(qkv.view(self._projected.shape))
        torch.mul(self._pairs, self._rotation, out=self._rotated)


class _SpanAttention:
    """The attention of one span of a pass to its row's slots in the pool, layer after layer.

    Heads that share keys are one longer query.
    """

    def __init__(self, piece: Piece, work: _Workspace, scale: float) -> None:
        size, slots, few = work.size, piece.keys.stop - piece.keys.start, piece.width <= FEW_TOKENS
        self._scale, self._bias = scale, piece.made_bias()
        head, token = size.head_dim, size.kv_heads * size.head_dim
        self._keys = (size.kv_heads, head, slots), (head, 1, token), piece.keys.start * token
        self._values = (size.kv_heads, slots, head), (head, token, 1), piece.keys.start * token
        self._queries = work.queries.narrow(1, piece.tokens.start, piece.width)
        shape = size.kv_heads, size.heads // size.kv_heads * piece.width
        self._scores = torch.empty((*shape, slots)) if few else None
        self._made = torch.empty((*shape, head))
        self._into = work.results.narrow(1, piece.tokens.start, piece.width)
        self._from = self._made.view(self._into.shape)
        # A view where the span is the whole pass; otherwise a copy that each layer makes.
        self._folded = self._queries.view(self._made.shape) if self._queries.is_contiguous() else None

    def attend(self, keys: Float[Tensor, "slots g d"], values: Float[Tensor, "slots g d"]) -> None:
        """Write what the span's tokens attend to, in bfloat16."""
        queries = self._queries.reshape(self._made.shape) if self._folded is None else self._folded
        k, v = keys.as_strided(*self._keys), values.as_strided(*self._values)
        if self._scores is None:
            self._from.copy_(self._of_many(queries[None], k.transpose(1, 2)[None], v[None]).view(self._from.shape))
        else:
            torch.bmm(self._softmax(self._scores, queries, k), v, out=self._made)
        self._into.copy_(self._from)

    def _softmax(self, scores: Tensor, queries: Tensor, k: Tensor) -> Tensor:
        if self._bias is None:
            torch.baddbmm(scores, queries, k, beta=0, alpha=self._scale, out=scores)
        else:
            torch.baddbmm(self._bias[0], queries, k, alpha=self._scale, out=scores)
        return torch.softmax(scores, 2)

    def _of_many(self, queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(queries, k, v, attn_mask=self._bias, scale=self._scale)


def _joined(layer: Any) -> LlamaLayer:
    """Join the projections of a layer; its modules share the joined codes, except for queries and keys."""
    attention, mlp = layer.self_attn, layer.mlp
    return LlamaLayer(
        layer.input_layernorm.weight.detach().float(),
        _joined_attention(attention.q_proj, attention.k_proj, attention.v_proj, attention.head_dim),
        attention.o_proj.int4,
        layer.post_attention_layernorm.weight.detach().float(),
        join_linears([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj.int4,
    )


def _joined_attention(q: Int4Linear, k: Int4Linear, v: Int4Linear, head_dim: int) -> Int4Weight:
    """Join the projections, with the rows of queries and keys in the order of complex numbers; it is done once."""
    if v.joined is None:
        paired = [reordered(each.int4, _paired(each.out_features, head_dim)) for each in (q, k)]
        v.joined = join([*paired, v.int4])
        v.int4 = cut(v.joined, q.out_features + k.out_features, v.joined.out_features)
    return v.joined


def _paired(rows: int, head_dim: int) -> Int[Tensor, " O"]:
    """Return the rows of a projection in the order of complex numbers: (i, i + head_dim / 2) for each i of a head."""
    return torch.arange(rows).view(-1, 2, head_dim // 2).transpose(1, 2).flatten()
