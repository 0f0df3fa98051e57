"""Pairs of byte-level BPE tokenizers, trained here, that share about 20, 70 or 95 % of their tokens, and their models.

The small pairs have ten target tokens, so that every text can be enumerated; "é" is two bytes there, which are tokens
of their own and one together. The large pairs are trained on prompts and on text of several scripts.
"""

import json
from functools import cache
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import draftproof
from draftproof.models.vocabulary_overlap import VocabularyOverlap
from engine.tiny import llama
from models.tiny_tokenizers import CORPUS

SHARES = (0.2, 0.7, 0.95)
SMALL = ["ab abé bé aab ab b aé ab abé a"] * 3
SMALL_DRAFTS = {
    0.2: (["xa xy xya yx axy ya xa"] * 3, 8),
    0.7: (["ab éb xab ax abx é xb ab b"] * 3, 8),
    0.95: (["ab abé bé aab x b aé ab abéx a"] * 3, 12),
}
"""Corpus and vocabulary size of the draft tokenizers; with ten tokens, 0.9 is the closest to 0.95."""
NOISE = 0.6
"""Noise in the draft model's output rows, in their standard deviations: drafts are often accepted, but not always."""


def bpe(texts: list[str], size: int, alphabet: list[str] | None = None) -> tf.PreTrainedTokenizerFast:
    """Train a byte-level BPE; its alphabet is by default the bytes of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet or [], min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def small_pair(share: float) -> tuple[tf.PreTrainedTokenizerFast, tf.PreTrainedTokenizerFast]:
    return bpe(SMALL, 10), bpe(*SMALL_DRAFTS[share])


@cache
def large_pair(share: float) -> tuple[tf.PreTrainedTokenizerFast, tf.PreTrainedTokenizerFast]:
    """Train tokenizers on all prompts and on some: on fewer, or on their reverse, for a smaller share."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = prompts()
    drafts = {
        0.2: ([line[::-1] for line in lines], 290),
        0.7: (lines[:38] + CORPUS, 1200),
        0.95: (lines[:60] + CORPUS, 1200),
    }
    return bpe(lines + CORPUS, 1200, alphabet), bpe(*drafts[share], alphabet)


@cache
def prompts() -> list[str]:
    held_out = Path(draftproof.__file__).parent / "train" / "held_out.jsonl"
    return [json.loads(line)["prompt"] for line in held_out.read_text().splitlines()]


def overlap_of(tokenizer: tf.PreTrainedTokenizerFast, draft: tf.PreTrainedTokenizerFast) -> VocabularyOverlap:
    return VocabularyOverlap.of(tokenizer, draft, vocab_size=len(tokenizer), draft_vocab_size=len(draft))


def draft_model(target: tf.LlamaForCausalLM, overlap: VocabularyOverlap, size: int) -> tf.LlamaForCausalLM:
    """Make a draft model from the target: rows of shared tokens are the target's, with noise; others are new."""
    model = tf.LlamaForCausalLM(tf.LlamaConfig.from_dict(target.config.to_dict() | {"vocab_size": size})).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model.model.layers.load_state_dict(target.model.layers.state_dict())
        model.model.norm.load_state_dict(target.model.norm.state_dict())
        for mine, its in ((model.model.embed_tokens, target.model.embed_tokens), (model.lm_head, target.lm_head)):
            mine.weight.copy_(torch.randn_like(mine.weight) * its.weight.std())
            for own, partner in overlap.partner.items():
                mine.weight[partner] = its.weight[own]
        model.lm_head.weight += torch.randn_like(model.lm_head.weight) * NOISE * target.lm_head.weight.std()
    return model


@cache
def small_models(share: float) -> tuple[tf.LlamaForCausalLM, tf.LlamaForCausalLM]:
    tokenizer, draft = small_pair(share)
    target = llama(len(tokenizer))
    return target, draft_model(target, overlap_of(tokenizer, draft), len(draft))


@cache
def large_models(share: float) -> tuple[tf.LlamaForCausalLM, tf.LlamaForCausalLM]:
    tokenizer, draft = large_pair(share)
    target = llama(len(tokenizer), max_length=256)
    return target, draft_model(target, overlap_of(tokenizer, draft), len(draft))
