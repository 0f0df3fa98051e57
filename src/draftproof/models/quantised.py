"""Replace the linear layers of a model that draftproof loaded by layers on four- or eight-bit weights.

The model *is* the quantised one from then on: what is exact is exact for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import BFloat16, Float, Int
from torch import Tensor, nn

from draftproof.models.blocked import can_lay_out_layer, layer_blocks
from draftproof.models.bundled.gguf import LAYER_NAMES, half_rotation, rotated_heads
from draftproof.models.compiled_pass import CompiledLinear, DecoderSizes, compiled_refusal
from draftproof.models.gguf import Gguf
from draftproof.models.head.taps import hash_weights, weights_hash
from draftproof.models.heap import trim_heap
from draftproof.models.int4_linear import Int4Linear, Int4Weight, fits_int4, int4_weight, pack_groups, unpack
from draftproof.models.int8_linear import Int8Linear, quantise_rows
from draftproof.models.llama import Attention, Decoder, Layer, Llama, LlamaConfig, Mlp, Norm, Rotary
from draftproof.models.transformers_types import PreTrainedModel

EMBEDDINGS_AT_ONCE: Final = 2048
"""Rows of an embedding table that are dequantised at a time."""


@dataclass(frozen=True, slots=True)
class QuantisationError:
    """How far quantised weights are from the model's own: root mean square error over root mean square, by layer."""

    layers: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.layers.values(), default=0.0)

    @property
    def mean(self) -> float:
        return sum(self.layers.values()) / max(1, len(self.layers))


def quantise(model: PreTrainedModel, weights: str) -> QuantisationError:
    """Replace every linear layer of the model, in place, by one on "int4" or "int8" weights; return the error.

    The output layer, and layers of a shape that four bits do not fit, get eight bits. The model remembers the hash of
    the weights it had, so that a head trained on it still knows it.
    """
    model.source_weights_hash = weights_hash(model)
    output, errors = model.get_output_embeddings(), {}
    table = getattr(model.get_input_embeddings(), "weight", None)
    for name, linear in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]:
        weight, bias = linear.weight, linear.bias
        if weights == "int4" and linear is not output and fits_int4(weight):
            packed = int4_weight(weight)
            made: nn.Module = Int4Linear(packed, bias)
            errors[name] = _relative_error(unpack(packed), weight)
        else:
            codes, scale = quantise_rows(weight)
            made = Int8Linear(codes, scale, bias, table=weight if weight is table else None)
            errors[name] = _relative_error(codes * scale[:, None], weight)
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], made)
    return QuantisationError(errors)


def _relative_error(made: Tensor, weight: Tensor) -> float:
    wide = weight.detach().float()
    return float((made.detach() - wide).norm() / wide.norm().clamp_min(1e-30))


class BFloat16Embedding(nn.Module):
    """An embedding table in bfloat16 that returns float32. A buffer: the model's dtype is that of its states."""

    def __init__(self, table: BFloat16[Tensor, "V H"]) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", table, persistent=False)

    def forward(self, tokens: Int[Tensor, "*N"]) -> Float[Tensor, "*N H"]:
        return nn.functional.embedding(tokens, self.weight).float()


def llama_from_gguf(path: Path, config: LlamaConfig) -> Llama:
    """Return a Llama model on the four-bit weights of a GGUF file, with tied embeddings in eight bits.

    Groups keep their codes; scales and zeros are rounded to bfloat16 (int4_linear.py). Embeddings are rounded to
    bfloat16 where they are inputs, and to eight bits with one scale a token where they are outputs.
    """
    gguf = Gguf(path)
    _check_shapes(gguf, config)
    table, lm_head = _tied_embeddings(gguf)
    compiles = compiled_refusal() is None and DecoderSizes.of(config, config.head_dim, config.head_dim**-0.5).fit
    if compiles:
        CompiledLinear.of(lm_head)  # here, before more is in memory: it is kept with the layer
    trim_heap()
    layers = nn.ModuleList([_layer(gguf, config, index, compiles) for index in range(config.num_hidden_layers)])
    decoder = Decoder(BFloat16Embedding(table), layers, _norm(gguf, "output_norm.weight"), Rotary(config))
    model = Llama(config, decoder, lm_head).eval()
    model.source_weights_hash = _hash(gguf, model, table)
    return model


