"""Published EAGLE-3 heads in the engine: the right layers, states that survive rejections, the target's texts.

`perfect_drafters.target` can be drafted for without a mistake, but only from the right states. With random heads wrong
wiring would not show. The joint distribution of three tokens is tested by G-test: α = 1e-6, fixed seed; 2000 texts over
512 cells find a total variation of about 0.12, and the control fails with as many.
"""

from dataclasses import replace

import pytest

import draftproof as dp
from budget import budgeted
from draftproof.core.sampling import SamplingParams, warp
from draftproof.drafters.head import HeadDrafter
from draftproof.models.head.attach_published import fitted_eagle3
from engine.many_texts import sample_texts
from engine.perfect_drafters import DOWN, TAPS, UP, WrongAtEveryDepth, acceptance, continued, eagle3_folder, target
from engine.plain_distribution import counts, joint_distribution
from engine.tiny import PROMPT, V, llama
from engine.tiny_heads import published
from g_test import g_test
from models.numbered_weights import VOCABULARY
from models.reference_checkpoints import written
from models.tiny_targets import tiny_target

PROMPTS = [[UP], [DOWN, 3], [UP, 1, 2, 5], [DOWN, 4, 4, 4, 2, 1, 0]]
LENGTHS = [40, 33, 20, 45]
LAYOUTS = ("speculators", "specforge", "angelslim", "midlayer")
ALPHA, TEXTS, WARM = 1e-6, 2000, SamplingParams(temperature=0.7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_perfect_head_is_always_accepted(layout, temperature, tmp_path):
    engine = dp.load(target(), eagle3_folder(tmp_path, layout), num_draft_tokens=6)
    assert type(engine.drafter) is HeadDrafter
    outputs = engine.generate(PROMPTS, temperature=temperature, max_tokens=LENGTHS)
    assert [output.tokens for output in outputs] == [
        continued(prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert acceptance(outputs) > 0.99


@pytest.mark.parametrize(("layout", "shift"), [*((layout, -1) for layout in LAYOUTS), ("speculators", 1)])
def test_a_head_that_reads_a_neighbouring_layer_is_not(layout, shift, tmp_path):
    """In the other layouts, taps one higher would be a list that begins with 2: read as for vLLM, it is right."""
    shifted = tuple(tap + shift for tap in TAPS)
    engine = dp.load(target(), f"eagle3:{eagle3_folder(tmp_path, layout, shifted)}", num_draft_tokens=6)
    outputs = engine.generate(PROMPTS, temperature=0, max_tokens=20)
    assert [output.tokens for output in outputs] == [continued(prompt, 20) for prompt in PROMPTS]
    assert acceptance(outputs) < 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_survive_rejections_at_every_depth_in_a_ragged_batch(layout, tmp_path):
    drafter = WrongAtEveryDepth(HeadDrafter(fitted_eagle3(eagle3_folder(tmp_path, layout), target())), depth=4)
    outputs = dp.load(target(), drafter, num_draft_tokens=4).generate(PROMPTS, temperature=0, max_tokens=LENGTHS)
    assert [output.tokens for output in outputs] == [
        continued(prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    assert drafter.rounds > 10
    assert drafter.depths == {0, 1, 2, 3, 4}


def test_trees_of_a_perfect_head_are_accepted_to_their_full_depth(tmp_path):
    engine = dp.load(target(), eagle3_folder(tmp_path, "speculators"), rule="tree", num_draft_tokens=4, branches=1)
    outputs = engine.generate(PROMPTS, temperature=0, max_tokens=20)
    assert [output.tokens for output in outputs] == [continued(prompt, 20) for prompt in PROMPTS]
    assert acceptance(outputs) > 0.99


@pytest.mark.parametrize("name", ["everything", "full vocabulary"])
@pytest.mark.parametrize("rule", ["block", "tree"])
def test_greedy_text_with_a_random_head_is_the_plain_one(name, rule, tmp_path):
    model = tiny_target(VOCABULARY, 16, 8)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [2, 2]]
    plain = dp.load(model, None).generate(prompts, temperature=0, max_tokens=16)
    engine = dp.load(model, f"eagle3:{written('eagle3', name, tmp_path)}", rule=rule, num_draft_tokens=5)
    outputs = engine.generate(prompts, temperature=0, max_tokens=16)
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(output.stats.drafted for output in outputs) > 50


# ------------------------------------------------------------------------------------------------- the distribution


def p_value(drafter, rule: str) -> float:
    slots = 5 if rule == "tree" else 3
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=slots, max_batch=500)
    made = sample_texts(engine, PROMPT, [WARM], TEXTS, length=3, budget=6)
    assert made.drafting_mattered
    return g_test(counts(made.texts, V), joint_distribution(llama(), PROMPT, WARM, 3))


@pytest.mark.statistical
@pytest.mark.parametrize("rule", budgeted(["token", "block", "tree"], ["block", "tree"]))
def test_texts_have_the_targets_distribution(rule):
    assert p_value(f"eagle3:{published()}", rule) > ALPHA


class RawDistribution(HeadDrafter):
    """Draws at the request's temperature, and declares the head's distribution at temperature 1."""

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        if draft.q is None:
            return draft
        return replace(draft, q=warp(draft.q.logits, [SamplingParams()] * len(contexts), vocab=draft.q.vocab))


@pytest.mark.statistical
def test_a_head_that_declares_another_distribution_is_caught():
    assert p_value(RawDistribution(fitted_eagle3(published(), llama())), "token") < ALPHA


def test_the_coupled_rule_gives_the_plain_seeded_texts():
    sampling = SamplingParams(temperature=0.8, seed=5)
    plain, drafted = (
        dp.load(llama(), drafter, rule="coupled", num_draft_tokens=4).generate(
            [list(PROMPT), [3]], sampling, max_tokens=24
        )
        for drafter in (None, f"eagle3:{published()}")
    )
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert sum(output.stats.accepted for output in drafted) > 0


def test_the_name_without_a_folder_is_refused():
    with pytest.raises(ValueError, match=r'wants the folder or hub id of a drafter, as in "eagle3:folder"'):
        dp.load(llama(), "eagle3")
