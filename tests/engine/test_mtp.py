"""MTP layers in the engine: the right states, which survive rejections, and the target's texts.

As in test_eagle3.py, wrong wiring shows with a target whose MTP layer makes no mistakes, in both layouts of tensors.
Qwen3-Next and Qwen3.5 are recurrent hybrids, whose drafts are chains; with random weights they are in test_hybrids.py.
The joint distribution of two tokens is tested by G-test: α = 1e-6, fixed seed; 2000 texts over 576 cells find a total
variation of about 0.12, and the control fails with as many.
"""

import math
from dataclasses import replace

import pytest
import torch
import transformers as tf

import draftproof as dp
from budget import budgeted
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.head import HeadDrafter
from draftproof.models.head.attach_published import fitted_mtp
from engine.many_texts import sample_texts
from engine.perfect_drafters import DOWN, LAYERS, UP, WrongAtEveryDepth, acceptance, continued, mtp_folder
from engine.plain_distribution import counts, joint_distribution
from g_test import g_test
from models.mtp_checkpoints import V, write

PROMPTS = [[UP], [DOWN, 3], [UP, 1, 2, 5], [DOWN, 4, 4, 4, 2, 1, 0]]
LENGTHS = [30, 33, 20, 25]
TEXTS = [continued(prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
ALPHA, SAMPLES, WARM = 1e-6, 2000, SamplingParams(temperature=0.7)
SPREAD = 1.5
"""Standard deviation of the logits: neither flat nor certain, so that some drafts are accepted and some rejected."""


@pytest.fixture(scope="module", params=[tf.Glm4MoeForCausalLM, tf.Qwen3_5ForCausalLM], ids=["glm", "qwen"])
def perfect(request, tmp_path_factory):
    return request.param.from_pretrained(mtp_folder(tmp_path_factory.mktemp("mtp"), request.param)).eval()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_perfect_layer_is_always_accepted(perfect, temperature):
    engine = dp.load(perfect, "mtp", num_draft_tokens=4)
    outputs = engine.generate(PROMPTS, temperature=temperature, max_tokens=LENGTHS)
    assert [output.tokens for output in outputs] == TEXTS
    assert acceptance(outputs) > 0.99


def test_a_layer_that_reads_the_states_before_the_last_is_not(perfect):
    fitted = fitted_mtp("", perfect)
    fitted.head.taps = (LAYERS - 1,)
    try:
        outputs = dp.load(perfect, HeadDrafter(fitted, graphs=False), num_draft_tokens=4).generate(
            PROMPTS, temperature=0, max_tokens=LENGTHS
        )
    finally:
        fitted.head.taps = (LAYERS,)
    assert [output.tokens for output in outputs] == TEXTS
    assert acceptance(outputs) < 0.5


def test_states_survive_rejections_at_every_depth_in_a_ragged_batch(perfect):
    drafter = WrongAtEveryDepth(HeadDrafter(fitted_mtp("", perfect), graphs=False), depth=4)
    outputs = dp.load(perfect, drafter, num_draft_tokens=4).generate(PROMPTS, temperature=0, max_tokens=LENGTHS)
    assert [output.tokens for output in outputs] == TEXTS
    assert drafter.depths == {0, 1, 2, 3, 4}


@pytest.fixture(scope="module", params=budgeted(["deepseek_v3", "glm4_moe"], ["deepseek_v3"]))
def random_target(request, tmp_path_factory):
    model = write(tmp_path_factory.mktemp("random") / "target", request.param)
    with torch.no_grad():
        model.lm_head.weight *= SPREAD / model(torch.arange(V)[None]).logits.std()
    return model


@pytest.mark.parametrize("rule", ["block", "tree"])
def test_greedy_text_is_the_plain_one(random_target, rule):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2]]
    plain = dp.load(random_target, None).generate(prompts, temperature=0, max_tokens=16)
    outputs = dp.load(random_target, "mtp", rule=rule, num_draft_tokens=4).generate(
        prompts, temperature=0, max_tokens=16
    )
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(output.stats.drafted for output in outputs) > 50


class Understated(HeadDrafter):
    """Declares a tenth of each probability, as if nine tenths lay outside of its vocabulary: accepted too often."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        return draft if draft.q is None else replace(draft, q=replace(draft.q, lse=draft.q.lse + math.log(10)))


def p_value(model, drafter) -> float:
    engine = dp.load(model, drafter, rule="token", num_draft_tokens=2, max_batch=500)
    made = sample_texts(engine, (1, 2, 3), [WARM], SAMPLES, length=2, budget=4)
    assert made.drafting_mattered
    return g_test(counts(made.texts, V), joint_distribution(model, (1, 2, 3), WARM, 2))


@pytest.mark.statistical
def test_texts_have_the_targets_distribution(random_target):
    assert p_value(random_target, "mtp") > ALPHA


@pytest.mark.statistical
def test_a_layer_that_declares_another_distribution_is_caught(random_target):
    assert p_value(random_target, Understated(fitted_mtp("", random_target), graphs=False)) < ALPHA


def test_a_target_without_such_a_layer_is_refused(tmp_path):
    tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2)).save_pretrained(tmp_path)  # fmt: skip
    model = tf.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match=r"holds no MTP layer: neither 'model\.layers\.2\.eh_proj\.weight'"):
        dp.load(model, "mtp")
