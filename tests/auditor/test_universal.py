"""transformers' universal assisted generation, sampled: in 5.22 it is biased, and the audit finds it.

The assistant's words that the target lacks are cut out of its output layer. The drafts' logits follow the order of
`get_vocab()`, which a fast tokenizer returns in no order, and are declared in the order of ids: q is another
distribution than the one that was drawn from. Audits at α = 1e-6, seeds of the texts fixed; the order is as it comes.
"""

import pytest
import torch
import transformers as tf

import draftproof as dp
from auditor.two_tokenizers import (
    PROMPTS,
    SHARED,
    assistant,
    assistant_tokenizer,
    sorted_by_id,
    target,
    target_tokenizer,
    word_level,
)
from draftproof.auditor.decoders import maker
from draftproof.auditor.drafter import TranslatedReference, shared_words
from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.tli import TLI
from draftproof.models.hf import HFModel
from draftproof.models.vocabulary_overlap import VocabularyOverlap
from engine.many_texts import unchecked
from models.tiny_tokenizers import byte_fallback, byte_level

V = len(SHARED) + 1
TOKENIZERS = target_tokenizer(), assistant_tokenizer()
FOUND_WITHIN = 2_000
"""Tokens within which the bias must be found: in 40 audits with 40 orders of the vocabulary it took 29 to 203."""


def universal():
    return maker("transformers_universal")(target(), assistant(), *TOKENIZERS)


def audited(drafter, **how) -> dp.Certificate:
    how = {"sampling": SamplingParams(), "length": 16, "batch": 8, "drafter": drafter, **how}
    with unchecked():
        return dp.audit(universal(), target(), PROMPTS, **how)


@pytest.mark.statistical
def test_universal_assisted_generation_of_transformers_5_22_is_biased():
    """Once transformers is repaired this fails: then docs/reading-a-certificate.md has to be written anew."""
    found = audited(TranslatedReference(assistant(), *TOKENIZERS, V), max_tokens=FOUND_WITHIN)
    assert (found.verdict, found.exit_code) == ("biased", 1)
    assert found.found_at <= FOUND_WITHIN
    assert found.coverage.source == "trace"
    assert found.coverage.rejected > 0
    assert found.tested["decoder"] == "transformers, universal assisted"
    assert found.tested["drafter model"] == "LlamaForCausalLM"


@pytest.mark.statistical
def test_with_its_vocabulary_sorted_by_id_it_is_cleared(monkeypatch):
    """The control: nothing but the order is changed. A mixture of 0.2 with the drafts would have been found."""
    monkeypatch.setattr(tf.PreTrainedTokenizerFast, "get_vocab", sorted_by_id(tf.PreTrainedTokenizerFast.get_vocab))
    found = audited(TranslatedReference(assistant(), *TOKENIZERS, V), bias=0.2, max_tokens=FOUND_WITHIN)
    assert found.verdict == "no bias found"
    assert found.smallest_bias <= 0.2


@pytest.mark.statistical
def test_our_own_drafts_over_two_vocabularies_are_cleared_by_the_same_audit():
    """TLI has 30 of the target's 31 tokens here. A mixture of 0.2 with the drafts would have been found."""
    overlap = VocabularyOverlap.of(*TOKENIZERS, vocab_size=V, draft_vocab_size=len(TOKENIZERS[1]))
    drafter = TLI(HFModel(assistant(), drafter=True), overlap, vocab_size=V)
    how = {"sampling": SamplingParams(), "length": 16, "batch": 8, "bias": 0.2, "max_tokens": FOUND_WITHIN}
    with unchecked():
        engine = dp.load(target(), drafter, num_draft_tokens=5)
        found = dp.audit(engine, target(), PROMPTS, drafter=TranslatedReference(assistant(), *TOKENIZERS, V), **how)
    assert found.verdict == "no bias found"
    assert found.coverage.rejected > 0
    assert found.smallest_bias <= 0.2


