"""A folder with a tiny Llama model as a GGUF file, its config.json and a tokenizer, like that of the bundled model."""

import json

import numpy as np

from models.gguf_files import gguf_bytes, random_blocks
from models.int4_models import SIZES
from models.tiny_tokenizers import byte_level

V, LAYERS = 352, 3


def write_llama(folder):
    """Write the files; return the folder."""
    rng = np.random.default_rng(0)
    hidden, inner, heads, kv_heads, size = (
        SIZES[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes = {
        "attn_q": (heads * size, hidden),
        "attn_k": (kv_heads * size, hidden),
        "attn_v": (kv_heads * size, hidden),
        "attn_output": (hidden, heads * size),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }

    def norm():
        return "F32", (hidden,), (rng.random(hidden) + 0.5).astype(np.float32).tobytes()

    tensors = {
        "token_embd.weight": ("Q8_0", (V, hidden), random_blocks("Q8_0", (V, hidden), rng)),
        "output_norm.weight": norm(),
    }
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": norm() for name in ("attn_norm", "ffn_norm")}
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = ("Q4_1", shape, random_blocks("Q4_1", shape, rng))
    metadata = {"llama.attention.head_count": heads, "llama.attention.head_count_kv": kv_heads}
    folder.mkdir()
    (folder / "model.gguf").write_bytes(gguf_bytes(metadata, tensors))
    config = {
        "model_type": "llama", "vocab_size": V, "num_hidden_layers": LAYERS, "rope_theta": 10_000.0,
        "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"], **SIZES,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save_pretrained(folder)
    return folder
