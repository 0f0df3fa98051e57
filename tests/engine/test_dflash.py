"""DFlash drafters in the engine: the right layers, states that survive rejections, the target's texts.

As in test_eagle3.py, wrong wiring shows with a drafter that makes no mistakes. The joint distribution of two tokens is
tested by G-test: α = 1e-6, fixed seed; 2000 texts over 576 cells find a total variation of about 0.12, and the control
fails with as many.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch

import draftproof as dp
from budget import budgeted
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.dflash import DFlashDrafter
from draftproof.models.head.attach_published import fitted_dflash
from engine.many_texts import sample_texts
from engine.perfect_drafters import DOWN, TAPS, UP, WrongAtEveryDepth, acceptance, continued, dflash_folder, target
from engine.plain_distribution import counts, joint_distribution
from g_test import g_test
from models.numbered_weights import VOCABULARY
from models.reference_checkpoints import written
from models.tiny_targets import tiny_target

PROMPTS = [[UP], [DOWN, 3], [UP, 1, 2, 5], [DOWN, *[4] * 20, 2, 1, 0]]
LENGTHS = [40, 33, 20, 45]
TEXTS = [continued(prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
LAYOUTS = ("speculators", "original")
ALPHA, SAMPLES, WARM, SPREAD = 1e-6, 2000, SamplingParams(temperature=0.7), 1.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_perfect_drafter_is_always_accepted(layout, temperature, tmp_path):
    engine = dp.load(target(), dflash_folder(tmp_path, layout), num_draft_tokens=6)
    assert type(engine.drafter) is DFlashDrafter
    outputs = engine.generate(PROMPTS, temperature=temperature, max_tokens=LENGTHS)
    assert [output.tokens for output in outputs] == TEXTS
    assert acceptance(outputs) > 0.99


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_drafter_that_reads_a_neighbouring_layer_is_not(layout, shift, tmp_path):
    shifted = tuple(tap + shift for tap in TAPS)
    engine = dp.load(target(), f"dflash:{dflash_folder(tmp_path, layout, shifted)}", num_draft_tokens=4)
    outputs = engine.generate(PROMPTS, temperature=0, max_tokens=20)
    assert [output.tokens for output in outputs] == [text[:20] for text in TEXTS]
    assert acceptance(outputs) < 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_survive_rejections_at_every_depth_in_a_ragged_batch(layout, tmp_path):
    fitted = fitted_dflash(dflash_folder(tmp_path, layout), target())
    drafter = WrongAtEveryDepth(DFlashDrafter(fitted), depth=4)
    outputs = dp.load(target(), drafter, num_draft_tokens=4).generate(PROMPTS, temperature=0, max_tokens=LENGTHS)
    assert [output.tokens for output in outputs] == TEXTS
    assert drafter.depths == {0, 1, 2, 3, 4}


def test_rows_that_come_and_go_keep_their_own_states(tmp_path):
    engine = dp.load(target(), dflash_folder(tmp_path, "original"), num_draft_tokens=4, max_batch=2)
    outputs = engine.generate(PROMPTS, temperature=0, max_tokens=LENGTHS)
    assert [output.tokens for output in outputs] == TEXTS
    assert acceptance(outputs) > 0.99


@pytest.mark.parametrize("rule", ["block", "tree"])
@pytest.mark.parametrize("name", ["window", "speculators"])
def test_greedy_text_with_a_random_drafter_is_the_plain_one(name, rule, tmp_path):
    model = tiny_target(VOCABULARY, 16, 8)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2]]
    plain = dp.load(model, None).generate(prompts, temperature=0, max_tokens=16)
    engine = dp.load(model, written("dflash", name, tmp_path), rule=rule, num_draft_tokens=4)
    outputs = engine.generate(prompts, temperature=0, max_tokens=16)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(output.stats.drafted for output in outputs) > 50


# ------------------------------------------------------------------------------------------------- the distribution


@pytest.fixture(scope="module")
def random_target():
    model = copy.deepcopy(tiny_target(VOCABULARY, 16, 8))
    with torch.no_grad():
        model.lm_head.weight *= SPREAD / model(torch.arange(VOCABULARY)[None]).logits.std()
    return model


def p_value(model, drafter, rule: str) -> float:
    engine = dp.load(model, drafter, rule=rule, num_draft_tokens=3, max_batch=500)
    made = sample_texts(engine, (1, 2, 3), [WARM], SAMPLES, length=2, budget=4)
    assert made.drafting_mattered
    return g_test(counts(made.texts, VOCABULARY), joint_distribution(model, (1, 2, 3), WARM, 2))


@pytest.mark.statistical
@pytest.mark.parametrize("rule", budgeted(["token", "block", "tree"], ["block"]))
def test_texts_have_the_targets_distribution(random_target, rule, tmp_path):
    assert p_value(random_target, written("dflash", "speculators", tmp_path), rule) > ALPHA


class Understated(DFlashDrafter):
    """Declares a tenth of each probability, as if nine tenths lay outside of its vocabulary: accepted too often."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        return draft if draft.q is None else replace(draft, q=replace(draft.q, lse=draft.q.lse + math.log(10)))


@pytest.mark.statistical
def test_a_drafter_that_declares_another_distribution_is_caught(random_target, tmp_path):
    fitted = fitted_dflash(written("dflash", "speculators", tmp_path), random_target)
    assert p_value(random_target, Understated(fitted), "token") < ALPHA


def test_penalties_and_a_seed_are_respected(random_target, tmp_path):
    """With the coupled rule, drafted texts are the plain seeded ones, whatever the processors."""
    sampling = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.3, seed=4)
    plain, drafted = (
        dp.load(random_target, drafter, rule="coupled", num_draft_tokens=4).generate(
            [[1, 2, 3], [4]], sampling, max_tokens=24
        )
        for drafter in (None, written("dflash", "plain", tmp_path))
    )
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]


def test_the_name_without_a_folder_is_refused():
    with pytest.raises(ValueError, match=r'wants the folder or hub id of a drafter, as in "dflash:folder"'):
        dp.load(target(), "dflash")
