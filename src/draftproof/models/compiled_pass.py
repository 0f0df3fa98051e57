"""Run the packed passes of a Llama model on four-bit weights as one compiled call (compiled/); numba compiles it."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from draftproof.core.tree import lineage
from draftproof.models.blocked import (
    BLOCK,
    PAIR,
    blocked_int8,
    can_lay_out,
    lay_out,
    layer_blocks,
    plain,
    unblocked_int8,
)
from draftproof.models.int4_linear import GROUP, Int4Linear
from draftproof.models.int8_linear import Int8Linear
from draftproof.models.llama import Llama
from draftproof.models.packed import PackedPass, Span
from draftproof.models.pool import LayerShape

COMPILED_COSTS: Final = {"pass_growth": 0.11, "draft_cost": 0.047, "draft_start": 2.2, "block_cost": 0.06}
"""What llama_pass.PASS_COSTS says of torch's products, for compiled passes: fitted to whole rounds of the bundled model
and its head on 2 cores, four chat prompts, greedy. Beside a round without a draft, passes over 2 to 5 tokens with all
that follows them took 1.13, 1.25, 1.35 and 1.5 times as long, and drafts of one and two tokens 0.15 and 0.20 of it."""


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


class DecoderSizes(NamedTuple):
    """The sizes of decoder layers, the epsilon of their norms, and the scale of attention scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float

    @classmethod
    def of(cls, config: Any, head_dim: int, scale: float) -> "DecoderSizes":
        """Return the sizes of a Llama model."""
        return cls(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim,
            config.intermediate_size, config.rms_norm_eps, scale,
        )  # fmt: skip

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
        layers = [layer_blocks(layer) for layer in net.model.layers]
        frequencies = net.model.rotary_emb.inv_freq.detach().float()
        self._sizes, self._layers = sizes, CompiledLayers(layers, sizes, net.model.norm.weight, frequencies)

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
        spans, output = [Attended.of(span) for span in this.spans], self._output
        if isinstance(output, CompiledLinear) and isinstance(scored, int):
            final, logits = self._layers(states, spans, positions, keys, values, found, output, scored)
        else:
            final, _ = self._layers(states, spans, positions, keys, values, found)
            logits = output(final[-scored:] if isinstance(scored, int) else final[scored])
        if self._layers.count in layers:
            found[self._layers.count] = final
        return (logits, *(found[layer] for layer in layers))


