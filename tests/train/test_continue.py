"""Continue training from another head: same starting point, any vocabulary, and a recorded provenance."""

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
from draftproof.train.config import PausedError, TrainConfig
from draftproof.train.trainer import initial_head
from train.tiny_target import Ticks, tiny_llama

SMALL = {"length": 64, "batch": 8, "depth": 3, "vocab": 200, "device": "cpu", "counts": False}
NOISE = 0.03
"""Spread of an acceptance over 64 steps, between the texts of two seeds and within them."""


@pytest.fixture(scope="module")
def first(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("heads") / "first"
    config = TrainConfig(target=folder, out=out, minutes=0.6, learning_rate=0.02, **SMALL)
    return out, train(config, clock=Ticks(0.04))


def later(folder, start, out, **other):
    return TrainConfig(**{"target": folder, "out": out, "start": start, "seed": 1, "minutes": 0.15, **SMALL, **other})


@pytest.mark.parametrize("vocab", [200, 150, 250])
def test_a_started_head_begins_where_the_other_ended(folder, first, tmp_path, vocab):
    """With a negligible learning rate, the first steps show the acceptance that the other head ended with."""
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


def test_a_continued_head_goes_on_learning(folder, first, tmp_path):
    start, _ = first
    train(later(folder, start, tmp_path / "head"), clock=Ticks(0.04))
    (head, _), (old, _) = load_head(tmp_path / "head"), load_head(start)
    assert not torch.equal(head.fc.weight, old.fc.weight)


def test_head_file_and_figures_record_the_head_it_started_from(folder, first, tmp_path):
    start, before = first
    out, next_out = tmp_path / "second", tmp_path / "third"
    figures = train(later(folder, start, out), clock=Ticks(0.04))
    provenance = figures["origin"]
    assert provenance["name"] == "first"
    assert provenance["sha256"] == sha256(start / "head.safetensors")
    assert (provenance["command"], provenance["seed"], provenance["steps"]) == (before["command"], 0, before["steps"])
    assert "--start first" in figures["command"]
    assert "--learning-rate 0.0005" in figures["command"]
    assert load_head(out)[1].training["origin"] == provenance
    assert before["origin"] is None
    text = (out / "head.json").read_text() + (out / "figures.json").read_text()
    assert str(start.parent) not in text, "a folder of this machine"
    third = initial_head(later(folder, out, next_out, seed=2), tiny_llama())
    assert third.provenance["origin"] == provenance


@pytest.mark.parametrize("seed", [0, 1])
def test_no_head_reads_the_texts_of_its_ancestors_again(folder, first, tmp_path, seed):
    start, _ = first
    head, meta = load_head(start)
    grown = dataclasses.replace(
        meta, training={"plan": {"seed": 1}, "origin": {"name": "first", "seed": 0}, "command": "draftproof train"}
    )
    save(tmp_path / "second", head, grown)
    with pytest.raises(ValueError, match=f"seed={seed} made the texts .* give another --seed"):
        initial_head(later(folder, tmp_path / "second", tmp_path / "head", seed=seed), tiny_llama())


def test_a_head_without_training_records_may_be_continued(folder, first, tmp_path):
    head, meta = load_head(first[0])
    save(tmp_path / "unrecorded", head, dataclasses.replace(meta, training={}))
    start = initial_head(later(folder, tmp_path / "unrecorded", tmp_path / "head", seed=0), tiny_llama())
    assert set(start.provenance) == {"name", "sha256", "vocab"}
    assert all(weight.requires_grad for weight in start.head.parameters())


def test_a_head_of_another_target_is_refused_before_any_text_is_made(folder, first, tmp_path):
    head, meta = load_head(first[0])
    save(tmp_path / "other", head, dataclasses.replace(meta, weights="0" * 64))
    with pytest.raises(ValueError, match="the same sizes and other weights"):
        train(later(folder, tmp_path / "other", tmp_path / "head"), clock=Ticks(0.04))
    assert not (tmp_path / "head").exists(), "the folder is free for another try"


def test_a_head_of_another_shape_and_what_is_no_head_are_refused(folder, first, tmp_path):
    _, meta = load_head(first[0])
    save(tmp_path / "narrow", Head(dataclasses.replace(shape_for(tiny_llama()), intermediate=8)), meta)
    with pytest.raises(ValueError, match=r"intermediate=8.*intermediate=48"):
        initial_head(later(folder, tmp_path / "narrow", tmp_path / "head"), tiny_llama())
    with pytest.raises(ValueError, match="is no head"):
        initial_head(later(folder, tmp_path / "nothing", tmp_path / "head"), tiny_llama())


def test_a_started_run_that_was_paused_goes_on_and_keeps_its_start(folder, first, tmp_path):
    start, _ = first
    config = later(folder, start, tmp_path / "head", minutes=0.3)
    with pytest.raises(PausedError):
        train(config, pause=10.0, clock=Ticks(0.06))
    state = torch.load(config.out / "work" / "student.pt", weights_only=True)
    with pytest.raises(ValueError, match=r"begun with start=.*first, and now it is None"):
        train(dataclasses.replace(config, start=None, learning_rate=5e-4), resume=True)
    reports = []
    figures = train(config, resume=True, clock=Ticks(0.06), watch=Watch(progress=reports.append))
    assert min(now.steps for now in reports) > state["steps"] > 0
    assert all(len(now.accepted) == 3 for now in reports)
    assert figures["origin"]["name"] == "first"


def test_the_head_is_saved_as_soon_as_it_has_been_trained(folder, tmp_path):
    """A pause between training and evaluation: the head is saved already, and a resumed run evaluates it."""
    config = TrainConfig(target=folder, out=tmp_path / "head", minutes=0.3, **SMALL)
    with pytest.raises(PausedError):
        train(config, pause=17.0, clock=Ticks(0.06))  # training ends at 16.2 of 18 seconds
    head, meta = load_head(config.out)
    figures = json.loads((config.out / "figures.json").read_text())
    assert meta.training["steps"] == figures["steps"] > 0
    assert "held_out" not in figures
    assert train(config, resume=True, clock=Ticks(0.06))["held_out"]["texts"] > 0
    again, meta = load_head(config.out)
    assert torch.equal(head.fc.weight, again.fc.weight)
    assert "held_out" in meta.training


def test_without_counts_held_out_texts_are_evaluated_and_the_engine_is_not_run(first):
    out, figures = first
    assert figures["held_out"]["texts"] > 0
    assert "tokens_per_pass" not in figures
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_the_share_of_time_for_data_can_be_set(folder, tmp_path):
    config = TrainConfig(target=folder, out=tmp_path / "head", minutes=0.3, data=0.6, **SMALL)
    assert train(config, clock=Ticks(0.06))["seconds"]["data"] == pytest.approx(0.6 * 18, abs=2.0)
