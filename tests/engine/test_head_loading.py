"""Heads by name: where they are found, when they are refused, and what the default drafter is."""

import copy

import pytest
import torch

import draftproof as dp
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.switch import Switch
from draftproof.models.head import attach as fitted
from draftproof.models.head import file as headfile
from draftproof.models.head.network import Head
from draftproof.models.head.taps import shape_for
from engine.scripted import cycle
from engine.test_greedy import LENGTH, PROMPTS, differences
from engine.tiny import PROMPT, llama
from engine.tiny_heads import IDS, trained
from models.families import family


def write(folder, model, head: Head | None = None, ids=IDS):
    meta = headfile.meta_for(model, tuple(ids), target="tiny", training={}, licence="")
    headfile.save(folder, head or Head(shape_for(model)), meta)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("heads") / "tiny", llama(), trained())


def test_a_head_in_a_folder_drafts(folder):
    engine = dp.load(llama(), f"head:{folder}", num_draft_tokens=3)
    assert type(engine.drafter) is HeadDrafter
    outputs = engine.generate([list(PROMPT)] * 8, temperature=0.8, max_tokens=20)
    drafted, accepted = (sum(getattr(output.stats, part) for output in outputs) for part in ("drafted", "accepted"))
    assert 0.2 * drafted < accepted < drafted, "a trained head is accepted more often than chance"
    assert all(output.stats.drafts > 0 for output in outputs)


def test_a_head_beside_a_suffix_automaton_has_a_name(folder):
    engine = dp.load(llama(), f"suffix+head:{folder}", rule="tree", num_draft_tokens=4)
    assert type(engine.drafter) is Switch
    assert engine.generate([list(PROMPT)], temperature=0, max_tokens=20)[0].stats.accepted > 0


def test_a_head_works_with_auto_lengths_and_a_changing_batch(folder):
    engine = dp.load(llama(), f"head:{folder}", max_batch=2)
    outputs = engine.generate([list(PROMPT), [3], [1, 2] * 9, [5, 5]], temperature=0, max_tokens=[12, 3, 20, 1])
    plain = dp.load(llama(), None).generate([list(PROMPT), [3], [1, 2] * 9, [5, 5]], temperature=0, max_tokens=20)
    for output, other in zip(outputs, plain, strict=True):
        assert output.tokens == other.tokens[: len(output.tokens)]


def test_a_head_on_a_target_of_other_weights_drafts_with_a_warning(folder):
    """An adapter or further training changes what is accepted, never the text's distribution."""
    other = copy.deepcopy(llama())
    with torch.no_grad():
        other.model.embed_tokens.weight.neg_()
    with pytest.warns(UserWarning, match="same sizes and other weights .*: texts stay exact"):
        engine = dp.load(other, f"head:{folder}")
    plain = dp.load(other, None).generate(list(PROMPT), temperature=0, max_tokens=12)
    assert engine.generate(list(PROMPT), temperature=0, max_tokens=12).tokens == plain.tokens


def test_a_head_on_a_target_of_other_sizes_is_refused(folder):
    with pytest.raises(ValueError, match="architecture is llama; that of the target is gpt2"):
        dp.load(family("gpt2"), f"suffix+head:{folder}")


def test_a_target_without_hidden_states_is_refused(folder):
    with pytest.raises(ValueError, match=r"causal transformers model; the target is a Toy"):
        dp.load(cycle(0, 1, 2), f"head:{folder}")


def test_a_folder_without_a_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no head"):
        dp.load(llama(), f"head:{tmp_path}")


@pytest.mark.parametrize("name", ["head", "suffix+head"])
def test_the_name_of_a_head_that_is_not_shipped_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fitted, "SHIPPED", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"this installation has none: name one, \"head:folder\""):
        dp.load(llama(), name)
    assert type(dp.load(llama()).drafter) is NGram


def test_by_default_the_shipped_head_drafts_for_its_own_target(folder, monkeypatch):
    monkeypatch.setattr(fitted, "SHIPPED", folder)
    assert type(dp.load(llama()).drafter) is HeadDrafter
    assert type(dp.load(llama(), "head").drafter) is HeadDrafter
    assert type(dp.load(family("llama")).drafter) is NGram
    assert type(dp.load(cycle(0, 1, 2)).drafter) is NGram
    assert dp.load(llama(), None).drafter is None


def test_copying_one_text_is_a_tree_of_one_branch():
    engine = dp.load(llama(), "prompt-lookup", rule="tree", num_draft_tokens=3)
    assert type(engine.drafter) is PromptLookup
    assert engine.generate([list(PROMPT)], temperature=0, max_tokens=8)[0].stats.drafted > 0
    with pytest.raises(ValueError, match="copies one text"):
        dp.load(llama(), "prompt-lookup", rule="tree", branches=2)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-window", "gpt2", "opt", "falcon-alibi", "phi"])
def test_greedy_text_with_a_head_is_transformers_greedy_text(name, tmp_path):
    model = family(name)
    where = write(tmp_path, model, ids=range(40, 4, -1))
    for rule in ("block", "tree"):
        engine = dp.load(model, f"head:{where}", rule=rule, num_draft_tokens=5)
        outputs = engine.generate(PROMPTS, temperature=0, max_tokens=LENGTH)
        assert differences(model, outputs) <= 1, "rounding explains one difference here, not several"
        assert sum(output.stats.drafted for output in outputs) > 0


def test_inside_transformers_own_generate(folder):
    ids = torch.tensor([list(PROMPT)])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    made = llama().generate(
        ids, custom_generate=dp.transformers.generate, drafter=f"head:{folder}", **options, trust_remote_code=True
    )
    assert made.tolist() == llama().generate(ids, **options).tolist()
