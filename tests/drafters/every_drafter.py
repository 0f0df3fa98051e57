"""A table of every drafter with every option, over one small vocabulary."""

from collections.abc import Callable
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from auditor.two_tokenizers import word_level
from draftproof.drafters.dflash import DFlashDrafter
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.interface import Drafter
from draftproof.drafters.model import ModelDrafter, early_exit
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.slem import SLEM
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.drafters.tli import TLI
from draftproof.models.head.attach_published import attach_dflash
from draftproof.models.head.dflash import DFlash, DFlashShape, FittedDFlash
from draftproof.models.head.dflash_file import DFlashDraft
from draftproof.models.head.layer import LayerShape
from draftproof.models.head.network import FittedHead, Head
from draftproof.models.head.rotary import Rotary
from draftproof.models.head.taps import shape_for
from draftproof.models.head.vocabulary import PublishedVocabulary
from draftproof.models.hf import HFModel
from draftproof.models.toy import Toy
from draftproof.models.vocabulary_overlap import VocabularyOverlap

V = 6
CORPUS = [[0, 1, 2, 3, 4, 5, 0, 1], [2, 4, 2, 4, 2]]


def toy(vocab_size: int = V, seed: int = 5) -> Toy:
    return Toy.random(vocab_size, order=2, seed=seed)


@cache
def net(max_length: int = 64, device: str = "cpu") -> LlamaForCausalLM:
    """Make a Llama of two layers with random weights; its logits are scaled up so that distributions differ."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(20)
    return model.to(device)


@cache
def tiny_llama(max_length: int = 64, device: str = "cpu") -> HFModel:
    return HFModel(net(max_length, device))


@cache
def random_head(size: int = V) -> FittedHead:
    return FittedHead.on(
        Head(shape_for(net())), torch.randperm(V, generator=torch.Generator().manual_seed(3)), net(), size=size
    )


@cache
def random_dflash(block: int = 4) -> FittedDFlash:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2
    )
    shape = DFlashShape(LayerShape.of(config), (1,), 16, block, mask_token=0, windows=(None, 3), causal=(False, True))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        network = DFlash(shape, Rotary(config)).eval()
    return attach_dflash(DFlashDraft(network, PublishedVocabulary(None, None, None)), net(), "random")


def two_vocabularies() -> VocabularyOverlap:
    """Match two word-level vocabularies of V tokens that share all but one, in another order."""
    own, other = word_level("a", "b", "c", "d", "e"), word_level("x", "e", "c", "a", "b")
    return VocabularyOverlap.of(own, other, vocab_size=V, draft_vocab_size=V)


CHAINS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NGram(),
    "ngram, fillers": lambda: NGram(3, fillers=2),
    "ngram, never stopping": lambda: NGram(stop_at_unknown=False),
    "prompt-lookup": lambda: PromptLookup(),
    "suffix": lambda: Suffix(),
    "suffix, corpus": lambda: Suffix(corpus=CORPUS),
    "model": lambda: ModelDrafter(toy()),
    "model, own temperature": lambda: ModelDrafter(toy(), temperature=0.5),
    "model, confidence": lambda: ModelDrafter(toy(), confidence=0.3),
    "model, larger vocabulary": lambda: ModelDrafter(toy(V + 2), vocab_size=V),
    "model, smaller vocabulary": lambda: ModelDrafter(toy(V - 2), vocab_size=V),
    "early exit": lambda: early_exit(tiny_llama(), 1),
    "TLI": lambda: TLI(toy(), two_vocabularies(), vocab_size=V),
    "SLEM": lambda: SLEM(toy(), two_vocabularies()),
    "head": lambda: HeadDrafter(random_head()),
    "head, confidence": lambda: HeadDrafter(random_head(), confidence=0.3),
    "head, smaller vocabulary": lambda: HeadDrafter(random_head(4)),
    "dflash": lambda: DFlashDrafter(random_dflash()),
    "dflash, confidence": lambda: DFlashDrafter(random_dflash(), confidence=0.3),
    "suffix or head": lambda: Switch(Suffix(), HeadDrafter(random_head(4)), enough=3),
}
TREES: dict[str, Callable[[], Drafter]] = {
    "ngram, tree": lambda: NGram(3, branches=3, least=0.01),
    "suffix, tree": lambda: Suffix(branches=2, least=0.05),
    "model, tree": lambda: ModelDrafter(toy(), branches=2),
    "model, tree, confidence": lambda: ModelDrafter(toy(), branches=3, confidence=0.3),
    "TLI, tree": lambda: TLI(toy(), two_vocabularies(), vocab_size=V, branches=2),
    "early exit, tree": lambda: early_exit(tiny_llama(), 1, branches=2),
    "head, tree": lambda: HeadDrafter(random_head(), branches=2),
    "dflash, tree": lambda: DFlashDrafter(random_dflash(6), branches=2),
    "suffix or head, tree": lambda: Switch(Suffix(branches=2), HeadDrafter(random_head(4), branches=2), enough=3),
}
KEEPING: dict[str, Callable[[], Drafter]] = {
    "ngram, kept": lambda: NGram(keep=True),
    "suffix, kept": lambda: Suffix(keep=True),
}
ALL = CHAINS | TREES | KEEPING
