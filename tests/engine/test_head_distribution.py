"""With a head as drafter the text has exactly the target's distribution: joint distributions of three tokens, by G-test.

False alarms: α = 1e-6 a test, seeds fixed. With 2000 texts over 512 cells a total variation of about 0.12 is seen. The
controls are real mistakes of that kind and must fail with half as many texts; stale states and a missing closing token
are mistakes too, but cost acceptance only, which is shown as well. The head is fitted to the target for two seconds,
so that some of its guesses stand and some fall.
"""

from dataclasses import dataclass, replace

import pytest
import torch

import draftproof as dp
from draftproof.core.sampling import SamplingParams, warp
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.interface import Context, TargetOutputs
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from engine.many_texts import Talk, talk
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama
from engine.tiny_heads import on_target
from g_test import g_test

pytestmark = pytest.mark.statistical

ALPHA = 1e-6
TEXTS, LENGTH, REDUCED = 2000, 3, 6
FEW = 600
"""Where rows are worked on one by one (penalties, mixed samplings, an automaton each): a bias of 0.2 is seen."""
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


def said(drafter, rule: str, samplings, n: int = TEXTS, slots: int = 3) -> Talk:
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=slots, max_batch=500)
    return talk(engine, PROMPT, samplings, n, length=LENGTH, budget=LENGTH + 3)


def p_values(made: Talk, samplings) -> list[float]:
    """One for each sampling: its texts are every so many-th."""
    dists = [joint_distribution(llama(), PROMPT, sampling, LENGTH) for sampling in samplings]
    return [g_test(counts(made.texts[i :: len(dists)], V), dist) for i, dist in enumerate(dists)]


def head(rule: str, size: int = REDUCED) -> HeadDrafter:
    return HeadDrafter(on_target(size), branches=2 if rule == "tree" else 1)


@pytest.mark.parametrize(("rule", "sampling"), CASES.values(), ids=CASES.keys())
def test_a_head_leaves_the_distribution_as_it_is(rule, sampling):
    texts = FEW if sampling is WARY else TEXTS
    made = said(head(rule), rule, [sampling], texts, slots=5 if rule == "tree" else 3)
    assert made.drafting_mattered
    assert min(p_values(made, [sampling])) > ALPHA


def test_a_head_that_ends_drafts_behind_weak_tokens_does_too():
    made = said(HeadDrafter(on_target(REDUCED), confidence=0.4), "block", [WARM])
    assert made.drafting_mattered
    assert min(p_values(made, [WARM])) > ALPHA


@pytest.mark.parametrize("rule", ["block", "tree"])
def test_rows_of_all_kinds_in_one_batch_keep_their_distributions(rule):
    made = said(head(rule), rule, MIXED, FEW)
    assert min(p_values(made, MIXED)) > ALPHA


@pytest.mark.parametrize("rule", ["token", "block", "tree"])
def test_rows_that_copy_beside_rows_that_draw_keep_their_distributions(rule):
    """Copied and drawn rows come to lie in one batch: texts differ in how soon they repeat themselves."""
    watched = Watched(Switch(Suffix(branches=2 if rule == "tree" else 1), head(rule), enough=4))
    made = said(watched, rule, [WARM], FEW)
    assert watched.mixed > 0
    assert min(p_values(made, [WARM])) > ALPHA


class Watched:
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


# --------------------------------------------------------------------------------------------- controls: a wrong distribution


class RawDistribution(HeadDrafter):
    """Draws with temperature and filters, and declares the head's plain softmax."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        if draft.q is None:
            return draft
        return replace(draft, q=warp(draft.q.logits, [SamplingParams()] * len(contexts), vocab=draft.q.vocab))


class Unnormalised(HeadDrafter):
    """Declares probabilities normalised over the whole vocabulary, though it never says the rest of it."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        if draft.q is None:
            return draft
        outside = torch.full_like(draft.q.lse, 0.5).log()  # as much again lies outside
        return replace(draft, q=replace(draft.q, lse=draft.q.lse - outside))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("control", [RawDistribution, Unnormalised])
def test_a_head_that_lies_about_its_distribution_is_caught(control, rule):
    made = said(control(on_target(4)), rule, [COLD], TEXTS // 2)
    assert min(p_values(made, [COLD])) < ALPHA


def test_the_same_test_passes_the_head_itself():
    assert min(p_values(said(HeadDrafter(on_target(4)), "token", [COLD], TEXTS // 2), [COLD])) > ALPHA


# --------------------------------------------------------------------------- controls: the distribution is kept, at some cost


class Stale(HeadDrafter):
    """Never sees another state than the one it began with."""

    def propose(self, contexts, k, rng):
        for context in contexts:
            if (shown := context.target_outputs) is not None:
                context.target_outputs = TargetOutputs(
                    shown.stop, None, tuple(torch.zeros_like(states) for states in shown.hidden)
                )
        return super().propose(contexts, k, rng)


@dataclass(frozen=True)
class Before:
    """A context without its closing token."""

    context: Context

    def __getattr__(self, name):
        return getattr(self.context, name)

    @property
    def tokens(self):
        return self.context.tokens[:-1]


class WithoutClosing(HeadDrafter):
    """Has no entry for the closing token, and drafts from the one before."""

    def propose(self, contexts, k, rng):
        return super().propose([Before(context) for context in contexts], k, rng)


@pytest.mark.parametrize("make", [Stale, WithoutClosing])
def test_a_head_that_misreads_keeps_the_distribution_and_loses_speed(make):
    right, wrong = (said(each(on_target()), "block", [WARM], TEXTS // 2) for each in (HeadDrafter, make))
    assert min(p_values(wrong, [WARM])) > ALPHA
    chance = 5 * (0.25 / wrong.drafted + 0.25 / right.drafted) ** 0.5  # five deviations: α < 1e-6
    assert wrong.accepted / wrong.drafted < right.accepted / right.drafted - chance
