"""Tiny Llama models on four-bit weights, with sizes that the kernels serve."""

from functools import cache

import pytest
import torch
import transformers as tf

from draftproof.models.compiled_pass import compiled_refusal
from draftproof.models.cpu_support import int4_refusal
from draftproof.models.quantised import quantise

needs_int4 = pytest.mark.skipif(int4_refusal() is not None, reason=str(int4_refusal()))

needs_compiled = pytest.mark.skipif(compiled_refusal() is not None, reason=str(compiled_refusal()))

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # large, so that forgetting it shows
}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}


def float_llama(vocab_size=8, layers=2, seed=0):
    """Return a model with random weights whose logits have a standard deviation of 1.5."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        config = tf.LlamaConfig(
            **SIZES, **NO_END, vocab_size=vocab_size, num_hidden_layers=layers, initializer_range=0.15
        )
        model = tf.LlamaForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
        logits = model(torch.randint(vocab_size, (100, 8))).logits
        model.lm_head.weight *= 1.5 / logits.std()
    return model


@cache
def int4_llama(vocab_size=8, layers=2, seed=0):
    """Return such a model after its linear layers were quantised."""
    model = float_llama(vocab_size, layers, seed)
    quantise(model, "int4")
    return model
