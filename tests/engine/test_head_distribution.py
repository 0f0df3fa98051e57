"""With a head as drafter, texts have exactly the target's distribution: joint of three tokens, by G-test.

False alarms: α = 1e-6 per test, seeds fixed. 2000 texts over 512 cells find a total variation of about 0.12. The
controls are real bugs and must fail with half as many texts. Stale states and a missing last token are bugs too, but
only cost acceptance, which is shown as well. The head is trained on the target for two seconds, so that some of its
tokens are accepted and some rejected.
"""

from dataclasses import dataclass, replace

import pytest
import torch

import draftproof as dp
from budget import budgeted
from draftproof.core.sampling import SamplingParams, warp
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.interface import Context, TargetOutputs
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from engine.many_texts import SampledTexts, sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama
from engine.tiny_heads import on_target
from g_test import g_test

pytestmark = pytest.mark.statistical

ALPHA = 1e-6
TEXTS, LENGTH, REDUCED = 2000, 3, 6
FEWER_TEXTS = 600
"""Texts where rows are processed one by one (penalties, mixed samplings, suffix automata); they find a TV of 0.2."""
WARM = SamplingParams(temperature=0.7)
CUT = SamplingParams(temperature=1.2, top_k=6, top_p=0.9)
WARY = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={2: 1.5, 4: -0.5})
COLD = SamplingParams(temperature=0.5, top_k=3)
MIXED = [SamplingParams(), CUT, WARY, SamplingParams(temperature=0)]

CASES = {
    "token, warm": ("token", WARM),
    "token, cut": ("token", CUT),
    "block, warm": ("block", WARM),
    "block, cut": ("block", CUT),
    "block, wary": ("block", WARY),
    "tree, warm": ("tree", WARM),
    "tree, cut": ("tree", CUT),
    "tree, wary": ("tree", WARY),
}


def sampled(drafter, rule: str, samplings, n: int = TEXTS, slots: int = 3) -> SampledTexts:
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=slots, max_batch=500)
    return sample_texts(engine, PROMPT, samplings, n, length=LENGTH, budget=LENGTH + 3)


def p_values(made: SampledTexts, samplings) -> list[float]:
    """Return one p-value per sampling; its texts are every len(samplings)-th."""
    dists = [joint_distribution(llama(), PROMPT, sampling, LENGTH) for sampling in samplings]
    return [g_test(counts(made.texts[i :: len(dists)], V), dist) for i, dist in enumerate(dists)]


def head(rule: str, size: int = REDUCED) -> HeadDrafter:
    return HeadDrafter(on_target(size), branches=2 if rule == "tree" else 1)


@pytest.mark.parametrize(
    ("rule", "sampling"), budgeted(list(CASES.values()), ["token, cut", "tree, warm"], list(CASES))
)
def test_a_head_keeps_the_targets_distribution(rule, sampling):
    texts = FEWER_TEXTS if sampling is WARY else TEXTS
    made = sampled(head(rule), rule, [sampling], texts, slots=5 if rule == "tree" else 3)
    assert made.drafting_mattered
    assert min(p_values(made, [sampling])) > ALPHA


def test_a_head_that_ends_drafts_after_weak_tokens_keeps_it_too():
    made = sampled(HeadDrafter(on_target(REDUCED), confidence=0.4), "block", [WARM])
    assert made.drafting_mattered
    assert min(p_values(made, [WARM])) > ALPHA


@pytest.mark.parametrize("rule", ["block", "tree"])
def test_greedy_texts_of_confident_heads_are_plain_ones(rule):
    prompts = [list(PROMPT), [3, 4, 3, 4, 3], [6, 1], [1, 2, 0, 1, 2, 0, 1, 2]]
    drafter = HeadDrafter(on_target(REDUCED), confidence="auto", branches=2 if rule == "tree" else 1)
    plain, drafted = (
        dp.load(llama(), each, rule=rule, num_draft_tokens=6).generate(prompts, temperature=0, max_tokens=20)
        for each in (None, drafter)
    )
    assert [output.tokens for output in plain] == [output.tokens for output in drafted]
    assert sum(output.stats.accepted for output in drafted) > 0
    assert sum(output.stats.drafted for output in drafted) < 6 * sum(output.stats.rounds for output in drafted)


@pytest.mark.parametrize("rule", budgeted(["block", "tree"], ["tree"]))
def test_rows_of_all_kinds_in_one_batch_keep_their_distributions(rule):
    made = sampled(head(rule), rule, MIXED, FEWER_TEXTS)
    assert min(p_values(made, MIXED)) > ALPHA


