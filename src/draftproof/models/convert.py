"""A Llama in a GGUF file becomes a folder that transformers loads. Knows nothing of downloads and caches.

The weights are stored as float32. A Q4_1 or Q8_0 value is a float16 scale times a small integer (plus a
float16 minimum): up to 19 significant bits, which float16 would round. Float32 holds what the file says, it
is what a CPU computes in, and it is mapped into memory without another conversion at every start; the price
is disk space.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from draftproof.models.gguf import Gguf

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
