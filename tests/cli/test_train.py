"""`draftproof train` end to end on a tiny model: its table and its refusals."""

import json

import pytest

from draftproof.train import api
from draftproof.train.report import verdict


def test_a_head_is_trained_drafts_and_is_trained_further(run, model, tmp_path):
    out, later = tmp_path / "head", tmp_path / "later"
    how = ("--minutes", "0.15", "--length", "32", "--batch", "4", "--depth", "2", "--device", "cpu")
    said = run("train", "--target", model, "--out", str(out), *how, "--export", "speculators")
    assert said.status == 0, said.err
    assert "Tokens per pass" in said.out
    assert "code-editing" in said.out
    assert "T=0.7 top-p 0.9" in said.out
    generated = run(
        "generate", "--target", model, "--drafter", f"head:{out}", "-n", "8", "--device", "cpu", "the fox", "--stats"
    )
    assert generated.status == 0, generated.err
    exported = run(
        "generate", "--target", model, "--drafter", f"eagle3:{out / 'speculators'}", "-n", "8", "--device", "cpu", "fox"
    )
    assert exported.status == 0, exported.err
    again = run("models", "export", str(out), str(tmp_path / "vllm"), "--target", model)
    assert again.status == 0, again.err
    assert '"method": "eagle3"' in again.out
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "vllm" / name).read_bytes() == (out / "speculators" / name).read_bytes()
    more = ("--start", str(out), "--seed", "1", "--vocab", "64", "--data", "0.3", "--no-counts")
    taught = run("train", "--target", model, "--out", str(later), *how, *more)
    assert taught.status == 0, taught.err
    assert "Tokens per pass" not in taught.out
    assert json.loads((later / "head.json").read_text())["training"]["origin"]["name"] == "head"
    again = run("train", "--target", model, "--out", str(tmp_path / "again"), *how, "--start", str(out))
    assert again.status == 2
    assert "give another --seed" in again.err


def test_a_folder_that_is_taken_is_refused_in_one_line(run, model, tmp_path):
    (tmp_path / "mine").write_text("mine")
    said = run("train", "--target", model, "--out", str(tmp_path))
    assert said.status == 2
    assert "give --resume to go on with it, or another --out" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("per_pass", [1.0, 2.1])
def test_a_head_that_does_not_help_is_not_recommended(run, tmp_path, monkeypatch, per_pass):
    figures = {"tokens_per_pass": {"T=1": {"all": per_pass}}}
    figures["verdict"] = verdict(figures, 0.7)
    monkeypatch.setattr(api, "train", lambda config, **options: figures)
    said = run("train", "--target", "some-model", "--out", str(tmp_path / "head"), "--minutes", "0.7")
    assert said.status == 0, said.err
    assert ("load it with" in said.out) == (per_pass > 2)
    assert ("This head does not help yet: 1.00 tokens per pass" in said.out) == (per_pass < 2)
    assert ("--resume --minutes 30" in said.out) == (per_pass < 2)
