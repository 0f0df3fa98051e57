"""`draftproof models`: list, download and remove."""

import json

import pytest
import torch

from draftproof.cli.engines import bundled_weights
from draftproof.cli.options import WEIGHTS, Choice
from draftproof.models import cpu_support, loading


@pytest.fixture(autouse=True)
def _nothing_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_bundled_model_is_listed_with_its_place(run, tmp_path):
    found = json.loads(run("models", "--json").out)
    assert found[0]["name"] == "smollm2"
    assert found[0]["bytes"] == 0
    assert found[0]["path"].startswith(str(tmp_path))
    assert "models fetch" in run("models").out


def test_the_names_of_weights_are_those_of_the_library():
    assert WEIGHTS == loading.WEIGHTS


def test_removing_what_is_not_there_says_so(run):
    said = run("models", "remove")
    assert said.status == 0
    assert "not on this machine" in said.out


def test_a_cached_model_is_removed(run, tmp_path):
    folder = tmp_path / "draftproof" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"0" * 2_000_000)
    assert "2 MB freed" in run("models", "remove", "--yes").out
    assert not folder.exists()


def test_other_models_are_fetched_elsewhere(run):
    said = run("models", "fetch", "Qwen/Qwen3-8B")
    assert said.status == 2
    assert "not bundled" in said.err


def test_the_kind_of_weights_follows_the_processor(monkeypatch):
    """Without the instructions the command line loads what it loaded before: the float32 folder."""
    for refusal, expected in ((None, "int4"), ("no AVX-512", "float32")):
        monkeypatch.setattr(cpu_support, "int4_refusal", lambda refusal=refusal: refusal)
        assert bundled_weights(Choice(device="cpu")) == expected
        assert bundled_weights(Choice(device="cpu", weights="float32")) == "float32"
        assert bundled_weights(Choice(device="cpu"), torch.float32) == "float32"


def test_the_help_says_how_much_memory_the_bundled_model_takes(run):
    assert "1.6 GB" in " ".join(run("models", "--help").out.split())
