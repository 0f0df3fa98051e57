"""GGUF files: what they say and their tensors as float32. Knows the container, and no model and no tokenizer.

It reads the three tensor types that the bundled file uses, which spares every user the `gguf` package and
what that pulls in. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
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

BLOCK: Final = 32  # values that share one scale
SCALARS: Final = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}  # as struct writes them
STRING: Final = 8
ARRAY: Final = 9


class Gguf:
    """An open file: `metadata` by key, `tensor(name)` dequantised in the shape that torch uses."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data)
        if self._data[:4] != b"GGUF" or cursor.number("<4xI") != 3:
            raise ValueError(f"{path.name} starts with {self._data[:8]!r}; expected a GGUF file of version 3")
        tensors, entries = cursor.number("<Q"), cursor.number("<Q")
        self.metadata: dict[str, Any] = {cursor.string(): cursor.value(cursor.number("<I")) for _ in range(entries)}
        self._places = dict(cursor.place() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-cursor.at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def tensor(self, name: str) -> Float32[np.ndarray, "..."]:
        place = self._places[name]
        if place.kind not in KINDS:
            raise ValueError(f"tensor {name} has GGML type {place.kind}; this reader knows {sorted(KINDS)}")
        size, dequantise = KINDS[place.kind]
        count = int(np.prod(place.shape))
        raw = np.frombuffer(self._data, np.uint8, count // BLOCK * size, self._start + place.offset)
        return dequantise(raw).reshape(place.shape)


@dataclass(frozen=True, slots=True)
class _Place:
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(slots=True)
class _Cursor:
    """Reads on from where it stands."""

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

    def place(self) -> tuple[str, _Place]:
        name, rank = self.string(), self.number("<I")
        shape = tuple(self.number("<Q") for _ in range(rank))[::-1]  # GGUF names the fastest axis first
        return name, _Place(shape, self.number("<I"), self.number("<Q"))


def _f32(raw: Raw) -> Values:
    return raw.view("<f4").astype(np.float32)


def _q4_1(raw: Raw) -> Values:
    """Blocks of a scale, a minimum and 16 bytes: first their 16 low halves, then their 16 high halves."""
    blocks = raw.reshape(-1, 20)
    scale, minimum = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    values: Values = (scale * nibbles + minimum).reshape(-1)
    return values


def _q8_0(raw: Raw) -> Values:
    """Blocks of a scale and 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)


KINDS: Final[dict[int, tuple[int, Callable[[Raw], Values]]]] = {
    0: (4 * BLOCK, _f32),
    3: (20, _q4_1),
    8: (34, _q8_0),
}
"""GGML's number of a tensor type: bytes for 32 values, and how they become float32."""


CONTROL: Final = 3  # GGUF's token type for tokens like <|im_start|>
PRE_TOKENIZER: Final = "smollm"

LAYER: Final = {
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
OUTSIDE: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def convert(source: Path, folder: Path, step: Callable[[int, int], None]) -> None:
    """Write config, weights and tokenizer into a new `folder`; `step(done, total)` counts tensors."""
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


def _weights(gguf: Gguf, step: Callable[[int, int], None]) -> Iterator[tuple[str, Float32[np.ndarray, "..."]]]:
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for done, name in enumerate(gguf.names, start=1):
        tensor = gguf.tensor(name)
        if name in OUTSIDE:
            yield OUTSIDE[name], tensor
        else:
            _, layer, part, _ = name.split(".")  # blk.7.attn_q.weight
            if part in heads:
                tensor = _half_rotation(tensor, gguf.metadata[heads[part]])
            yield f"model.layers.{layer}.{LAYER[part]}.weight", tensor
        step(done, len(gguf.names))


def _half_rotation(rows: Float32[np.ndarray, "out inside"], heads: int) -> Float32[np.ndarray, "out inside"]:
    """llama.cpp rotates neighbouring pairs of rows, transformers a row and the one half a head further on."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _config(said: dict[str, Any]) -> dict[str, Any]:
    """The older spelling of the rotation's base, because every transformers reads it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": said["llama.vocab_size"],
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "head_dim": said["llama.rope.dimension_count"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": float(f"{said['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # float32's 1e-5
        "rope_theta": said["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(said: dict[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{ours}_token": _token(said, theirs) for ours, theirs in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": said["llama.context_length"],
        **tokens,
    }


def _token(said: dict[str, Any], role: str) -> str:
    token: str = said["tokenizer.ggml.tokens"][said[f"tokenizer.ggml.{role}_token_id"]]
    return token


def _tokenizer(said: dict[str, Any]) -> Any:
    """Byte-level BPE that takes every digit alone, as in training.

    transformers' own reader of GGUF forgets that, and then two spaces before a number become other tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if said["tokenizer.ggml.pre"] != PRE_TOKENIZER:
        raise ValueError(f"pre-tokenizer {said['tokenizer.ggml.pre']!r} is not known here, only {PRE_TOKENIZER!r}")
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, rest = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer
