"""A target small enough to be learnt in seconds, as a folder and in memory; and a clock that ticks when it is read."""

import copy
from functools import cache
from pathlib import Path

import torch
import transformers as tf

from models.tiny_tokenizers import byte_level

SHARP = 3.0
"""Standard deviation of the logits: a head has something to know, and can know it."""


class Ticks:
    """Every look at it costs the same: what a run does then depends on no machine."""

    def __init__(self, tick: float) -> None:
        self._tick, self._now = tick, 0.0

    def __call__(self) -> float:
        self._now += self._tick
        return self._now


@cache
def pupil() -> tf.LlamaForCausalLM:
    """What follows depends on the last tokens only, mostly on the very last."""
    tokenizer = byte_level()
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        intermediate_size=48, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tf.LlamaForCausalLM(config).eval()
        model.model.embed_tokens.weight *= 5  # the layers say little beside it
        logits = model(torch.randint(len(tokenizer), (16, 32))).logits
        model.lm_head.weight *= SHARP / logits.std()
        model.lm_head.weight[tokenizer.eos_token_id] *= 1.5  # answers end now and then
    return model


def save_pupil(folder: Path) -> str:
    """Without a chat template: a model this small asks no questions, and all it says is there to learn from."""
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = None
    pupil().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
