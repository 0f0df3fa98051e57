"""`draftproof audit` end to end on a tiny model: what it prints and saves, and its exit status."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import draftproof as dp
from auditor import two_tokenizers
from auditor.http_server import Fake, served
from draftproof.auditor import drafter as auditor_drafter
from draftproof.auditor.decoders import maker
from draftproof.cli import audit as audit_command
from draftproof.engine import load as load_module
from draftproof.models import bundled
from draftproof.models.head import attach
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


@pytest.mark.parametrize("name", ["", "suffix+head:"], ids=["a folder alone", "suffix+head"])
def test_bets_on_a_heads_own_distribution_decide(run, model, prompts, tmp_path, name):
    target = AutoModelForCausalLM.from_pretrained(model)
    meta = headfile.meta_for(target, tuple(range(40, 140)), target="tiny", training={}, licence="")
    headfile.save(tmp_path, Head(shape_for(target)), meta)
    how = ("--target", model, "--prompts", prompts, *QUICK, "--save", str(tmp_path / "audit.json"))
    said = run("audit", "--drafter", f"{name}{tmp_path}", *how)
    assert said.status == 0, said.out + said.err
    certificate = dp.Certificate.load(tmp_path / "audit.json")
    assert certificate.tested["drafter model"] == "a head of 100 tokens"
    drafted = ["toward the drafter's distribution", *(["toward copied text"] if name.startswith("suffix") else [])]
    assert certificate.smallest_bias == max(certificate.visible[bet] for bet in drafted)


def test_the_default_drafter_is_the_engines_and_without_a_head_for_the_target_it_copies(run, model, prompts):
    said = run("audit", "--target", model, "--prompts", prompts, "-n", "50", *QUICK)
    assert "toward copied text" in said.out
    assert "drafter         NGram" in said.out


def test_the_default_drafter_is_the_head_if_one_is_shipped_for_the_target(run, model, prompts, tmp_path, monkeypatch):
    target = AutoModelForCausalLM.from_pretrained(model)
    meta = headfile.meta_for(target, tuple(range(40, 140)), target="tiny", training={}, licence="")
    headfile.save(tmp_path, Head(shape_for(target)), meta)
    for module in (attach, auditor_drafter):
        monkeypatch.setattr(module, "SHIPPED", tmp_path)
    said = run("audit", "--target", model, "--prompts", prompts, "-n", "50", *QUICK)
    assert said.status == 3, said.out + said.err
    assert "drafter         Head" in said.out
    assert "drafter model   a head of 100 tokens" in said.out


def test_the_default_drafter_of_other_engines_is_what_they_draft_with(run, model, prompts, monkeypatch):
    asked = []
    monkeypatch.setattr(audit_command, "run_audit", lambda choice, settings: asked.append(choice.drafter) or 0)
    program = ("--engine", "command", "--command", "decode")
    for options in (
        (),
        ("--engine", "transformers"),
        ("--engine", "transformers-lookup"),
        ("--engine", "vllm"),
        ("--decoder", "openai", "--url", "http://127.0.0.1:1"),
        program,
    ):
        run("audit", *options)
    run("audit", *program, "--drafter", "suffix")
    assert asked == ["auto", None, "prompt-lookup", "ngram", None, None, "suffix"]


@pytest.mark.parametrize(
    ("speculation", "drafter"),
    [
        ({"method": "ngram"}, "ngram"),
        ({"method": "suffix"}, "suffix"),
        ({"method": "custom_class", "model": "draftproof.integrations.vllm.Suffix"}, "suffix"),
        ({"method": "custom_class", "model": "another.Drafter"}, None),
        ({"method": "draft_model", "model": "folder"}, "folder"),
        ({"method": "eagle3", "model": "folder"}, "eagle3:folder"),
    ],
)
def test_the_drafter_of_vllm_is_read_off_its_speculative_config(run, monkeypatch, speculation, drafter):
    asked = []
    monkeypatch.setattr(audit_command, "run_audit", lambda choice, settings: asked.append((choice, settings)) or 0)
    config = ("--speculative-config", json.dumps(speculation), "--additional-config", '{"draftproof": {}}')
    run("audit", "--engine", "vllm", *config)
    [(choice, settings)] = asked
    assert choice.drafter == drafter
    assert settings.speculative_config == speculation
    assert settings.additional_config == {"draftproof": {}}


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


def test_too_little_evidence_exits_with_3_and_can_be_resumed(run, model, prompts, tmp_path):
    kept, more = tmp_path / "audit.json", tmp_path / "more.json"
    first = run("audit", "--target", model, "--prompts", prompts, "-n", "100", *QUICK[2:], "--save", str(kept))
    assert first.status == 3, first.out + first.err
    assert "not enough evidence" in first.out
    again = run(
        "audit", "--target", model, "--num-draft-tokens", "2", "--resume", str(kept), "-n", "700", "--save", str(more)
    )
    assert again.status == 3, again.out + again.err
    assert dp.Certificate.load(more).tokens > dp.Certificate.load(kept).tokens >= 100


@pytest.fixture(scope="module")
def universal(tmp_path_factory):
    """Return the options of an audit of two models with different tokenizers."""
    folder = tmp_path_factory.mktemp("universal")
    target, assistant = two_tokenizers.save(folder)
    lines = [" ".join(two_tokenizers.SHARED[(7 * i + j) % 30] for j in range(6)) for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = ("--target", target, "--draft-model", assistant, "--prompts", str(folder / "prompts.jsonl"))
    return ("audit", "--engine", "transformers-universal", *files, "--length", "16", "--batch", "8", "-n", "2000")


@pytest.mark.statistical
def test_universal_assisted_generation_of_transformers_5_22_exits_with_1(run, universal):
    """α = 1e-6 and 2,000 tokens: `tests/auditor/test_universal.py` says why it is biased, and how soon it is found."""
    said = run(*universal)
    assert said.status == 1, said.out + said.err
    assert "verdict: biased" in said.out
    assert "transformers, universal assisted" in said.out


@pytest.mark.statistical
def test_universal_assisted_generation_with_its_vocabulary_sorted_by_id_exits_with_0(run, universal, monkeypatch):
    """The control: a mixture of 0.3 with the drafts would have been found."""
    fast = PreTrainedTokenizerFast
    monkeypatch.setattr(fast, "get_vocab", two_tokenizers.sorted_by_id(fast.get_vocab))
    said = run(*universal, "--bias", "0.3")
    assert said.status == 0, said.out + said.err
    assert "verdict: no bias found" in said.out


@pytest.mark.statistical
def test_our_own_drafts_over_two_vocabularies_exit_with_0(run, universal):
    """The same models and prompts; TLI is chosen by their overlap. α = 1e-6; a mixture of 0.3 would have been found."""
    target, *files = universal[3:]
    said = run("audit", target, *files, "--bias", "0.3", "--num-draft-tokens", "5")
    assert said.status == 0, said.out + said.err
    assert "TLI" in said.out


OUTSIDE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"tokens": [7, 10**6]}), flush=True)
"""


