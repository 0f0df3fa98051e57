"""A target small enough to be learnt in seconds, in memory or as a folder, and a clock that advances when read."""

import copy
from functools import cache
from pathlib import Path

import torch
import transformers as tf

from models.tiny_tokenizers import byte_level

SHARP = 3.0
"""Standard deviation of the logits: the target is predictable, but not trivially."""


class Ticks:
    """A clock that advances by one tick per read, so that a run does the same on every machine."""

    def __init__(self, tick: float) -> None:
        self._tick, self._now = tick, 0.0

    def __call__(self) -> float:
        self._now += self._tick
        return self._now


@cache
def tiny_llama() -> tf.LlamaForCausalLM:
    """Return a model whose next token depends on the last tokens only, mostly on the very last."""
    tokenizer = byte_level()
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        intermediate_size=48, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tf.LlamaForCausalLM(config).eval()
        model.model.embed_tokens.weight *= 5  # the layers add little to it
        logits = model(torch.randint(len(tokenizer), (16, 32))).logits
        model.lm_head.weight *= SHARP / logits.std()
        model.lm_head.weight[tokenizer.eos_token_id] *= 1.5  # answers end now and then
    return model


def save_tiny_llama(folder: Path) -> str:
    """Save the model without a chat template: one this small asks no questions, and all its text is for training."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = None
    tiny_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
