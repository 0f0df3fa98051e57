"""Constrained decoding: the mask at every scored position is that of the text before it, draft included.

Texts are compared with full forward passes of every prefix under the same masks, by G-test: 3,000 texts of three
tokens, at most 125 different ones (λ = 118), find a total variation of 0.1. α = 1e-6 per test, seeds fixed. The
control, a grammar that does not see the draft, fails with as many.
"""

from itertools import product

import pytest
import torch

import draftproof as dp
from budget import budgeted
from draftproof.core.sampling import SamplingParams
from draftproof.engine import grammar
from draftproof.engine.engine import Engine
from engine.many_texts import sample_texts, unchecked
from engine.plain_distribution import counts, joint_distribution, next_distributions
from engine.scripted import ScriptedDrafter, cycle
from engine.tiny import PROMPT, V, llama, neighbour
from g_test import g_test

ALPHA = 1e-6
WARM = SamplingParams(temperature=1.2, top_p=0.97)


def thirds(output):
    """Allow two thirds of the tokens; which ones depends on the whole output."""
    return (torch.arange(V) + sum((i + 1) * token for i, token in enumerate(output))) % 3 != 0


def p_value(drafter, rule: str) -> float:
    slots = 4 if rule == "tree" else 3
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=slots, max_batch=500)
    made = sample_texts(engine, PROMPT, [WARM], 3000, length=3, budget=4, allowed=thirds)
    assert made.drafting_mattered
    return g_test(counts(made.texts, V), joint_distribution(llama(), PROMPT, WARM, 3, thirds))


@pytest.mark.statistical
@pytest.mark.parametrize("rule", budgeted(["token", "block", "coupled", "tree"], ["block", "tree"]))
def test_texts_have_the_distribution_of_plain_decoding_with_the_same_masks(rule):
    assert p_value(neighbour(), rule) > ALPHA


@pytest.mark.statistical
def test_a_copying_drafter_changes_nothing():
    assert p_value("ngram", "block") > ALPHA


@pytest.mark.statistical
def test_a_grammar_that_does_not_see_the_draft_is_caught(monkeypatch):
    def blind(allowed, session, tokens, parents):
        allowed[:] = session.request.allowed(session.output)

    monkeypatch.setattr(grammar, "_fill", blind)
    assert p_value(neighbour(), "block") < ALPHA


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_grammar_is_only_asked_about_texts_that_it_allows(drafter):
    """Whatever is drafted: a real grammar has no mask for other texts."""
    asked = []

    def allowed(output):
        asked.append(list(output))
        return thirds(output)

    engine = dp.load(llama(), neighbour() if drafter == "model" else drafter, num_draft_tokens=4)
    output = engine.generate(list(PROMPT), allowed=allowed, max_tokens=30, seed=3)
    assert output.stats.drafted > output.stats.accepted
    for text in asked:
        assert all(thirds(text[:i])[token] for i, token in enumerate(text))


def test_a_grammar_that_allows_nothing_fails_its_request():
    [output] = dp.load(llama(), "ngram").generate([[1]], allowed=lambda output: torch.zeros(V, dtype=torch.bool))
    assert output.finish_reason == "error"
    assert "nothing is allowed there" in output.error


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "tree"])
def test_a_drafted_end_token_after_which_nothing_is_allowed_is_an_ordinary_end(rule):
    def until_three(output):
        return torch.full((8,), 3 not in output)

    engine = Engine(cycle(1, 2, 3), None, ScriptedDrafter([1, 2, 3] * 9), rule=rule, num_draft_tokens=5, eos={3})
    [output] = engine.generate([[1]], allowed=until_three, max_tokens=9)
    assert (output.tokens, output.finish_reason, output.error) == ([2, 3], "stop", None)


def nothing_after_five(output):
    return torch.full((V,), 5 not in output)


@pytest.mark.statistical
@pytest.mark.parametrize("rule", budgeted(["token", "block", "coupled", "tree"], ["block"]))
def test_a_dead_end_fails_just_those_requests_that_get_there(rule):
    """3,000 texts of three tokens, those that failed after a 5 included, find a TV of 0.14. A draft that merely leads
    to a 5 changes nothing."""
    engine = dp.load(llama(), neighbour(), rule=rule, num_draft_tokens=4, max_batch=500)
    wanted = [SamplingParams(seed=i) for i in range(3000)]
    with unchecked():
        outputs = engine.generate([list(PROMPT)] * 3000, wanted, max_tokens=3, allowed=nothing_after_five)
    assert {output.finish_reason for output in outputs} == {"length", "error"}
    texts = torch.tensor([(output.tokens + [DEAD] * 3)[:3] for output in outputs])
    assert g_test(counts(texts, V + 1), dying_distribution()) > ALPHA


DEAD = V


def dying_distribution():
    """Return the joint distribution of three tokens, with one extra token that alone can follow a 5 and itself."""
    dist = torch.ones((), dtype=torch.float64)
    for n in range(3):
        rows = []
        for prefix in product(range(V + 1), repeat=n):
            dead = torch.zeros(V + 1, dtype=torch.float64)
            dead[DEAD] = 1
            alive = {5, DEAD}.isdisjoint(prefix)
            if not alive:
                rows.append(dead)
                continue
            [here] = next_distributions(llama(), [[*PROMPT, *prefix]], SamplingParams(), len(PROMPT))
            rows.append(torch.nn.functional.pad(here, (0, 1)))
        dist = (dist.flatten()[:, None] * torch.stack(rows)).flatten()
    return dist


@pytest.mark.parametrize("mask", [torch.ones(V), torch.ones(V + 1, dtype=torch.bool)])
def test_an_answer_that_is_not_a_mask_is_refused(mask):
    with pytest.raises(RuntimeError, match=r"grammar failed: ValueError: allowed\(prefix\) must return a boolean mask"):
        dp.load(llama(), "ngram").generate([1], allowed=lambda output: mask)


def test_greedy_takes_the_best_of_what_is_allowed():
    """The target emits 1 2 3 1 2 3 … where it may; every third token must be a 7."""

    def sevens(output):
        mask = torch.ones(8, dtype=torch.bool)
        return mask if len(output) % 3 != 2 else torch.arange(8) == 7

    engine = Engine(cycle(1, 2, 3), None, ScriptedDrafter([1, 2, 3] * 9), num_draft_tokens=4)
    made = engine.generate([1], temperature=0, allowed=sevens, max_tokens=5)
    assert made.tokens == [2, 3, 7, 0, 0]
