"""Controls for test_exactness.py: engines with real bugs fail its test with as many texts or fewer."""

from dataclasses import replace

import pytest

import draftproof as dp
from draftproof.core import sampling as core_sampling
from draftproof.core.sampling import SamplingParams
from draftproof.core.sampling import warp as right_warp
from draftproof.models.rows import PooledRows
from engine.many_texts import sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama, neighbour
from g_test import g_test

pytestmark = pytest.mark.statistical

ALPHA = 1e-6
PENALTY = SamplingParams(frequency_penalty=1.2)
MIN_P = SamplingParams(min_p=0.2)
PLAIN = SamplingParams()
right_keep = PooledRows.keep


def p_value(sampling: SamplingParams, n: int, drafter: object = None) -> float:
    engine = dp.load(llama(), drafter or neighbour(), rule="block", num_draft_tokens=3, max_batch=500)
    made = sample_texts(engine, PROMPT, [sampling], n, length=3, budget=4)
    assert made.drafting_mattered
    return g_test(counts(made.texts, V), joint_distribution(llama(), PROMPT, sampling, 3))


def stale_penalties(logits, samplings, history=None, draft=None, allowed=None, vocab=None):
    """Penalties count what was emitted, and not the drafted tokens before a position (vLLM#18902)."""
    return right_warp(logits, samplings, history, None, allowed, vocab)


def min_p_dropped(logits, samplings, history=None, draft=None, allowed=None, vocab=None):
    """min-p is not applied to positions that verify a draft (vLLM#42802)."""
    if draft is not None and draft.tokens.shape[1]:
        samplings = [replace(sampling, min_p=0.0) for sampling in samplings]
    return right_warp(logits, samplings, history, draft, allowed, vocab)


def kept_one_short(rows, names, counts, path=None):
    """The last kept token's K/V is missing from the cache (vLLM#9730)."""
    right_keep(rows, names, [count - 1 for count in counts], path)


def kept_too_much(rows, names, counts, path=None):
    """A rejected token stays in the cache."""
    right_keep(rows, names, [count + 1 for count in counts], path)


@pytest.mark.parametrize(("wrong", "sampling", "n"), [(stale_penalties, PENALTY, 3000), (min_p_dropped, MIN_P, 3000)])
def test_a_wrong_warp_is_caught(wrong, sampling, n, monkeypatch):
    monkeypatch.setattr(core_sampling, "warp", wrong)  # the drafter calls it without a draft, which stays right
    assert p_value(sampling, n) < ALPHA


@pytest.mark.parametrize("wrong", [kept_one_short, kept_too_much])
def test_a_wrong_rollback_is_caught(wrong, monkeypatch):
    monkeypatch.setattr(PooledRows, "keep", wrong)
    assert p_value(PLAIN, 3000, "ngram") < ALPHA  # a drafter without a cache of its own


def test_the_same_test_passes_the_right_engine():
    assert p_value(MIN_P, 3000) > ALPHA
    assert p_value(PLAIN, 3000, "ngram") > ALPHA
