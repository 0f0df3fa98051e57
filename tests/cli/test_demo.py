"""`draftproof demo` and `draftproof explain` on a tiny model."""

import json

import pytest


def test_the_demo_compares_explains_and_writes_a_page(run, model, tmp_path):
    said = run("demo", "--target", model, "--out", str(tmp_path / "demo"), "--max-tokens", "24")
    assert said.status == 0, said.err
    assert "of the draft tokens accepted" in said.out
    assert "the same text, token for token" in said.out
    assert "Round" in said.out
    assert (tmp_path / "demo" / "explain.html").read_text().startswith("<!doctype html>")


def test_explain_shows_every_round(run, model, draft_model):
    said = run("explain", "the fox", "--target", model, "--draft-model", draft_model, "-n", "12", "--seed", "1")
    assert said.status == 0, said.err
    assert "Round   1" in said.out
    assert "drawn from max(0, p − q)" in said.out
    assert "rejected: 0." in said.out


def test_explain_as_json_accounts_for_every_token(run, model, draft_model):
    how = ("--target", model, "--draft-model", draft_model, "-n", "20", "--seed", "1", "--rule", "block", "--json")
    made = json.loads(run("explain", "the fox", *how).out)
    assert len(made["text"]) == made["summary"]["tokens"] == 20
    assert sum(len([s for s in r["slots"] if s["said"]]) + r["closing"]["said"] for r in made["rounds"]) == 20
    assert all(slot["story"]["why"] for r in made["rounds"] for slot in r["slots"])


@pytest.mark.parametrize("seed", ["0", "1"])
def test_explain_shows_the_seed_and_all_sampling_options_that_were_given(run, model, seed):
    """Values that are the default of another option must not be taken for their own."""
    how = ("--target", model, "-n", "4", "--seed", seed, "--top-k", "1", "--min-p", "1", "--temperature", "0.5")
    settings = json.loads(run("explain", "the fox", *how, "--json").out)["settings"]
    assert settings["seed"] == seed
    assert settings["top-k"] == "1"
    assert settings["min-p"] == "1.0"
    assert settings["temperature"] == "0.5"
    assert "top-p" not in settings


def test_explain_shows_no_seed_where_none_was_given(run, model):
    settings = json.loads(run("explain", "the fox", "--target", model, "-n", "4", "--json").out)["settings"]
    assert settings["temperature"] == "0.7"
    assert "seed" not in settings


def test_explain_writes_a_page(run, model, tmp_path):
    page = tmp_path / "page.html"
    assert run("explain", "fox fox fox", "--target", model, "-n", "8", "--html", str(page)).status == 0
    assert "http://www.w3.org/2000/svg" in page.read_text()


def test_rules_without_a_coin_are_refused(run):
    said = run("explain", "fox", "--rule", "coupled")
    assert said.status == 2
    assert "'token', 'block'" in said.err
