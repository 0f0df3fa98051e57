"""Tiny random transformers models: real caches and masks, and a vocabulary small enough to enumerate every text."""

from functools import cache

import torch
import transformers as tf

V = 8
PROMPT = (0, 1, 2, 3, 0, 1, 2, 5, 0, 1)
"""A prompt that repeats itself, so that copying drafters find matches."""

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDE = {"initializer_range": 0.3}
"""Makes a distribution depend on the whole text: after two texts with the same ending they differ by TV 0.45."""
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
SPREAD = 1.5
"""Standard deviation of the logits: distributions are neither flat nor certain (entropy 1.45 of 2.08)."""


@cache
def llama(vocab_size: int = V, *, layers: int = 2, max_length: int = 64) -> tf.LlamaForCausalLM:
    """Make a target with fixed random weights. It has no end-of-text token."""
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": layers, "max_position_embeddings": max_length}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, **WIDE, **NO_END, **sizes)).eval()
        logits = model(torch.randint(vocab_size, (200, 8))).logits
        model.lm_head.weight *= SPREAD / logits.std()
    return model


@cache
def neighbour(vocab_size: int = V, *, noise: float = 0.6) -> tf.LlamaForCausalLM:
    """Make a drafter from the target with Gaussian noise in its head: often accepted, but not always.

    Its vocabulary may be smaller or larger than the target's.
    """
    model = llama.__wrapped__()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        head = model.lm_head.weight
        head += torch.randn_like(head) * noise * head.std()
    return model.eval()
