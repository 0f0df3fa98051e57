"""Every drafter under every rule gives exactly the target's distribution: three tokens jointly, by G-test.

False alarms: α = 1e-6 per test, seeds fixed. With 2000 texts (3000 for trees) over 64 cells a total variation of about
0.1 is detected; the controls are real mistakes of that size and must fail with as many texts. The suffix automaton is
slow here, with every call type-checked, and gets fewer texts: its tokens are chosen, like those of other drafters.
"""

from dataclasses import replace

import pytest
import torch

from drafters.toy_rounds import exact_distribution, p_value, row, speak
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import PAD, Draft
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import Suffix
from draftproof.models.toy import Toy

pytestmark = pytest.mark.statistical

ALPHA = 1e-6
V, LENGTH, SLOTS = 4, 3, 3
PROMPT = [0, 1, 2, 3, 0, 1, 2, 0, 1]
WARM = SamplingParams(temperature=0.8, top_k=3)
TARGET = Toy.random(V, order=2, seed=1)
NEAR = Toy(TARGET.table + torch.randn((V, V, V), generator=torch.Generator().manual_seed(2)))
SMALL = Toy(NEAR.table[: V - 1, : V - 1, : V - 1])
LARGE = Toy(torch.nn.functional.pad(NEAR.table, (0, 2, 0, 2, 0, 2), value=1.0))

CHAINS = {
    "ngram": (lambda: NGram(3), 2000),
    "ngram, fillers": (lambda: NGram(3, fillers=2, stop_at_unknown=False), 1000),
    "prompt-lookup": (lambda: PromptLookup(), 2000),
    "suffix": (lambda: Suffix(), 400),
    "model": (lambda: ModelDrafter(NEAR), 2000),
    "model, own temperature": (lambda: ModelDrafter(NEAR, temperature=0.5), 2000),
    "model, confidence": (lambda: ModelDrafter(NEAR, confidence=0.5), 2000),
    "model, smaller vocabulary": (lambda: ModelDrafter(SMALL, vocab_size=V), 2000),
    "model, larger vocabulary": (lambda: ModelDrafter(LARGE, vocab_size=V), 2000),
}
TREES = {
    "ngram": (lambda: NGram(3, branches=2, least=0.01), 2000),
    "ngram, fillers": (lambda: NGram(3, branches=3, least=0.01, fillers=3), 1000),
    "suffix": (lambda: Suffix(branches=2, least=0.05), 400),
    "model": (lambda: ModelDrafter(NEAR, branches=2), 3000),
    "model, three branches": (lambda: ModelDrafter(NEAR, branches=3), 3000),
    "model, confidence": (lambda: ModelDrafter(NEAR, branches=2, confidence=0.5), 3000),
    "model, a chain": (lambda: ModelDrafter(NEAR), 3000),
}


def p_of(drafter, rule: str, texts: int, sampling: SamplingParams = WARM, slots: int = SLOTS) -> float:
    texts_made = speak(
        TARGET, drafter, rule, [row(i, PROMPT, sampling) for i in range(texts)], slots=slots, length=LENGTH
    )
    return p_value(exact_distribution(TARGET, PROMPT, sampling, LENGTH), texts_made, V)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("make", "texts"), CHAINS.values(), ids=CHAINS.keys())
def test_chain_drafts_give_the_distribution_of_the_target(make, texts, rule):
    if rule == "block" and "Drafter" not in type(make()).__name__:
        texts //= 4  # nothing is drawn, so block verification falls back to token verification
    assert p_of(make(), rule, texts) > ALPHA


@pytest.mark.parametrize(("make", "texts"), TREES.values(), ids=TREES.keys())
def test_tree_drafts_give_the_distribution_of_the_target(make, texts):
    assert p_of(make(), "tree", texts, slots=5) > ALPHA


@pytest.mark.parametrize("rule", ["block", "tree"])
def test_penalties_count_what_was_drafted(rule):
    wary = SamplingParams(temperature=0.9, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    assert p_of(ModelDrafter(NEAR, branches=2 if rule == "tree" else 1), rule, 400, wary) > ALPHA


class Silent:
    def propose(self, contexts, k, rng: Philox) -> Draft:
        return Draft(torch.empty((len(contexts), 0), dtype=torch.long), torch.zeros(len(contexts), dtype=torch.long))


def test_plain_seeded_texts_have_the_distribution_too():
    assert p_of(Silent(), "coupled", 2000) > ALPHA


@pytest.mark.parametrize(("make", "texts"), CHAINS.values(), ids=CHAINS.keys())
def test_coupled_texts_are_the_plain_seeded_ones_with_every_drafter(make, texts):
    plain, drafted = (
        speak(TARGET, drafter, "coupled", [row(i, PROMPT, WARM) for i in range(300)], slots=SLOTS, length=LENGTH)
        for drafter in (Silent(), make())
    )
    assert torch.equal(plain, drafted)


class RawDistribution:
    """A control that draws with top-k and temperature, and declares the plain softmax."""

    def __init__(self, branches: int) -> None:
        self.inner = ModelDrafter(NEAR, branches=branches)

    def propose(self, contexts, k, rng: Philox) -> Draft:
        draft = self.inner.propose(contexts, k, rng)
        if draft.q is None:
            return draft
        return replace(draft, q=warp(draft.q.logits, [SamplingParams()] * len(contexts)))


class Dropping:
    """A control that drops the last token of a draft if it is unlikely."""

    def __init__(self, branches: int) -> None:
        self.inner = ModelDrafter(NEAR, branches=branches)

    def propose(self, contexts, k, rng: Philox) -> Draft:
        draft = self.inner.propose(contexts, k, rng)
        if draft.q is None or not draft.tokens.shape[1]:
            return draft
        rows, last = torch.arange(len(contexts)), (draft.lengths - 1).clamp_min(0)
        weak = draft.q.at(rows, last).log_prob(draft.tokens[rows, last]).exp() < 0.5
        if draft.drawn is not None:
            weak = weak & draft.drawn[rows, last]
        lengths = draft.lengths - (weak & (draft.lengths > 0)).long()
        gone = torch.arange(draft.tokens.shape[1]) >= lengths[:, None]
        return replace(draft, lengths=lengths, tokens=draft.tokens.masked_fill(gone, PAD))


@pytest.mark.parametrize("rule", ["token", "block", "tree"])
@pytest.mark.parametrize("control", [RawDistribution, Dropping])
def test_a_drafter_that_declares_a_wrong_distribution_is_caught(control, rule):
    branches, texts = (2, 3000) if rule == "tree" else (1, 2000)
    assert p_of(control(branches), rule, texts) < ALPHA
