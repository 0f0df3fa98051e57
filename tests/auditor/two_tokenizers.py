"""A tiny target and a tiny assistant with different tokenizers, for universal assisted generation."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.tiny import llama

SHARED = tuple(f"w{i}" for i in range(30))
"""Words of both vocabularies."""
PROMPTS = [[1 + (7 * i + j) % len(SHARED) for j in range(6)] for i in range(8)]


def word_level(*words: str) -> tf.PreTrainedTokenizerFast:
    """Build a tokenizer whose tokens are these words, after one for all others."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("[UNK]", *words))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@cache
def target_tokenizer() -> tf.PreTrainedTokenizerFast:
    return word_level(*SHARED)


@cache
def assistant_tokenizer() -> tf.PreTrainedTokenizerFast:
    """Return a tokenizer with the target's words, and ten that the target lacks between them."""
    return word_level(*(word for i, own in enumerate(SHARED) for word in ((f"only{i}", own) if i % 3 == 0 else (own,))))


def target() -> tf.LlamaForCausalLM:
    return llama(len(target_tokenizer()), max_length=512)


def assistant() -> tf.LlamaForCausalLM:
    return llama(len(assistant_tokenizer()), max_length=512)


def save(folder: Path) -> tuple[str, str]:
    """Save both models with their tokenizers, as the command loads them; return their folders."""
    for name, model, tokenizer in (
        ("target", target(), target_tokenizer()),
        ("assistant", assistant(), assistant_tokenizer()),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "assistant")


def sorted_by_id(get_vocab: Callable[[tf.PreTrainedTokenizerFast], dict[str, int]]) -> Callable[..., dict[str, int]]:
    """Return a repaired `get_vocab`: the same words, in the order of their ids."""
    return lambda tokenizer: dict(sorted(get_vocab(tokenizer).items(), key=lambda item: item[1]))
