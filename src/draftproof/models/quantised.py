"""Replace the linear layers of a model that draftproof loaded by layers on four- or eight-bit weights.

The model *is* the quantised one from then on: what is exact is exact for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import BFloat16, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftproof.models.bundled.gguf import LAYER_NAMES, half_rotation, rotated_heads
from draftproof.models.gguf import Gguf
from draftproof.models.head.taps import hash_weights, weights_hash
from draftproof.models.int4_linear import Int4Linear, Int4Weight, fits_int4, int4_weight, pack_groups, unpack
from draftproof.models.int8_linear import Int8Linear, quantise_rows

ROWS_AT_ONCE: Final = 2048
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


def llama_from_gguf(path: Path, config: LlamaConfig) -> LlamaForCausalLM:
    """Return a Llama model on the four-bit weights of a GGUF file, with tied embeddings in eight bits.

    Groups keep their codes; scales and zeros are rounded to bfloat16 (int4_linear.py). Embeddings are rounded to
    bfloat16 where they are inputs, and to eight bits with one scale a token where they are outputs.
    """
    gguf = Gguf(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    table, model.lm_head = _tied_embeddings(gguf)
    model.model.embed_tokens = BFloat16Embedding(table)
    model.model.norm.weight = _norm(gguf, "output_norm.weight")
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    for index, layer in enumerate(model.model.layers):
        for part, name in LAYER_NAMES.items():
            source, (parent, _, leaf) = f"blk.{index}.{part}.weight", name.rpartition(".")
            if part.endswith("norm"):
                getattr(layer, name).weight = _norm(gguf, source)
            else:
                heads = rotated_heads(gguf.metadata, part)
                setattr(layer.get_submodule(parent), leaf, Int4Linear(gguf_weight(gguf, source, heads)))
    model.source_weights_hash = _hash(gguf, model, table)
    return model.eval().requires_grad_(False)


def _tied_embeddings(gguf: Gguf) -> tuple[BFloat16[Tensor, "V H"], Int8Linear]:
    """Return the embeddings in bfloat16, and the output layer; the whole table is never in float32."""
    table = torch.empty(gguf.shape("token_embd.weight"), dtype=torch.bfloat16)
    codes, scale = torch.empty(table.shape, dtype=torch.int8), torch.empty(len(table))
    start = 0
    for values in gguf.parts("token_embd.weight", ROWS_AT_ONCE):
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


def _norm(gguf: Gguf, name: str) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(gguf.tensor(name)), requires_grad=False)


def _hash(gguf: Gguf, model: PreTrainedModel, table: Tensor) -> str:
    """Return the hash that the model of the file's own values has: a head that was trained on it then fits."""

    def matrices() -> Any:
        yield table
        for part in LAYER_NAMES:
            if not part.endswith("norm"):
                rows = gguf.tensor(f"blk.0.{part}.weight")
                yield torch.from_numpy(_arranged(rows, rotated_heads(gguf.metadata, part)))

    return hash_weights(model, matrices())