class Slipping:
    """A decoder that draws a share of the tokens from the assistant; shows that the bets on its drafts have power."""

    def __init__(self, drafts: TranslatedReference, share: float):
        self.drafts, self.share = drafts, share

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        numbers = torch.Generator().manual_seed(seeds[0])
        rows = [list(prompt) for prompt in prompts]
        for _ in range(max_tokens):
            p = target()(torch.tensor(rows)).logits[:, -1].softmax(-1)
            q = torch.stack([self.drafts.probs(row, [0], sampling)[-1] for row in rows]).float()
            slip = torch.rand(len(rows), 1, generator=numbers) < self.share
            for row, token in zip(
                rows, torch.where(slip, q, p).multinomial(1, generator=numbers).tolist(), strict=True
            ):
                row += token
        return [Decoded(tuple(row[len(prompt) :])) for row, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.statistical
def test_a_mixture_with_the_assistants_distribution_is_found():
    """The other control: a share of 0.4, twice what clears the repaired decoder, in as many tokens as cleared it."""
    drafts = TranslatedReference(assistant(), *TOKENIZERS, V)
    how = {"sampling": SamplingParams(), "length": 16, "batch": 8, "drafter": drafts, "max_tokens": 640}
    with unchecked(), torch.inference_mode():
        found = dp.audit(Slipping(drafts, 0.4), target(), PROMPTS, **how)
    assert found.verdict == "biased"
    assert found.found_by.startswith("toward the drafter's")


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_its_rounds_add_up_and_neither_models_nor_random_numbers_change(temperature):
    weights, before = assistant().lm_head.weight.clone(), torch.random.get_rng_state()
    sampling = SamplingParams(temperature=temperature, top_k=20)
    one, other = (universal().decode(PROMPTS[:4], sampling, max_tokens=12, seeds=range(4)) for _ in range(2))
    for sample in one:
        assert len(sample.tokens) == 12 == sum(1 + round_.accepted for round_ in sample.rounds)
        assert all(0 <= round_.accepted <= round_.drafted for round_ in sample.rounds)
    assert any(round_.drafted for sample in one for round_ in sample.rounds)
    assert len(other) == 4  # the assistant can be used again: generate has cut down a copy
    assert torch.equal(assistant().lm_head.weight, weights)
    assert isinstance(assistant().get_input_embeddings(), torch.nn.Embedding)
    assert torch.equal(before, torch.random.get_rng_state())


def test_greedy_universal_assisted_generation_is_compared_and_not_called_biased():
    found = audited(None, sampling=SamplingParams(temperature=0), max_tokens=100)
    assert found.method == "equality with the likeliest token"
    assert found.verdict != "biased"


def test_an_assistant_of_the_same_size_belongs_to_another_decoder():
    with pytest.raises(ValueError, match=r"both have a vocabulary of 31: .*audit transformers_assisted"):
        maker("transformers_universal")(target(), target(), *TOKENIZERS)


def test_what_transformers_cannot_do_is_explained():
    """In 5.22 sampling fails if the target has all words of the assistant."""
    fewer = word_level(*SHARED[:20])
    decoder = maker("transformers_universal")(target(), assistant(), target_tokenizer(), fewer)
    with pytest.raises(RuntimeError, match="if the target has every word of the assistant"):
        decoder.decode(PROMPTS[:1], SamplingParams(), max_tokens=8, seeds=[0])


class TestTranslatedReference:
    def test_it_is_the_assistants_distribution_over_the_shared_words_at_every_position(self):
        own, other = TOKENIZERS
        sampling = SamplingParams(temperature=0.8)
        found = TranslatedReference(assistant(), own, other, V).probs([1, 2, 3], [4, 5, 6], sampling)
        ids = {own.convert_tokens_to_ids(word): other.convert_tokens_to_ids(word) for word in ("[UNK]", *SHARED)}
        for i, row in enumerate(found):
            words = own.convert_ids_to_tokens([1, 2, 3, 4, 5, 6][: 3 + i])
            logits = assistant()(torch.tensor([other.convert_tokens_to_ids(words)])).logits[0, -1].double()
            wanted = (logits[[ids[j] for j in range(V)]] / 0.8).softmax(-1)
            assert torch.allclose(row, wanted, atol=1e-5)

    def test_words_are_shared_if_only_the_sign_of_a_space_differs(self):
        one, other = byte_fallback(), byte_level()
        shared = shared_words(one, other)
        names = {one.convert_ids_to_tokens(a): other.convert_ids_to_tokens(b) for a, b in shared.items()}
        assert names["▁the"] == "Ġthe"
        assert names["a"] == "a"
        assert all(a.replace("▁", "Ġ") == b for a, b in names.items())

    def test_without_a_word_in_common_it_is_refused(self):
        with pytest.raises(ValueError, match="no word in common"):
            TranslatedReference(assistant(), target_tokenizer(), byte_level(), V)
