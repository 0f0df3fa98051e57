"""On four-bit weights, texts have the quantised model's distribution: joint of three tokens by G-test, and an audit.

False alarms: α = 1e-6 per test, seeds fixed. 2000 texts over 512 cells find a total variation of about 0.12. The
control compares the same texts with a model of other weights, and must fail.
"""

import pytest

import draftproof as dp
from draftproof.auditor.api import audit
from draftproof.core.sampling import SamplingParams
from draftproof.models.tokenizer import encode
from engine.many_texts import sample_texts
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V
from g_test import g_test
from models.int4_models import float_llama, int4_llama, needs_int4

pytestmark = [pytest.mark.statistical, needs_int4]

ALPHA = 1e-6
TEXTS, LENGTH = 2000, 3
WARM = SamplingParams(temperature=0.7)


def engine(rule):
    return dp.load(int4_llama(V), "early-exit:1", rule=rule, num_draft_tokens=3, max_batch=500)


@pytest.fixture(scope="module")
def drafted():
    return sample_texts(engine("block"), PROMPT, [WARM], TEXTS, length=LENGTH, budget=LENGTH + 3)


def test_the_joint_distribution_of_three_tokens_is_the_quantised_models(drafted):
    assert drafted.drafting_mattered
    assert g_test(counts(drafted.texts, V), joint_distribution(int4_llama(V), PROMPT, WARM, LENGTH)) > ALPHA


def test_another_models_distribution_is_told_apart(drafted):
    other = float_llama(V, seed=1)
    assert g_test(counts(drafted.texts, V), joint_distribution(other, PROMPT, WARM, LENGTH)) < ALPHA


@pytest.mark.slow
def test_an_audit_finds_no_bias():
    found = audit(
        engine("block"), int4_llama(V), [list(PROMPT)], sampling=SamplingParams(), bias=0.3, length=8, batch=50
    )
    assert found.verdict == "no bias found"


def audit_of_bundled(**options):
    """Audit the bundled model and its head; a mixture of 0.3 with the head's distribution would be found."""
    four = dp.load(weights="int4", num_draft_tokens=3, max_batch=4, **options)
    prompts = [encode(text, four.tokenizer) for text in ("Why is the sky blue?", "Write a haiku.", "1, 2, 3,")]
    sampling, asked = SamplingParams(), {"bias": 0.3, "length": 48, "batch": 4, "alpha": ALPHA, "max_tokens": 4000}
    return audit(four, four.hf, prompts, sampling=sampling, drafter="head", **asked)


@pytest.mark.slow
def test_an_audit_of_the_bundled_model_finds_no_bias():
    assert audit_of_bundled().verdict == "no bias found"


@pytest.mark.slow
def test_an_audit_of_the_bundled_model_finds_a_skipped_residual():
    found = audit_of_bundled(rule=dp.lossy.unadjusted)
    assert found.verdict == "biased"


def test_seeded_texts_are_the_same_alone_and_among_others():
    prompts = [list(PROMPT), [3, 4, 3], [6, 1, 2, 2, 5], [7], [1, 2, 0, 1]]
    samplings = [SamplingParams(temperature=0.9, seed=i) for i in range(5)]
    together = engine("block").generate(prompts, samplings, max_tokens=20)
    for prompt, sampling, output in zip(prompts, samplings, together, strict=True):
        [alone] = engine("block").generate([prompt], [sampling], max_tokens=20)
        assert alone.tokens == output.tokens