@pytest.mark.parametrize("rule", budgeted(["token", "block", "tree"], ["block"]))
def test_rows_that_copy_beside_rows_that_draw_keep_their_distributions(rule):
    """One batch holds copied and drawn rows: texts differ in how soon they repeat themselves."""
    watched = MixedDraftCounter(Switch(Suffix(branches=2 if rule == "tree" else 1), head(rule), enough=4))
    made = sampled(watched, rule, [WARM], FEWER_TEXTS)
    assert watched.mixed > 0
    assert min(p_values(made, [WARM])) > ALPHA


class MixedDraftCounter:
    """Counts the drafts in which some rows are chosen and some drawn."""

    def __init__(self, inner: Switch) -> None:
        self.inner, self.features, self.mixed = inner, inner.features, 0

    def propose(self, contexts, k, rng):
        draft = self.inner.propose(contexts, k, rng)
        if draft.drawn is not None:
            rows = draft.drawn[draft.lengths > 0].any(1)
            self.mixed += bool(rows.any()) and not bool(rows.all())
        return draft


@pytest.mark.parametrize("size", [REDUCED, V])
def test_coupled_texts_are_the_plain_seeded_ones(size):
    prompts = [list(PROMPT), [3, 4, 3, 4, 3], [6], [1, 2, 0, 1, 2, 0, 1, 2]]
    samplings = [replace(kind, seed=70 + i) for i, kind in enumerate(MIXED)]
    plain, *drafted = (
        dp.load(llama(), drafter, rule="coupled", num_draft_tokens=4, max_batch=3).generate(
            prompts, samplings, max_tokens=24
        )
        for drafter in (None, HeadDrafter(on_target(size)), Switch(Suffix(), HeadDrafter(on_target(size)), enough=3))
    )
    for outputs in drafted:
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
        assert sum(output.stats.accepted for output in outputs) > 0


# ------------------------------------------------------------------------------------ controls: a wrong distribution


class RawDistribution(HeadDrafter):
    """Draws with temperature and filters, and declares the head's plain softmax."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        if draft.q is None:
            return draft
        return replace(draft, q=warp(draft.q.logits, [SamplingParams()] * len(contexts), vocab=draft.q.vocab))


class Unnormalised(HeadDrafter):
    """Declares probabilities normalised over the whole vocabulary, though it only draws from a part of it."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        if draft.q is None:
            return draft
        outside = torch.full_like(draft.q.lse, 0.5).log()  # as if as much mass lay outside
        return replace(draft, q=replace(draft.q, lse=draft.q.lse - outside))


@pytest.mark.parametrize("rule", budgeted(["token", "block"], ["block"]))
@pytest.mark.parametrize(
    "control", budgeted([RawDistribution, Unnormalised], ["RawDistribution"], ["RawDistribution", "Unnormalised"])
)
def test_a_head_that_lies_about_its_distribution_is_caught(control, rule):
    made = sampled(control(on_target(4)), rule, [COLD], TEXTS // 2)
    assert min(p_values(made, [COLD])) < ALPHA


def test_the_same_test_passes_the_head_itself():
    assert min(p_values(sampled(HeadDrafter(on_target(4)), "token", [COLD], TEXTS // 2), [COLD])) > ALPHA


# ------------------------------------------------------------------- controls: the distribution is kept, at some cost


class Stale(HeadDrafter):
    """Drafts from zeros instead of the target's states."""

    def propose(self, contexts, k, rng):
        self._blank(contexts)
        return super().propose(contexts, k, rng)

    def follow(self, context, length):
        self._blank([context])
        super().follow(context, length)

    def _blank(self, contexts):
        for context in contexts:
            if (shown := context.target_outputs) is not None:
                context.target_outputs = TargetOutputs(
                    shown.stop, None, tuple(torch.zeros_like(states) for states in shown.hidden)
                )


@dataclass(frozen=True)
class Before:
    """A context without its last token."""

    context: Context

    def __getattr__(self, name):
        return getattr(self.context, name)

    @property
    def tokens(self):
        return self.context.tokens[:-1]


class WithoutLast(HeadDrafter):
    """Ignores the context's last token, and drafts from the one before."""

    def propose(self, contexts, k, rng):
        return super().propose([Before(context) for context in contexts], k, rng)


@pytest.mark.parametrize("make", budgeted([Stale, WithoutLast], ["Stale"], ["Stale", "WithoutLast"]))
def test_a_head_that_misreads_keeps_the_distribution_and_loses_speed(make):
    right, wrong = (sampled(each(on_target()), "block", [WARM], TEXTS // 2) for each in (HeadDrafter, make))
    assert min(p_values(wrong, [WARM])) > ALPHA
    chance = 5 * (0.25 / wrong.drafted + 0.25 / right.drafted) ** 0.5  # five deviations: α < 1e-6
    assert wrong.accepted / wrong.drafted < right.accepted / right.drafted - chance
