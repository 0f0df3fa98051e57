"""`draftproof env`: what a bug report needs, without secrets, even from a broken installation."""

import json
import sys
from importlib import metadata

import pytest


@pytest.fixture(autouse=True)
def _nothing_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_shows_versions_hardware_memory_and_models(run):
    found = json.loads(run("env", "--json").out)
    assert list(found) == ["versions", "processor", "memory", "torch", "models", "environment"]
    assert not any("error" in section for section in found.values())
    assert found["versions"]["torch"] == metadata.version("torch")
    assert set(found["versions"]) >= {"python", "draftproof", "transformers", "triton", "numpy"}
    assert found["processor"]["threads"] >= 1
    assert found["memory"]["total"].endswith(" GB")
    assert "0.9 to 1.6 GB" in found["memory"]["needed by smollm2"]
    assert "not downloaded" in found["models"]["smollm2"]


def test_the_text_has_every_fact_of_the_json(run):
    found = json.loads(run("env", "--json").out)
    shown = " ".join(run("env").out.split())
    steady = [fact for name in ("versions", "processor", "models", "environment") for fact in found[name].items()]
    assert all(f"{name} {' '.join(str(value).split())}" in shown for name, value in steady)


def test_settings_are_shown_and_secrets_are_not(run, monkeypatch):
    shown = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "HF_HOME": "/models/hub"}
    secrets = {"HF_TOKEN": "hf_s3cret", "TRITON_API_KEY": "s3cret", "HF_ENDPOINT": "https://me:s3cret@mirror.example/x"}
    for name, value in {**shown, **secrets}.items():
        monkeypatch.setenv(name, value)
    said = run("env", "--json")
    found = json.loads(said.out)["environment"]
    assert shown.items() <= found.items()
    assert found["HF_ENDPOINT"] == "https://…@mirror.example/x"
    assert "s3cret" not in said.out


def test_the_home_directory_is_not_spelt_out(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    said = run("env")
    assert "~/.cache/draftproof" in said.out
    assert "ada" not in said.out


def test_a_broken_installation_is_reported_and_not_an_error(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    said = run("env", "--json")
    assert said.status == 0
    found = json.loads(said.out)
    assert "ImportError" in found["torch"]["error"] or "ModuleNotFoundError" in found["torch"]["error"]
    assert found["versions"]["torch"] == metadata.version("torch")