class RotationTable:
    """The cosines and sines of rotary positions, for as many positions as were needed so far."""

    def __init__(self, frequencies: Float[Tensor, " half"]) -> None:
        self._frequencies = frequencies
        self._cosines = self._sines = torch.empty((0, len(frequencies)))

    def rows(self, positions: int) -> tuple[Float[Tensor, "positions half"], Float[Tensor, "positions half"]]:
        """Return the cosines and the sines of so many positions at least."""
        if positions > len(self._cosines):
            count = 1024 * 2 ** max(0, (positions - 1) // 1024).bit_length()
            angles = torch.arange(count)[:, None] * self._frequencies
            self._cosines, self._sines = angles.cos(), angles.sin()
        return self._cosines, self._sines


class Entry(NamedTuple):
    """What a draft head's layer reads beside its states: the weights of two norms, and a table of embeddings."""

    embedding_norm: Tensor
    state_norm: Tensor
    table: Tensor


class Call(NamedTuple):
    """The numbers of a pass by name, and the tensors that they have addresses of, which must be kept meanwhile."""

    fields: dict[str, int]
    kept: tuple[Any, ...]
    normed: Float[Tensor, "N H"]


class CompiledLayers:
    """Decoder layers laid out for the compiled pass.

    norm   the weight of the norm after them; None: states are returned as they are
    entry  for a draft head: what its layer reads beside the states
    scales  for a draft head whose layer has eight bits: those of its four matrices
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Tensor | None]],
        sizes: DecoderSizes,
        norm: Tensor | None,
        frequencies: Float[Tensor, " half"],
        entry: Entry | None = None,
        scales: Sequence[Tensor] = (),
    ) -> None:
        # Kept: the compiled pass has their addresses.
        self._weights, self._norm, self._entry = layers, None if norm is None else plain(norm), entry
        self._sizes, self.count, self._rotation = sizes, len(layers), RotationTable(frequencies)
        self._scales = list(scales)
        self._table = np.zeros((len(layers), 13), dtype=np.int64)
        for row, tensors in zip(self._table, layers, strict=True):
            row[:6] = [_address(tensor) for tensor in tensors]
            row[9:] = [_address(scale) for scale in scales] if scales else 0
        self._settings = np.array([sizes.eps, sizes.scale], dtype=np.float32)
        self._same = {
            "hidden": sizes.hidden, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
            "intermediate": sizes.intermediate, "layers": self.count, "settings": self._settings.ctypes.data,
            "final_norm": _address(self._norm), "input_width": sizes.hidden if entry is None else 2 * sizes.hidden,
        }  # fmt: skip
        if entry is not None:
            self._same |= {
                "embedding_norm": entry.embedding_norm.data_ptr(), "state_norm": entry.state_norm.data_ptr(),
                "table": entry.table.data_ptr(), "table_bytes": entry.table.element_size(),
            }  # fmt: skip

    def __call__(
        self,
        states: Float[Tensor, "N H"],
        spans: Sequence[Attended],
        positions: Int[Tensor, " N"],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        found: dict[int, Tensor],
        output: "CompiledLinear | None" = None,
        wanted: int = 0,
    ) -> tuple[Float[Tensor, "N H"], Float[Tensor, "J V"]]:
        """Run the layers over the states, in place; copy states after layers to `found`.

        Return the normed states, and the logits of the last `wanted` of them, of which there are none without an output
        layer.
        """
        call = self.call(states, spans, positions, keys, values, found)
        if output is None:
            run_pass(call.fields)
            return call.normed, torch.empty((0, 0))
        logits = output.empty(wanted)
        call.fields.update(output.fields(call.normed[len(states) - wanted :], logits))
        run_pass(call.fields)
        return call.normed, output.cut(logits)

    def call(
        self,
        states: Float[Tensor, "N H"],
        spans: Sequence[Attended],
        positions: Int[Tensor, " N"],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        found: dict[int, Tensor],
        tokens: Int[Tensor, " N"] | None = None,
        *,
        widest: int = 0,
        reach: int = 0,
    ) -> Call:
        """Return the numbers of a pass; see `__call__`. `tokens` are a draft head's.

        widest  the largest number of inputs of other products in the same workspace
        reach   slots of a row that are attended to at most, if they are more than now
        """
        from draftproof.models.compiled.attention import scratch_bytes

        rows, size, threads = len(states), self._sizes, torch.get_num_threads()
        trees = [None if span.seen is None else span.seen.to(torch.uint8).contiguous() for span in spans]
        layers, places = self._layer_table(keys, values, found), _span_table(spans, trees)
        width, attended = self._same["input_width"], size.heads * size.head_dim
        reach = max(reach, max(span.reach for span in spans))
        cosines, sines = self._rotation.rows(reach)
        queries = size.heads // size.kv_heads * max(span.width for span in spans)
        room = max(4 * reach + 64, scratch_bytes(queries, size.head_dim, size.head_dim))
        work = Workspace(rows, max(width, attended, size.intermediate, widest), threads, room)
        normed = states if self._norm is None else torch.empty_like(states)
        sizes = (size.projected, attended, size.intermediate, 0 if self._entry is None else width)
        made = torch.empty(rows * sum(sizes))
        projected = made.data_ptr()
        fields = {
            **self._same, "rows": rows, "spans": len(spans), "layer_table": layers.ctypes.data,
            "span_table": places.ctypes.data, "states": states.data_ptr(), "positions": positions.data_ptr(),
            "cosines": cosines.data_ptr(), "sines": sines.data_ptr(), "buffers": work.buffers, "scratch": work.scratch,
            "scratch_bytes": work.scratch_bytes, "projected": projected,
            "attended": projected + 4 * rows * sizes[0], "gated": projected + 4 * rows * sum(sizes[:2]),
            "normed": normed.data_ptr(), "tokens": _address(tokens),
            "inputs": states.data_ptr() if self._entry is None else projected + 4 * rows * sum(sizes[:3]),
        }  # fmt: skip
        return Call(fields, (states, trees, layers, places, work, made, positions, tokens, cosines, sines), normed)

    def bare(self, states: Float[Tensor, "N H"], widest: int = 0) -> Call:
        """Return the numbers of a pass without layers, for what comes before or after them."""
        work = Workspace(len(states), max(widest, self._sizes.hidden), torch.get_num_threads(), 0)
        fields = {
            **self._same, "layers": 0, "table": 0, "rows": len(states), "states": states.data_ptr(),
            "buffers": work.buffers, "scratch": work.scratch, "scratch_bytes": work.scratch_bytes,
        }  # fmt: skip
        return Call(fields, (states, work), states)

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

    def __init__(self, blocks: Tensor, scale: Float[Tensor, " O"] | None, outputs: int) -> None:
        self._blocks, self._size, self._padded = blocks, outputs, -(-outputs // PAIR) * PAIR
        self._scale = None if scale is None else nn.functional.pad(scale, (0, self._padded - outputs)).contiguous()

    @classmethod
    def of(cls, linear: Any) -> "CompiledLinear | None":
        """Lay out a layer; None if it has another form."""
        if type(linear) is Int8Linear and linear.bias is None and linear.in_features % GROUP == 0:
            if linear.compiled is None:
                blocks = blocked_int8(linear.codes)
                linear.compiled = cls(blocks, linear.scale, linear.out_features)
                linear.release(partial(unblocked_int8, blocks, linear.out_features))
            made: CompiledLinear = linear.compiled
            return made
        if not can_lay_out(linear):
            return None
        return cls(lay_out(linear), None, linear.out_features)

    @classmethod
    def within(cls, part: nn.Module) -> "CompiledLinear | None":
        """Return the compiled product of a part that is one quantised layer; None if it has none."""
        layers = [module for module in part.modules() if isinstance(module, Int4Linear | Int8Linear)]
        made = layers[0].compiled if len(layers) == 1 else None
        return made if isinstance(made, cls) else None

    @property
    def is_whole(self) -> bool:
        """Return whether the outputs fill their blocks."""
        return self._size == self._padded

    def __call__(self, x: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """Return x · weightᵀ."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        (count, inputs), threads = rows.shape, torch.get_num_threads()
        made, work = self.empty(count), Workspace(count, inputs, threads, 0)
        fields = self.fields(rows, made) | {
            "hidden": inputs, "buffers": work.buffers, "scratch": work.scratch, "scratch_bytes": work.scratch_bytes
        }  # fmt: skip
        run_pass(fields)
        return self.cut(made).view(*x.shape[:-1], self._size)

    @property
    def blocks(self) -> Tensor:
        return self._blocks

    @property
    def scale(self) -> Float[Tensor, " padded"] | None:
        """Return the scale of each output; None if weights have four bits."""
        return self._scale

    def empty(self, count: int) -> Float[Tensor, "N padded"]:
        """Return room for the products of so many rows."""
        return torch.empty((count, self._padded))

    def cut(self, made: Float[Tensor, "N padded"]) -> Float[Tensor, "N O"]:
        """Leave out the columns that only fill the last block."""
        return made[:, : self._size].contiguous()

    def fields(self, rows: Float[Tensor, "N I"], made: Float[Tensor, "N padded"]) -> dict[str, int]:
        """Return the numbers of a product of these rows, by name."""
        return {
            "head": self._blocks.data_ptr(), "head_scales": _address(self._scale), "vocabulary": self._padded,
            "wanted": rows.data_ptr(), "wanted_rows": len(rows), "logits": made.data_ptr(),
        }  # fmt: skip


def compile_linears(network: nn.Module) -> None:
    """Lay out the quantised layers of a network for compiled products, where this machine has them."""
    if compiled_refusal() is None:
        for module in network.modules():
            if isinstance(module, Int4Linear | Int8Linear) and module.compiled is None:
                module.compiled = CompiledLinear.of(module)


def fits_compiled_int8(network: nn.Module) -> bool:
    """Return whether the linear layers of a network would fill the blocks of compiled eight-bit products."""
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    return all(
        layer.bias is None and layer.in_features % GROUP == 0 and layer.out_features % PAIR == 0 for layer in layers
    )


class Workspace:
    """The memory of one pass: rounded inputs, and for each thread room for a tile of outputs or for attention."""

    def __init__(self, rows: int, widest: int, threads: int, attention_bytes: int) -> None:
        rounded = rows * widest * 2 + rows * (widest // GROUP) * 4 + rows * 4 + 3 * 64
        self.scratch_bytes = -(-max(rows * PAIR * 4, attention_bytes) // 64) * 64
        buffers = -(-threads * (rounded + widest * 4) // 64) * 64
        self._memory = torch.empty(buffers + threads * self.scratch_bytes, dtype=torch.uint8)
        self.buffers = self._memory.data_ptr()
        self.scratch = self.buffers + buffers


class Gate:
    """The counter by which the threads of a region wait for each other."""

    def __init__(self) -> None:
        self._memory = np.zeros(16, dtype=np.int64)  # 128 bytes: nothing else is in its line of the cache
        self.address = int(self._memory.ctypes.data + 64) // 64 * 64


def run_pass(fields: Mapping[str, int]) -> None:
    """Run a pass with torch's OpenMP threads; Python's lock is released."""
    run_region({}, fields)


def run_region(
    chain: Mapping[str, int], reading: Mapping[str, int] | None, stepping: Mapping[str, int] | None = None
) -> None:
    """Run the compiled region over the numbers of a call and of its passes; see compiled.draft_chain.CHAIN_FIELDS."""
    from draftproof.core.simd import START
    from draftproof.models.compiled.decoder import PASS_FIELDS
    from draftproof.models.compiled.draft_chain import CHAIN_FIELDS, region

    gate = Gate()
    passes = [
        _numbers(PASS_FIELDS, {**fields, "gate": gate.address}) if fields else None for fields in (reading, stepping)
    ]
    first, second = (0 if data is None else data.ctypes.data for data in passes)
    data = _numbers(CHAIN_FIELDS, {**chain, "reading": first, "stepping": second})
    START(region.address, data.ctypes.data, torch.get_num_threads(), 0)


def _numbers(names: Sequence[str], fields: Mapping[str, int]) -> Any:
    return np.array([fields.get(name, 0) for name in names], dtype=np.int64)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
