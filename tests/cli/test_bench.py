"""`draftproof bench` end to end on a tiny model, with transformers in the same run."""

import json

import pytest


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    lines = [
        {"id": f"{kind}-{n}", "kind": kind, "prompt": "the fox " * (n + 2)} for kind in ("chat", "code") for n in (0, 1)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return str(file)


def test_all_decoders_run_and_give_the_same_text(run, model, draft_model, prompts, tmp_path):
    kept, picture = tmp_path / "kept.json", tmp_path / "plot.png"
    said = run(
        "bench", "--target", model, "--draft-model", draft_model, "--drafter", "ngram", "--prompts", prompts,
        "--against", "transformers", "-n", "8", "--save", str(kept), "--plot", str(picture),
    )  # fmt: skip
    assert said.status == 0, said.err
    names = ["plain", "ngram", "transformers plain", "transformers prompt-lookup", "transformers assisted"]
    assert all(name in said.out for name in names)
    assert said.out.count("4/4") == 6  # six decoders, on all prompts
    runs = json.loads(kept.read_text())["runs"]
    assert len(runs) == 6 * 4
    assert all(r["first_token"] <= r["seconds"] for r in runs)
    assert {r["tokens"] / r["passes"] for r in runs if r["contestant"].endswith("plain")} == {1.0}
    assert picture.read_bytes().startswith(b"\x89PNG")
    compared = run("bench", "--compare", str(kept), str(kept))
    assert compared.out.count("1.00×") == 6


def test_rules_and_repeats_multiply(run, model, prompts):
    how = ("--rule", "block", "--rule", "token", "--repeats", "2", "--kinds", "chat", "--limit", "1", "--json")
    made = json.loads(run("bench", "--target", model, "--drafter", "suffix", "--prompts", prompts, "-n", "6", *how).out)
    assert {r["contestant"] for r in made["runs"]} == {"plain", "suffix/block", "suffix/token"}
    assert len(made["runs"]) == 3 * 2


def test_an_unknown_kind_is_refused_before_anything_is_loaded(run):
    said = run("bench", "--kinds", "poetry", "--target", "no-such-model")
    assert said.status == 2
    assert "kinds are chat" in said.err
