"""A head goes on from another: it begins where that one ended, with another vocabulary too, and says whence it is."""

import dataclasses
import json

import pytest
import torch

from draftproof.models.bundled.download import sha256
from draftproof.models.head.file import load as load_head
from draftproof.models.head.file import save
from draftproof.models.head.network import Head
from draftproof.models.head.taps import shape_for
from draftproof.train.api import Watch, train
from draftproof.train.config import PausedError, Plan
from draftproof.train.trainer import origin
from train.tiny_target import Ticks, pupil

SMALL = {"length": 64, "batch": 8, "depth": 3, "vocab": 200, "device": "cpu", "counts": False}
NOISE = 0.03
"""Of an acceptance over 64 steps: between texts of two seeds, and within them."""


@pytest.fixture(scope="module")
def first(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("heads") / "first"
    plan = Plan(target=folder, out=out, minutes=0.6, learning_rate=0.02, **SMALL)
    return out, train(plan, clock=Ticks(0.04))


def later(folder, start, out, **other):
    return Plan(**{"target": folder, "out": out, "start": start, "seed": 1, "minutes": 0.15, **SMALL, **other})


@pytest.mark.parametrize("vocab", [200, 150, 250])
def test_a_started_head_begins_where_the_other_ended(folder, first, tmp_path, vocab):
    """At a rate so low that it stays where it is: what its first steps were accepted is what was accepted before."""
    start, before = first
    figures = train(later(folder, start, tmp_path / "head", vocab=vocab, learning_rate=1e-9), clock=Ticks(0.04))
    accepted = figures["history"][0]["accepted"]
    assert len(accepted) == 3, "unrolled from the first step"
    assert set(figures["step_ms"]) == {"unrolled"}
    most = before["held_out"]["accepted"]
    if vocab >= 200:
        assert all(now > was - NOISE for now, was in zip(accepted, most, strict=True)), (accepted, most)
    assert accepted[0] > before["history"][0]["accepted"][0] + 3 * NOISE, "a new head begins far below"
    head, meta = load_head(tmp_path / "head")
    old, _ = load_head(start)
    assert len(meta.ids) == vocab
    for name, weight in head.state_dict().items():
        torch.testing.assert_close(weight, old.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_a_started_head_learns_on(folder, first, tmp_path):
    start, _ = first
    train(later(folder, start, tmp_path / "head"), clock=Ticks(0.04))
    (head, _), (old, _) = load_head(tmp_path / "head"), load_head(start)
    assert not torch.equal(head.fc.weight, old.fc.weight)


def test_sheet_and_figures_tell_what_it_began_with(folder, first, tmp_path):
    start, before = first
    out, next_out = tmp_path / "second", tmp_path / "third"
    figures = train(later(folder, start, out), clock=Ticks(0.04))
    told = figures["origin"]
    assert told["name"] == "first"
    assert told["sha256"] == sha256(start / "head.safetensors")
    assert (told["command"], told["seed"], told["steps"]) == (before["command"], 0, before["steps"])
    assert "--start first" in figures["command"]
    assert "--learning-rate 0.0005" in figures["command"]
    assert load_head(out)[1].training["origin"] == told
    assert before["origin"] is None
    text = (out / "head.json").read_text() + (out / "figures.json").read_text()
    assert str(start.parent) not in text, "a folder of this machine"
    third = origin(later(folder, out, next_out, seed=2), pupil())
    assert third.told["origin"] == told


@pytest.mark.parametrize("seed", [0, 1])
def test_no_head_reads_the_texts_of_its_ancestors_again(folder, first, tmp_path, seed):
    start, _ = first
    head, meta = load_head(start)
    grown = dataclasses.replace(
        meta, training={"plan": {"seed": 1}, "origin": {"name": "first", "seed": 0}, "command": "draftproof train"}
    )
    save(tmp_path / "second", head, grown)
    with pytest.raises(ValueError, match=f"seed={seed} made the texts .* give another --seed"):
        origin(later(folder, tmp_path / "second", tmp_path / "head", seed=seed), pupil())


def test_a_head_that_tells_nothing_of_its_training_may_be_gone_on_from(folder, first, tmp_path):
    head, meta = load_head(first[0])
    save(tmp_path / "silent", head, dataclasses.replace(meta, training={}))
    begun = origin(later(folder, tmp_path / "silent", tmp_path / "head", seed=0), pupil())
    assert set(begun.told) == {"name", "sha256", "vocab"}
    assert all(weight.requires_grad for weight in begun.head.parameters())


def test_a_head_of_another_target_is_refused_before_any_text_is_made(folder, first, tmp_path):
    head, meta = load_head(first[0])
    save(tmp_path / "other", head, dataclasses.replace(meta, weights="0" * 64))
    with pytest.raises(ValueError, match="the same sizes and other weights"):
        train(later(folder, tmp_path / "other", tmp_path / "head"), clock=Ticks(0.04))
    assert not (tmp_path / "head").exists(), "the folder is free for another try"


def test_a_head_of_another_shape_and_what_is_no_head_are_refused(folder, first, tmp_path):
    _, meta = load_head(first[0])
    save(tmp_path / "narrow", Head(dataclasses.replace(shape_for(pupil()), intermediate=8)), meta)
    with pytest.raises(ValueError, match=r"intermediate=8.*intermediate=48"):
        origin(later(folder, tmp_path / "narrow", tmp_path / "head"), pupil())
    with pytest.raises(ValueError, match="is no head"):
        origin(later(folder, tmp_path / "nothing", tmp_path / "head"), pupil())


def test_a_started_run_that_was_paused_goes_on_and_keeps_its_start(folder, first, tmp_path):
    start, _ = first
    plan = later(folder, start, tmp_path / "head", minutes=0.3)
    with pytest.raises(PausedError):
        train(plan, pause=10.0, clock=Ticks(0.06))
    state = torch.load(plan.out / "work" / "student.pt", weights_only=True)
    with pytest.raises(ValueError, match=r"begun with start=.*first, and now it is None"):
        train(dataclasses.replace(plan, start=None, learning_rate=5e-4), resume=True)
    looks = []
    figures = train(plan, resume=True, clock=Ticks(0.06), watch=Watch(progress=looks.append))
    assert min(now.steps for now in looks) > state["steps"] > 0
    assert all(len(now.accepted) == 3 for now in looks)
    assert figures["origin"]["name"] == "first"


def test_the_head_is_there_as_soon_as_it_has_been_trained(folder, tmp_path):
    """A pause between training and evaluation: the head lies there already, and a second run evaluates it."""
    plan = Plan(target=folder, out=tmp_path / "head", minutes=0.3, **SMALL)
    with pytest.raises(PausedError):
        train(plan, pause=17.0, clock=Ticks(0.06))  # training ends at 16.2 of 18 seconds
    head, meta = load_head(plan.out)
    figures = json.loads((plan.out / "figures.json").read_text())
    assert meta.training["steps"] == figures["steps"] > 0
    assert "held_out" not in figures
    assert train(plan, resume=True, clock=Ticks(0.06))["held_out"]["texts"] > 0
    again, meta = load_head(plan.out)
    assert torch.equal(head.fc.weight, again.fc.weight)
    assert "held_out" in meta.training


def test_without_counts_there_is_an_exam_and_no_loop(first):
    out, figures = first
    assert figures["held_out"]["texts"] > 0
    assert "tokens_per_pass" not in figures
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_the_share_of_the_data_can_be_told(folder, tmp_path):
    plan = Plan(target=folder, out=tmp_path / "head", minutes=0.3, data=0.6, **SMALL)
    assert train(plan, clock=Ticks(0.06))["seconds"]["data"] == pytest.approx(0.6 * 18, abs=2.0)