def _check_shapes(gguf: Gguf, config: LlamaConfig) -> None:
    """Refuse a file whose tensors do not have the shapes that the configuration gives them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = {
        "attn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_norm": (hidden,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    wanted: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden), "output_norm.weight": (hidden,)
    }  # fmt: skip
    for index in range(config.num_hidden_layers):
        wanted |= {f"blk.{index}.{part}.weight": shape for part, shape in layer.items()}
    for name, shape in wanted.items():
        if gguf.shape(name) != shape:
            raise ValueError(f"tensor {name} has shape {gguf.shape(name)}, and the configuration gives it {shape}")
    for part, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
        if rotated_heads(gguf.metadata, part) != heads:
            raise ValueError(f"the file counts {rotated_heads(gguf.metadata, part)} heads of {part}, not {heads}")


def _layer(gguf: Gguf, config: LlamaConfig, index: int, compiles: bool) -> Layer:
    """Read a layer's parts one after the other, and lay them out for the compiled pass if there is one."""
    parts: dict[str, Any] = {}
    for part, name in LAYER_NAMES.items():
        source = f"blk.{index}.{part}.weight"
        if part.endswith("norm"):
            parts[name] = _norm(gguf, source)
        else:
            parts[name.rpartition(".")[2]] = Int4Linear(gguf_weight(gguf, source, rotated_heads(gguf.metadata, part)))
    attention = Attention(config, **{name: parts.pop(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    norms = parts.pop("input_layernorm"), parts.pop("post_attention_layernorm")
    layer = Layer(norms[0], attention, norms[1], Mlp(**parts))
    if compiles and can_lay_out_layer(layer):
        layer_blocks(layer)
    trim_heap()
    return layer


def _tied_embeddings(gguf: Gguf) -> tuple[BFloat16[Tensor, "V H"], Int8Linear]:
    """Return the embeddings in bfloat16, and the output layer; the whole table is never in float32."""
    table = torch.empty(gguf.shape("token_embd.weight"), dtype=torch.bfloat16)
    codes, scale = torch.empty(table.shape, dtype=torch.int8), torch.empty(len(table))
    start = 0
    for values in gguf.parts("token_embd.weight", EMBEDDINGS_AT_ONCE):
        part = torch.from_numpy(values)
        here = slice(start, start + len(part))
        table[here] = part
        codes[here], scale[here] = quantise_rows(part)
        start += len(part)
    return table, Int8Linear(codes, scale, table=table)


def gguf_weight(gguf: Gguf, name: str, heads: int | None) -> Int4Weight:
    """Return a matrix of a GGUF file: its own groups where it has them, otherwise quantised.

    heads  the heads whose rows llama.cpp stores in pairs (half_rotation); None: rows stay
    """
    groups = gguf.groups(name)
    if groups is None:
        return int4_weight(torch.from_numpy(_arranged(gguf.tensor(name), heads)))
    return pack_groups(*(torch.from_numpy(_arranged(part, heads)) for part in groups))


def _arranged(rows: Any, heads: int | None) -> Any:
    return rows if heads is None else half_rotation(rows, heads)


def _norm(gguf: Gguf, name: str) -> Norm:
    return Norm(torch.from_numpy(gguf.tensor(name)))


def _hash(gguf: Gguf, model: Llama, table: Tensor) -> str:
    """Return the hash that the model of the file's own values has: a head that was trained on it then fits."""

    def matrices() -> Any:
        yield table
        for part in LAYER_NAMES:
            if not part.endswith("norm"):
                rows = gguf.tensor(f"blk.0.{part}.weight")
                yield torch.from_numpy(_arranged(rows, rotated_heads(gguf.metadata, part)))

    return hash_weights(model, matrices())
