"""Parse a GGUF file of a Llama model and convert it into a folder that transformers loads.

It reads only the three tensor types of the bundled file, so users need neither the `gguf` package nor its dependencies.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, UInt8

Raw = UInt8[np.ndarray, " bytes"]
Values = Float32[np.ndarray, " values"]

OUTER_NAMES: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
"""Names of the tensors outside of the layers: in GGUF, in transformers."""

LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of the tensors of a layer: in GGUF, in transformers."""

PRE_TOKENIZER: Final = "smollm"
"""The only pre-tokenizer that `_tokenizer` builds."""

CONTROL_TOKEN: Final = 3
"""GGUF's token type of tokens like <|im_start|>."""


def convert(source: Path, folder: Path, step: Callable[[int, int], None]) -> None:
    """Write configuration, weights and tokenizer into a new `folder`; `step(done, total)` counts tensors."""
    from safetensors.numpy import save_file

    gguf = Gguf(source)
    folder.mkdir()
    weights = dict(_weights(gguf, step))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(gguf.metadata))
    _write(folder / "tokenizer_config.json", _tokenizer_config(gguf.metadata))
    (folder / "chat_template.jinja").write_text(gguf.metadata["tokenizer.chat_template"], encoding="utf-8")
    _tokenizer(gguf.metadata).save(str(folder / "tokenizer.json"))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(gguf: "Gguf", step: Callable[[int, int], None]) -> Iterator[tuple[str, Float32[np.ndarray, "..."]]]:
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for done, name in enumerate(gguf.names, start=1):
        tensor = gguf.tensor(name)
        if name in OUTER_NAMES:
            yield OUTER_NAMES[name], tensor
        else:
            _, layer, part, _ = name.split(".")  # blk.7.attn_q.weight
            if part in heads:
                tensor = _half_rotation(tensor, gguf.metadata[heads[part]])
            yield f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", tensor
        step(done, len(gguf.names))


def _half_rotation(rows: Float32[np.ndarray, "out inside"], heads: int) -> Float32[np.ndarray, "out inside"]:
    """Reorder the rows of a projection from llama.cpp's rotary pairs to those of transformers.

    llama.cpp rotates neighbouring rows, transformers a row and the one half a head further on.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json, with the older key `rope_theta`, which every transformers version reads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # float32's 1e-5
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{ours}_token": _token(metadata, theirs) for ours, theirs in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **tokens,
    }


def _token(metadata: dict[str, Any], role: str) -> str:
    token: str = metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{role}_token_id"]]
    return token


def _tokenizer(metadata: dict[str, Any]) -> Any:
    """Build a byte-level BPE tokenizer that splits off every digit, as in training.

    transformers' own GGUF reader omits that step, and then two spaces before a number become other tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if metadata["tokenizer.ggml.pre"] != PRE_TOKENIZER:
        raise ValueError(
            f"pre-tokenizer {metadata['tokenizer.ggml.pre']!r} is not supported; this reader knows {PRE_TOKENIZER!r}"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, rest = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


class Gguf:
    """An open GGUF file: `metadata` by key, and `tensor(name)` dequantised to float32 in torch's shape."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data)
        if self._data[:4] != b"GGUF" or cursor.number("<4xI") != 3:
            raise ValueError(f"{path.name} starts with {self._data[:8]!r}; expected a GGUF file of version 3")
        tensors, entries = cursor.number("<Q"), cursor.number("<Q")
        self.metadata: dict[str, Any] = {cursor.string(): cursor.value(cursor.number("<I")) for _ in range(entries)}
        self._tensors = dict(cursor.tensor_info() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-cursor.at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> Float32[np.ndarray, "..."]:
        info = self._tensors[name]
        if info.kind not in TENSOR_TYPES:
            raise ValueError(f"tensor {name} has GGML type {info.kind}; this reader knows {sorted(TENSOR_TYPES)}")
        size, dequantise = TENSOR_TYPES[info.kind]
        count = int(np.prod(info.shape))
        raw = np.frombuffer(self._data, np.uint8, count // BLOCK * size, self._start + info.offset)
        return dequantise(raw).reshape(info.shape)


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    kind: int
    offset: int


SCALARS: Final = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""GGUF's scalar value types, as `struct` format characters."""
STRING: Final = 8
"""GGUF's value type of a string."""
ARRAY: Final = 9
"""GGUF's value type of an array."""


@dataclass(slots=True)
class _Cursor:
    """A reader of consecutive GGUF values."""

    data: mmap.mmap
    at: int = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.number("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.number("<" + SCALARS[kind])

    def tensor_info(self) -> tuple[str, _TensorInfo]:
        name, rank = self.string(), self.number("<I")
        shape = tuple(self.number("<Q") for _ in range(rank))[::-1]  # GGUF stores the fastest axis first
        return name, _TensorInfo(shape, self.number("<I"), self.number("<Q"))


def _f32(raw: Raw) -> Values:
    return raw.view("<f4").astype(np.float32)


def _q4_1(raw: Raw) -> Values:
    """Dequantise blocks of a scale, a minimum and 16 bytes: first the 16 low nibbles, then the 16 high nibbles."""
    blocks = raw.reshape(-1, 20)
    scale, minimum = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    values: Values = (scale * nibbles + minimum).reshape(-1)
    return values


def _q8_0(raw: Raw) -> Values:
    """Dequantise blocks of a scale and 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)


BLOCK: Final = 32
"""Values in a quantisation block."""

TENSOR_TYPES: Final[dict[int, tuple[int, Callable[[Raw], Values]]]] = {
    0: (4 * BLOCK, _f32),
    3: (20, _q4_1),
    8: (34, _q8_0),
}
"""GGML's tensor types by number: bytes of a block, and the function that dequantises blocks."""
