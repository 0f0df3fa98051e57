"""Convert the GGUF file of a Llama model into what transformers loads: configuration, tokenizer, float32 weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Shaped

from draftproof.models.gguf import Gguf

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

ROTATED: Final = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
"""Projections whose rows are rotated to positions, with the metadata that counts their heads."""

WEIGHTS: Final = "model.gguf"
"""The file's name in a folder that keeps it."""

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
    _write_rest(gguf, folder)


def keep(source: Path, folder: Path, step: Callable[[int, int], None]) -> None:
    """Write configuration and tokenizer into a new `folder`, and move the file itself there, as WEIGHTS."""
    folder.mkdir()
    _write_rest(Gguf(source), folder)
    source.rename(folder / WEIGHTS)
    step(1, 1)


def _write_rest(gguf: Gguf, folder: Path) -> None:
    """Write configuration, chat template and tokenizer."""
    _write(folder / "config.json", _config(gguf.metadata))
    _write(folder / "tokenizer_config.json", _tokenizer_config(gguf.metadata))
    (folder / "chat_template.jinja").write_text(gguf.metadata["tokenizer.chat_template"], encoding="utf-8")
    _tokenizer(gguf.metadata).save(str(folder / "tokenizer.json"))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(gguf: Gguf, step: Callable[[int, int], None]) -> Iterator[tuple[str, Float32[np.ndarray, "..."]]]:
    for done, name in enumerate(gguf.names, start=1):
        tensor = gguf.tensor(name)
        if name in OUTER_NAMES:
            yield OUTER_NAMES[name], tensor
        else:
            _, layer, part, _ = name.split(".")  # blk.7.attn_q.weight
            heads = rotated_heads(gguf.metadata, part)
            if heads is not None:
                tensor = half_rotation(tensor, heads)
            yield f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", tensor
        step(done, len(gguf.names))


def rotated_heads(metadata: dict[str, Any], part: str) -> int | None:
    """Return the heads of a projection whose rows are rotated to positions; None if its rows are not."""
    if part not in ROTATED:
        return None
    count = metadata.get(ROTATED[part])
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{ROTATED[part]} is {count!r}; expected a number of heads")
    return count


def half_rotation(rows: Shaped[np.ndarray, "out inside"], heads: int) -> Shaped[np.ndarray, "out inside"]:
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
