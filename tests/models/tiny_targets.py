"""Tiny random targets of given sizes."""

from functools import cache

import torch
import transformers as tf


@cache
def tiny_target(vocab_size: int, hidden: int, layers: int) -> tf.LlamaForCausalLM:
    config = tf.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tf.LlamaForCausalLM(config).eval()
