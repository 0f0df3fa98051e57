"""Gemma 4's assistant in transformers 5.22, sampled: its drafts are argmaxes, judged as drawn from the softmax.

The audit finds it (transformers#47932). α = 1e-6, seeds fixed. benchmarks/audits holds the models and the repair.
"""

import sys
from pathlib import Path

import pytest
import transformers as tf

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks" / "audits"))

pytestmark = pytest.mark.skipif(not hasattr(tf, "Gemma4AssistantForCausalLM"), reason="transformers without Gemma 4")
FOUND_WITHIN = 600
"""Tokens within which the bias must be found: it took 280."""


def audited(**how) -> dp.Certificate:
    import tiny_models as tiny
    from transformers_paths import gemma4_decoder

    how = {"sampling": SamplingParams(), "drafter": tiny.gemma4_drafts(), "length": 8, "batch": 16, **how}
    with unchecked():
        return dp.audit(gemma4_decoder(), tiny.gemma4()[0], tiny.PROMPTS, **how)


@pytest.mark.statistical
def test_the_gemma_4_assistant_of_transformers_5_22_is_biased_when_it_samples():
    """Once transformers is repaired this fails: then docs/audits.md has to be written anew."""
    found = audited(max_tokens=FOUND_WITHIN)
    assert (found.verdict, found.exit_code) == ("biased", 1)
    assert found.coverage.rejected > 0


@pytest.mark.slow
@pytest.mark.statistical
def test_with_drafts_that_are_drawn_nothing_is_found_in_as_many_tokens():
    """The control: nothing is changed but how the draft tokens are picked."""
    from transformers_paths import drawn_gemma4_drafts

    with drawn_gemma4_drafts():
        assert audited(max_tokens=FOUND_WITHIN).verdict != "biased"