def test_a_program_that_emits_a_token_outside_the_vocabulary_is_biased(run, model, prompts, tmp_path):
    program = tmp_path / "outside.py"
    program.write_text(OUTSIDE)
    command = ("--engine", "command", "--command", f"{sys.executable} {program}")
    said = run("audit", *command, "--target", model, "--prompts", prompts)
    assert said.status == 1, said.out + said.err
    assert "impossible token 1000000 at position 1 of text 0: the vocabulary (ids 0 to " in said.out


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


def test_a_decoder_that_fails_is_not_called_biased(run, monkeypatch):
    def fail(choice, settings):
        raise RuntimeError("CPU Generator does not use offset")

    monkeypatch.setattr(audit_command, "run_audit", fail)
    said = run("audit", "--engine", "vllm")
    assert said.status == 4
    assert said.err == "Error: the audit failed without a verdict: CPU Generator does not use offset\n"


def test_vllm_gets_the_folder_of_the_bundled_model(monkeypatch, tmp_path):
    monkeypatch.setattr(bundled, "fetch", lambda: tmp_path)
    assert audit_command._model_folder("smollm2") == str(tmp_path)
    assert audit_command._model_folder("another/model") == "another/model"


def test_transformers_own_prompt_lookup_can_be_audited(run, model, prompts):
    how = ("--prompts", prompts, "--length", "8", "--batch", "2", "-n", "16")
    said = run("audit", "--engine", "transformers-lookup", "--target", model, *how)
    assert said.status == 3, said.out + said.err
    assert "transformers, prompt lookup" in said.out
    assert "from the decoder's trace" in said.out


def test_a_server_can_be_audited_under_load(run, model, prompts):
    fake = Fake(maker("transformers_plain")(AutoModelForCausalLM.from_pretrained(model)), api_key="secret")
    with served(fake) as url:
        options = ("--url", url, "--api-key", "secret", "--concurrency", "2", "--drafter", "ngram")
        said = run("audit", "--engine", "openai", *options, "--target", model, "--prompts", prompts, "-n", "60")
    assert said.status == 3, said.out + said.err
    assert f"url             {url}" in said.out
    assert "2 at a time" in said.out
    assert "secret" not in said.out
    assert fake.most_running == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sampling", "warm"), "'warm' is not NAME=NUMBER"),
        (("--sampling", "heat=2"), "names is unknown: heat"),
        (("--sampling", "top_p=2"), "top_p must be a number"),
        (("--alpha", "1"), "1.0 is not in the range 0<x<1"),
        (("--bias", "nan"), "'--bias': 'nan' is not a finite number"),
        (("--seed", str(2**62)), "is not in the range"),
        (("--engine", "transformers-assisted"), "--engine transformers-assisted needs --draft-model"),
        (("--engine", "transformers-assisted", "--drafter", "early-exit:2"), "needs --draft-model"),
        (("--engine", "transformers-universal", "--drafter", "head"), "transformers-universal needs --draft-model"),
        (("--engine", "command"), "must be given together"),
        (("--engine", "openai"), "--engine openai and --url must be given together"),
        (("--url", "http://127.0.0.1:1"), "--engine openai and --url must be given together"),
        (("--concurrency", "2"), "--concurrency is for --engine openai"),
        (("--speculative-config", "{}"), "--speculative-config is for --engine vllm"),
        (("--additional-config", "{}"), "--additional-config is for --engine vllm"),
        (("--engine", "vllm", "--additional-config", "draftproof"), "'draftproof' is not JSON"),
        (("--engine", "vllm", "--speculative-config", "[]"), "must be a JSON object"),
        (("--engine", "vllm", "--rule", "token"), "the plug-in takes the rule from --additional-config"),
        (("--engine", "vllm", "--drafter", "head"), "vLLM has no drafter 'head'"),
        (("--engine", "vllm", "--drafter", "early-exit:3"), "vLLM has no drafter 'early-exit:3'"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_loaded(run, options, message):
    said = run("audit", "--target", "no-such-model", *options)
    assert said.status == 2
    assert message in said.err
