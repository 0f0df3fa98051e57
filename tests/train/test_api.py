"""Train a tiny head end to end: it beats an untrained one, keeps its time budget, and survives interruptions."""

import dataclasses
import json
import time

import pytest
import torch
import transformers as tf

from draftproof.engine.load import load
from draftproof.models.head.file import load as load_head
from draftproof.models.head.file import save
from draftproof.train import data as corpora
from draftproof.train.api import Watch, train
from draftproof.train.config import PausedError, TrainConfig
from draftproof.train.evaluate import OVERALL, count_passes, held_out_prompts
from draftproof.train.trainer import new_head
from models.tiny_tokenizers import byte_level
from train.tiny_target import Ticks, tiny_llama

SMALL = {"length": 64, "batch": 8, "depth": 3, "vocab": 200, "learning_rate": 0.02}


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("heads") / "head"
    return out, train(TrainConfig(target=folder, out=out, minutes=1.0, device="cpu", **SMALL), clock=Ticks(0.04))


def per_pass(folder, head, **sampling):
    engine = load(folder, f"head:{head}", device="cpu", num_draft_tokens=3)
    return count_passes(engine, held_out_prompts()[:24], sampling, max_tokens=48)[OVERALL].per_pass


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_trained_head_is_accepted_more_than_an_untrained_one(folder, trained, tmp_path, temperature):
    out, _ = trained
    _, meta = load_head(out)
    save(tmp_path, new_head(tiny_llama(), 0), meta)
    trained_rate, untrained_rate = (per_pass(folder, head, temperature=temperature) for head in (out, tmp_path))
    assert trained_rate > untrained_rate + 0.15, (trained_rate, untrained_rate)


def test_data_and_training_end_when_they_should(trained):
    _, figures = trained
    assert figures["seconds"]["data"] == pytest.approx(15.0, abs=3.0)
    assert figures["seconds"]["data"] + figures["seconds"]["training"] == pytest.approx(54.0, abs=2.0)


def test_the_figures_record_the_training_and_the_evaluation(trained):
    out, figures = trained
    assert json.loads((out / "figures.json").read_text())["steps"] == figures["steps"] > 50
    assert len(figures["held_out"]["accepted"]) == 3
    assert figures["held_out"]["accepted"][0] > 0.2
    assert 0.5 < figures["held_out"]["mass_kept"] <= 1.0
    assert set(figures["tokens_per_pass"]) == {"T=1", "T=0.7 top-p 0.9", "T=0"}
    assert all(OVERALL in column for column in figures["tokens_per_pass"].values())
    best = max(column[OVERALL] for column in figures["tokens_per_pass"].values())
    assert json.loads((out / "figures.json").read_text())["verdict"]["tokens_per_pass"] == best
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    _, meta = load_head(out)
    assert len(meta.ids) == 200
    assert byte_level().eos_token_id in meta.ids
    assert meta.training["steps"] == figures["steps"]
    assert set(figures["step_ms"]) == {"single", "unrolled"}
    assert figures["texts_remembered"] == figures["texts"]


def test_what_is_saved_is_the_average_of_the_latest_weights(trained):
    out, _ = trained
    state = torch.load(out / "work" / "student.pt", weights_only=True)
    head, _ = load_head(out)
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, state["average"][name].half().float())
    assert not torch.equal(state["average"]["fc.weight"], state["head"]["fc.weight"])


@pytest.mark.slow
def test_a_paused_run_goes_on_where_it_was(folder, tmp_path):
    config = TrainConfig(target=folder, out=tmp_path / "head", minutes=0.4, device="cpu", **SMALL)
    with pytest.raises(PausedError):
        train(config, pause=12.0, clock=Ticks(0.06))
    state = torch.load(config.out / "work" / "student.pt", weights_only=True)
    assert not (config.out / "head.json").exists()
    steps = []
    figures = train(config, resume=True, clock=Ticks(0.06), watch=Watch(progress=lambda now: steps.append(now.steps)))
    assert min(steps) > state["steps"] > 0
    assert figures["steps"] > state["steps"]
    assert figures["seconds"]["all"] < 60 * config.minutes + 5
    assert (config.out / "head.json").exists()


def test_an_interrupted_run_has_lost_no_more_than_what_followed_its_checkpoint(folder, tmp_path):
    """Ctrl-C during training: the texts and the seconds spent are saved."""
    config = TrainConfig(target=folder, out=tmp_path / "head", minutes=0.4, device="cpu", **SMALL)

    def interrupt(now):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, clock=Ticks(0.06), watch=Watch(progress=interrupt))
    texts = len(corpora.load_texts(config.out / "work"))
    assert train(config, resume=True, clock=Ticks(0.06))["texts"] >= texts - texts // 32 - 1


@pytest.mark.slow
def test_the_time_budget_is_kept(folder, tmp_path):
    config = TrainConfig(target=folder, out=tmp_path / "head", minutes=0.2, device="cpu", **SMALL)
    began = time.process_time()  # CPU time of this process: other processes do not count
    train(config, clock=time.process_time)
    assert time.process_time() - began < 1.5 * 12  # the plot and the last answers come on top


def test_a_target_that_never_answers_is_refused(folder, tmp_path, monkeypatch):
    load_texts = corpora.load_texts

    def without_answers(folder):
        texts = load_texts(folder)
        return dataclasses.replace(texts, is_answer=texts.is_answer & False)

    monkeypatch.setattr(corpora, "load_texts", without_answers)
    with pytest.raises(ValueError, match=r"answered nothing in .* --minutes"):
        train(TrainConfig(target=folder, out=tmp_path / "head", minutes=0.1, device="cpu", **SMALL), clock=Ticks(0.06))


def test_a_vocabulary_larger_than_the_target_s_is_refused_before_any_work(folder, tmp_path):
    with pytest.raises(ValueError, match=f"vocab=9999: .* has {len(byte_level())} tokens"):
        train(TrainConfig(target=folder, out=tmp_path / "head", vocab=9999, device="cpu"))


def test_an_encoder_is_refused(tmp_path):
    config = tf.T5Config(vocab_size=len(byte_level()), d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    tf.T5ForConditionalGeneration(config).eval().save_pretrained(tmp_path / "t5")
    byte_level().save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="has an encoder"):
        train(TrainConfig(target=str(tmp_path / "t5"), out=tmp_path / "head", device="cpu"))
