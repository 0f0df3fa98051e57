"""`draftproof audit` end to end on a tiny model: what it prints and saves, and its exit status."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import draftproof as dp
from draftproof.engine import load as load_module
from draftproof.models.head import file as headfile
from draftproof.models.head.network import Head
from draftproof.models.head.taps import shape_for

QUICK = ("--bias", "0.9", "--length", "24", "--batch", "8", "--num-draft-tokens", "2")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("audit") / "prompts.jsonl"
    file.write_text("\n".join(json.dumps("the fox and the fox and " * n) for n in (1, 2)))
    return str(file)


def test_an_exact_engine_exits_with_0_and_its_certificate_is_saved(run, model, prompts, tmp_path):
    kept, page = tmp_path / "audit.json", tmp_path / "audit.html"
    said = run(
        "audit", "--target", model, "--drafter", "prompt-lookup", "--prompts", prompts, *QUICK,
        "--sampling", "temperature=0.9,top_k=200", "--save", str(kept), "--html", str(page),
    )  # fmt: skip
    assert said.status == 0, said.out + said.err
    assert "verdict: no bias found" in said.out
    assert "top_k=200" in said.out
    certificate = dp.Certificate.load(kept)
    assert certificate.coverage.rejected > 0
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["head", "suffix+head"])
def test_bets_on_a_heads_own_distribution_decide(run, model, prompts, tmp_path, name):
    target = AutoModelForCausalLM.from_pretrained(model)
    meta = headfile.meta_for(target, tuple(range(40, 140)), target="tiny", training={}, licence="")
    headfile.save(tmp_path, Head(shape_for(target)), meta)
    how = ("--target", model, "--prompts", prompts, *QUICK, "--save", str(tmp_path / "audit.json"))
    said = run("audit", "--drafter", f"{name}:{tmp_path}", *how)
    assert said.status == 0, said.out + said.err
    certificate = dp.Certificate.load(tmp_path / "audit.json")
    assert certificate.tested["drafter model"] == "a head of 100 tokens"
    drafted = ["toward the drafter's distribution", *(["toward copied text"] if name.startswith("suffix") else [])]
    assert certificate.smallest_bias == max(certificate.visible[bet] for bet in drafted)


def test_auto_is_the_drafter_it_stands_for(run, model, prompts):
    said = run("audit", "--target", model, "--drafter", "auto", "--prompts", prompts, "-n", "50", *QUICK)
    assert "toward copied text" in said.out
    assert "drafter         NGram" in said.out


def test_all_models_are_loaded_in_float32(run, model, draft_model, prompts, monkeypatch):
    wanted, loaded = [], load_module.load_model
    monkeypatch.setattr(load_module, "load_model", lambda spec, how: wanted.append(how.dtype) or loaded(spec, how))
    run("audit", "--target", model, "--draft-model", draft_model, "--prompts", prompts, "-n", "20", *QUICK)
    run("audit", "--target", model, "--engine", "transformers", "--prompts", prompts, "-n", "20", *QUICK)
    assert wanted == [torch.float32] * 4


def test_greedy_decoding_is_compared(run, model, prompts):
    said = run("audit", "--target", model, "--prompts", prompts, "--sampling", "temperature=0", *QUICK)
    assert said.status == 0, said.out + said.err
    assert "equality with the likeliest token" in said.out


def test_too_little_evidence_exits_with_2_and_can_be_resumed(run, model, prompts, tmp_path):
    kept, more = tmp_path / "audit.json", tmp_path / "more.json"
    first = run("audit", "--target", model, "--prompts", prompts, "-n", "100", *QUICK[2:], "--save", str(kept))
    assert first.status == 2, first.out + first.err
    assert "not enough evidence" in first.out
    again = run(
        "audit", "--target", model, "--num-draft-tokens", "2", "--resume", str(kept), "-n", "700", "--save", str(more)
    )
    assert again.status == 2, again.out + again.err
    assert dp.Certificate.load(more).tokens > dp.Certificate.load(kept).tokens >= 100


STUBBORN = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"tokens": [7] * asked["max_tokens"]}), flush=True)
"""


def test_a_wrong_program_exits_with_1_and_json_says_why(run, model, prompts, tmp_path):
    program = tmp_path / "stubborn.py"
    program.write_text(STUBBORN)
    said = run(
        "audit", "--engine", "command", "--command", f"{sys.executable} {program}", "--target", model,
        "--prompts", prompts, "--length", "8", "--json",
    )  # fmt: skip
    assert said.status == 1, said.out + said.err
    found = json.loads(said.out)
    assert found["verdict"] == "biased"
    assert found["found_by"] is not None


def test_transformers_own_prompt_lookup_can_be_audited(run, model, prompts):
    how = ("--prompts", prompts, "--length", "8", "--batch", "2", "-n", "16")
    said = run("audit", "--engine", "transformers-lookup", "--target", model, *how)
    assert said.status == 2, said.out + said.err
    assert "transformers, prompt lookup" in said.out
    assert "from the decoder's trace" in said.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sampling", "warm"), "'warm' is not NAME=NUMBER"),
        (("--sampling", "heat=2"), "names is unknown: heat"),
        (("--sampling", "top_p=2"), "top_p must be a number"),
        (("--engine", "transformers-assisted"), "needs --draft-model"),
        (("--engine", "command"), "must be given together"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_loaded(run, options, message):
    said = run("audit", "--target", "no-such-model", *options)
    assert said.status == 2
    assert message in said.err
