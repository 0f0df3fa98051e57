"""Run the packed passes of a Llama model on four-bit weights as one compiled call (avx512.py); numba compiles it.

Weights are laid out anew: blocks of sixteen outputs, group after group, so that a pass reads memory in order.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from draftproof.core.tree import lineage
from draftproof.models.int4_linear import GROUP, MERGE_MULTIPLE, Int4Linear, Int4Weight, codes_of
from draftproof.models.int8_linear import Int8Linear
from draftproof.models.llama import Llama
from draftproof.models.packed import PackedPass, Span
from draftproof.models.pool import LayerShape

BLOCK: Final = 16
"""Outputs of a register."""

PAIR: Final = 2 * BLOCK
"""Outputs that are computed at a time."""


COMPILED_COSTS: Final = {"pass_growth": 0.1, "draft_cost": 0.11, "draft_start": 0.7, "block_cost": 0.35}
"""What llama_pass.PASS_COSTS says of torch's products, for compiled passes: fitted to whole rounds of the bundled model
and its head, of which one with a draft of two took 1.5 times as long as one without."""


@cache
def compiled_refusal() -> str | None:
    """Return why passes are not compiled on this machine; None where they are."""
    if find_spec("numba") is None:
        return "numba is not installed: pip install draftproof[cpu]"
    if not torch.cpu._is_avx512_supported() or not torch.cpu._is_vnni_supported():
        return "this CPU has no AVX-512 with VNNI"
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return "this build of torch does not share its OpenMP threads"
    return None


def blocked_int4(weight: Int4Weight, second: Int4Weight | None = None) -> UInt8[Tensor, "blocks groups bytes"]:
    """Lay out four-bit weights in blocks of sixteen outputs; blocks of two matrices alternate.

    A group of a block is 64 words, in which inputs 8 q + 2 j + p have the bits from 4 j + 16 p on of word q · 16 + o,
    then sixteen scales and sixteen zeros.
    """
    blocks = _blocks(weight)
    return blocks if second is None else torch.stack([blocks, _blocks(second)], 1).flatten(0, 1).contiguous()


def _blocks(weight: Int4Weight) -> UInt8[Tensor, "blocks groups bytes"]:
    groups = weight.in_features // GROUP
    codes = codes_of(weight).view(-1, BLOCK, groups, 4, 4, 2)
    halves = codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)  # bytes of two codes: j = 0 and 1, or 2 and 3
    words = halves.transpose(4, 5).reshape(-1, BLOCK, groups, 4, 4)  # bytes (p, j // 2): a word, low byte first
    both = weight.scales_and_zeros.view(groups, -1, BLOCK, 2).permute(1, 0, 3, 2).contiguous().view(torch.uint8)
    return torch.cat([words.permute(0, 2, 3, 1, 4).reshape(-1, groups, 256), both.flatten(2)], 2).contiguous()


def blocked_int8(codes: Tensor) -> Tensor:
    """Lay out eight-bit weights in blocks of sixteen outputs: for each pair of inputs 32 bytes."""
    outputs, inputs = codes.shape
    padded = nn.functional.pad(codes, (0, 0, 0, -outputs % PAIR))
    return padded.view(-1, BLOCK, inputs // 2, 2).transpose(1, 2).contiguous()


class DecoderSizes(NamedTuple):
    """The sizes of decoder layers, the epsilon of their norms, and the scale of attention scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float

    @property
    def fit(self) -> bool:
        """Return whether the compiled pass serves these sizes."""
        return self.head_dim % BLOCK == 0 and self.hidden % PAIR == 0 and self.intermediate % PAIR == 0

    @property
    def projected(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Attended(NamedTuple):
    """The slots that consecutive tokens of a row are written to and attend to.

    start, before  the row's first slot, and how many of its slots come before the first token's
    seen           for a tree: which of the row's slots after the first `common` each token attends to
    """

    start: int
    before: int
    width: int
    seen: Bool[Tensor, "width nodes"] | None = None
    common: int = 0

    @classmethod
    def of(cls, span: Span) -> "Attended":
        seen = None if span.parents is None else lineage(span.parents[None])[0]
        return cls(span.start, span.before, span.width, seen, span.before)

    @property
    def reach(self) -> int:
        """Return how many of the row's slots its tokens attend to at most."""
        return self.before + self.width


class CompiledPass:
    """The packed passes of a Llama model whose linear layers are `Int4Linear`; called as `LlamaPass` is."""

    def __init__(self, holder: Llama, sizes: DecoderSizes) -> None:
        net: Any = holder
        self._embed, self._output = net.model.embed_tokens, CompiledLinear.of(net.lm_head) or net.lm_head
        layers = [_layer_blocks(layer) for layer in net.model.layers]
        self._sizes, self._layers = sizes, CompiledLayers(layers, sizes, net.model.norm.weight)
        self._frequencies = net.model.rotary_emb.inv_freq.detach().float()

    @property
    def costs(self) -> Mapping[str, float]:
        """Return what passes and drafts cost before any was measured, as fields of `Costs`."""
        return COMPILED_COSTS

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        """Return the sizes of each layer's keys and values."""
        size = self._sizes
        return (LayerShape(size.kv_heads, size.head_dim, size.head_dim, torch.float32),) * self._layers.count

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
        states = self._embed(this.tokens).float().contiguous()
        found = {layer: torch.empty_like(states) for layer in layers if layer < self._layers.count}
        spans = [Attended.of(span) for span in this.spans]
        final = self._layers(states, spans, positions[:, None] * self._frequencies, keys, values, found)
        if self._layers.count in layers:
            found[self._layers.count] = final
        logits = self._output(final[-scored:] if isinstance(scored, int) else final[scored])
        return (logits, *(found[layer] for layer in layers))


class CompiledLayers:
    """Decoder layers laid out for the compiled pass.

    norm   the weight of the norm after them; None: states are returned as they are
    entry  for a draft head: the weights of the norms of the embedding and of the state that its layer reads
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Tensor | None]],
        sizes: DecoderSizes,
        norm: Tensor | None,
        entry: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        # Kept: the compiled pass has their addresses.
        self._weights, self._norm, self._entry = layers, _plain(norm), [_plain(weight) for weight in entry or ()]
        self._sizes, self.count = sizes, len(layers)
        self._table = np.zeros((len(layers), 9), dtype=np.int64)
        for row, tensors in zip(self._table, layers, strict=True):
            row[:6] = [_address(tensor) for tensor in tensors]
        self._settings = np.array([sizes.eps, sizes.scale], dtype=np.float32)

    def __call__(
        self,
        states: Float[Tensor, "N H"],
        spans: Sequence[Attended],
        angles: Float[Tensor, "N half"],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        found: dict[int, Tensor],
        embedded: Float[Tensor, "N H"] | None = None,
    ) -> Float[Tensor, "N H"]:
        """Run the layers over the states, in place; copy states after layers to `found`; return the normed states."""
        from draftproof.models.avx512 import layers_region

        rows, size, threads = len(states), self._sizes, torch.get_num_threads()
        trees = [None if span.seen is None else span.seen.to(torch.uint8).contiguous() for span in spans]
        layers, places = self._layer_table(keys, values, found), _span_table(spans, trees)
        width = size.hidden if embedded is None else 2 * size.hidden
        work = Workspace(
            rows, max(width, size.heads * size.head_dim, size.intermediate), threads,
            max(span.reach for span in spans) + size.head_dim,
        )  # fmt: skip
        cosines, sines = angles.cos(), angles.sin()
        normed = states if self._norm is None else torch.empty_like(states)
        inputs = states if embedded is None else torch.empty((rows, width))
        made = [torch.empty((rows, n)) for n in (size.projected, size.heads * size.head_dim, size.intermediate)]
        run_region(
            layers_region, threads, rows=rows, hidden=size.hidden, heads=size.heads, kv_heads=size.kv_heads,
            head_dim=size.head_dim, intermediate=size.intermediate, layers=self.count, spans=len(spans),
            layer_table=layers.ctypes.data, span_table=places.ctypes.data, states=states.data_ptr(),
            cosines=cosines.data_ptr(), sines=sines.data_ptr(), buffers=work.buffers, scratch=work.scratch,
            scratch_bytes=work.scratch_bytes, projected=made[0].data_ptr(), attended=made[1].data_ptr(),
            gated=made[2].data_ptr(), settings=self._settings.ctypes.data, final_norm=_address(self._norm),
            normed=normed.data_ptr(), inputs=inputs.data_ptr(), input_width=width, embedded=_address(embedded),
            embedding_norm=_address(self._entry[0] if self._entry else None),
            state_norm=_address(self._entry[1] if self._entry else None),
        )  # fmt: skip
        return normed

    def _layer_table(self, keys: Sequence[Tensor], values: Sequence[Tensor], found: dict[int, Tensor]) -> Any:
        table = self._table.copy()
        table[:, 6] = [buffer.data_ptr() for buffer in keys]
        table[:, 7] = [buffer.data_ptr() for buffer in values]
        for layer, kept in found.items():
            table[layer - 1, 8] = kept.data_ptr()
        return table


def _span_table(spans: Sequence[Attended], trees: Sequence[Tensor | None]) -> Any:
    rows, at = [], 0
    for span, tree in zip(spans, trees, strict=True):
        nodes = 0 if tree is None else tree.shape[1]
        rows.append((at, span.width, span.start, span.before, _address(tree), span.common, nodes))
        at += span.width
    return np.array(rows, dtype=np.int64)


class CompiledLinear:
    """A linear layer on four- or eight-bit weights without a bias, laid out for compiled products."""

    def __init__(self, blocks: Tensor, scale: Float[Tensor, " O"] | None, inputs: int, outputs: int) -> None:
        self._blocks, self._size, self._padded = blocks, outputs, -(-outputs // PAIR) * PAIR
        self._scale = None if scale is None else nn.functional.pad(scale, (0, self._padded - outputs)).contiguous()
        self._runs = 0 if scale is None else next(n for n in range(1, inputs) if _is_run(inputs, n))

    @classmethod
    def of(cls, linear: Any) -> "CompiledLinear | None":
        """Lay out a layer; None if it has another form."""
        if type(linear) not in (Int4Linear, Int8Linear) or linear.bias is not None or linear.in_features % GROUP:
            return None
        if type(linear) is Int8Linear:
            return cls(blocked_int8(linear.codes), linear.scale, linear.in_features, linear.out_features)
        if linear.out_features % MERGE_MULTIPLE:
            return None
        return cls(blocked_int4(linear.int4), None, linear.in_features, linear.out_features)

    def __call__(self, x: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """Return x · weightᵀ."""
        from draftproof.models.avx512 import product_region

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        (count, inputs), threads = rows.shape, torch.get_num_threads()
        made, work = torch.empty((count, self._padded)), Workspace(count, inputs, threads, 0)
        run_region(
            product_region, threads, hidden=inputs, head=self._blocks.data_ptr(), head_scales=_address(self._scale),
            vocabulary=self._padded, wanted=rows.data_ptr(), wanted_rows=count, logits=made.data_ptr(),
            runs=self._runs, buffers=work.buffers, scratch=work.scratch, scratch_bytes=work.scratch_bytes,
        )  # fmt: skip
        return made[:, : self._size].contiguous().view(*x.shape[:-1], self._size)


def compile_linears(network: nn.Module) -> None:
    """Let the four-bit layers of a network run compiled products, where this machine has them."""
    if compiled_refusal() is None:
        for module in network.modules():
            if isinstance(module, Int4Linear):
                module.compiled = CompiledLinear.of(module)


class Workspace:
    """The memory of one pass: rounded inputs, and for each thread room for a tile of outputs or a token's scores."""

    def __init__(self, rows: int, widest: int, threads: int, scores: int) -> None:
        rounded = rows * widest * 2 + rows * (widest // GROUP) * 4 + rows * 4 + 3 * 64
        self.scratch_bytes = -(-max(rows * PAIR * 4, scores * 4) // 64) * 64
        buffers = -(-threads * (rounded + widest * 4) // 64) * 64
        self._memory = torch.empty(buffers + threads * self.scratch_bytes, dtype=torch.uint8)
        self.buffers = self._memory.data_ptr()
        self.scratch = self.buffers + buffers


def run_region(region: Any, threads: int, **fields: int) -> None:
    """Run a compiled region with so many of torch's OpenMP threads; Python's lock is released."""
    from draftproof.models.avx512 import PASS_FIELDS

    data = np.array([fields.get(name, 0) for name in PASS_FIELDS], dtype=np.int64)
    _parallel()(region.address, data.ctypes.data, threads, 0)


@cache
def _parallel() -> Any:
    start = ctypes.CDLL(None).GOMP_parallel
    start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return start


def _is_run(inputs: int, runs: int) -> bool:
    return inputs % (8 * runs) == 0 and inputs // runs <= 512


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _plain(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().float().contiguous()


def _layer_blocks(layer: Any) -> list[Tensor | None]:
    """Lay out the weights of a Llama layer; copies of a model share them."""
    attention, mlp = layer.self_attn, layer.mlp
    if attention.o_proj.layer_blocks is None:
        attention.o_proj.layer_blocks = blocked_weights(
            layer.input_layernorm, [linear.int4 for linear in (attention.q_proj, attention.k_proj, attention.v_proj)],
            attention.o_proj, layer.post_attention_layernorm, mlp.gate_proj.int4, mlp.up_proj.int4, mlp.down_proj,
        )  # fmt: skip
    blocks: list[Tensor | None] = attention.o_proj.layer_blocks
    return blocks


def blocked_weights(
    norm: Any, qkv: Sequence[Int4Weight], out: Int4Linear, mlp_norm: Any, gate: Int4Weight, up: Int4Weight,
    down: Int4Linear,
) -> list[Tensor | None]:  # fmt: skip
    """Lay out the weights of a layer in the order of LAYER_FIELDS; without a norm its inputs are normed before."""
    return [
        None if norm is None else _plain(norm.weight),
        torch.cat([blocked_int4(weight) for weight in qkv]),
        blocked_int4(out.int4),
        _plain(mlp_norm.weight),
        blocked_int4(gate, up),
        blocked_int4(down.int4),
    ]
