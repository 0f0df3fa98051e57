"""Tiny random models of every family that the library promises to serve exactly."""

from collections.abc import Callable

import torch
import transformers as tf

V = 61
SMALL = {"vocab_size": V, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
LLAMA = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128}
GEMMA = {**LLAMA, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA["num_hidden_layers"] = 4
QWEN = {**LLAMA, "head_dim": 8}
MIXED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
GPT = {"vocab_size": V, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128}
FALCON = {**SMALL, "max_position_embeddings": 128}

CONFIGS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**LLAMA),
    "qwen2": lambda: tf.Qwen2Config(**LLAMA),
    "qwen2-window": lambda: tf.Qwen2Config(**LLAMA, **MIXED),
    "qwen3": lambda: tf.Qwen3Config(**QWEN),
    "mistral-window": lambda: tf.MistralConfig(**LLAMA, sliding_window=6),
    "gemma2": lambda: tf.Gemma2Config(**GEMMA),
    "gemma3": lambda: tf.Gemma3TextConfig(**GEMMA),
    "phi": lambda: tf.PhiConfig(**LLAMA),
    "gpt2": lambda: tf.GPT2Config(**GPT),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**SMALL, intermediate_size=48, max_position_embeddings=128),
    "gptj": lambda: tf.GPTJConfig(**GPT, rotary_dim=4),
    "opt": lambda: tf.OPTConfig(**SMALL, ffn_dim=48, max_position_embeddings=128, word_embed_proj_dim=32),
    "falcon": lambda: tf.FalconConfig(**FALCON, alibi=False),
    "falcon-new": lambda: tf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": lambda: tf.FalconConfig(**FALCON, alibi=True),
    "bloom": lambda: tf.BloomConfig(vocab_size=V, hidden_size=32, n_head=4, n_layer=3),
    "starcoder2-window": lambda: tf.Starcoder2Config(**LLAMA, sliding_window=6),
    "olmo": lambda: tf.OlmoConfig(**LLAMA),
    "olmo2": lambda: tf.Olmo2Config(**LLAMA),
}


def family(name: str, **options: object) -> tf.PreTrainedModel:
    """Build a model of this family: always the same weights, large enough that a wrong mask shows in the logits."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.initializer_range = 0.3
    return tf.AutoModelForCausalLM.from_config(config, **options).eval()
