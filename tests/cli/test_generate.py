"""`draftproof generate` with a prompt, stdin, or a file of prompts."""

import io
import json
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from draftproof.cli.engines import sampling_for
from draftproof.cli.generate import Answer, read_prompts, stats_line, stream_answer
from draftproof.core.sampling import SamplingParams
from draftproof.engine.load import load
from draftproof.engine.request import Stats

SHORT = ("--max-tokens", "12", "--seed", "3")


def test_a_prompt_gives_its_text(run, model):
    said = run("generate", "the quick", "--target", model, *SHORT)
    assert said.status == 0
    assert said.out.endswith("\n")
    assert len(said.out) > 1


def test_json_carries_text_tokens_and_figures(run, model):
    made = json.loads(run("generate", "the quick", "--target", model, "--json", *SHORT).out)
    assert len(made["tokens"]) == made["stats"]["emitted"] == 12
    assert made["finish_reason"] == "length"
    assert made["stats"]["first_token_seconds"] <= made["stats"]["wall_seconds"]


def test_stats_go_to_stderr(run, model):
    said = run("generate", "the quick", "--target", model, "--stats", *SHORT)
    assert "tokens in" in said.err
    assert "tokens in" not in said.out


def test_the_prompt_may_come_on_stdin(run, model, monkeypatch):
    wanted = run("generate", "the quick", "--target", model, *SHORT).out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the quick\n")))
    assert run("generate", "--target", model, *SHORT).out == wanted


def test_coupled_gives_the_text_of_plain_decoding(run, model, draft_model):
    plain = run("generate", "the quick", "--target", model, "--drafter", "none", *SHORT)
    coupled = run("generate", "the quick", "--target", model, "--draft-model", draft_model, "--rule", "coupled", *SHORT)
    assert plain.out == coupled.out


def test_sampling_flags_reach_the_engine(run, model):
    greedy = [
        json.loads(run("generate", "fox", "--target", model, "--json", "--max-tokens", "8", *how).out)["tokens"]
        for how in (("--temperature", "0"), ("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1"))
    ]
    assert all(tokens == greedy[0] for tokens in greedy)


def test_a_stop_string_ends_the_text(run, model):
    whole = run("generate", "fox", "--target", model, "--temperature", "0", "--max-tokens", "20").out
    middle = whole[5:7]
    said = run("generate", "fox", "--target", model, "--temperature", "0", "--max-tokens", "20", "--stop", middle)
    assert said.out == whole[: whole.index(middle)] + "\n"


def test_without_options_the_command_samples_as_the_library_does(run, model):
    """The tiny model sets no sampling parameters, so the default temperature is 0.7."""
    engine = load(model)
    default = getattr(engine, "default_sampling", None) or SamplingParams(temperature=0.7)
    made = json.loads(run("generate", "fox", "--target", model, "--json", *SHORT).out)
    assert made["tokens"] == engine.generate("fox", replace(default, seed=3), max_tokens=12).tokens


def test_the_default_is_the_model_s_own_and_only_given_options_replace_it():
    default = SamplingParams(temperature=0.2, top_k=40)
    engine = SimpleNamespace(default_sampling=default)
    assert sampling_for(engine, {}) == default
    assert sampling_for(engine, {"top_k": None, "seed": 1}) == replace(default, top_k=None, seed=1)
    assert sampling_for(SimpleNamespace(), {}) == SamplingParams(temperature=0.7)


@pytest.mark.parametrize(
    "flags",
    [
        ("--temperature", "0.5"), ("--top-k", "5"), ("--top-p", "0.9"), ("--min-p", "0.1"), ("--seed", "1"),
        ("--stop", "x"), ("--drafter", "ngram"), ("--rule", "token"), ("--num-draft-tokens", "3"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_beams_refuse_what_they_would_ignore_before_anything_is_loaded(run, flags):
    said = run("generate", "fox", "--target", "no-such-model", "--num-beams", "2", *flags)
    assert said.status == 2
    assert f"leave out {flags[0]}" in said.err


@pytest.mark.parametrize("beams", ["0", "-1"])
def test_fewer_beams_than_one_are_refused(run, beams):
    said = run("generate", "fox", "--target", "no-such-model", "--num-beams", beams)
    assert said.status == 2
    assert "'--num-beams'" in said.err


def test_a_line_with_sampling_options_is_refused_under_beam_search(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fox"\n{"prompt": "fox", "seed": 1}')
    said = run("generate", "--prompts", str(file), "--target", "no-such-model", "--num-beams", "2")
    assert said.status == 2
    assert f"{file}, line 2: beam search (--num-beams) would ignore seed" in said.err


def test_beams_are_searched(run, model):
    made = json.loads(run("generate", "fox", "--target", model, "--num-beams", "2", "--json", "--max-tokens", "6").out)
    assert len(made["tokens"]) == 6


def test_two_drafters_are_refused(run, model):
    said = run("generate", "fox", "--drafter", "ngram", "--draft-model", model)
    assert said.status == 2
    assert "give only one of them" in said.err


def test_a_file_of_prompts_gives_json_lines_in_order(run, model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "fox"}]
    file.write_text("\n".join(json.dumps(line) for line in ("one", {"prompt": "two", "id": 2}, {"prompt": chat})))
    said = run("generate", "--prompts", str(file), "--target", model, "--stats", *SHORT)
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two", chat]
    assert lines[1]["id"] == 2
    assert all(len(line["tokens"]) == 12 for line in lines)
    assert "3 prompts, 0 failed" in said.err


def test_the_options_of_a_line_are_honoured(run, model, tmp_path):
    """Every line has the text that the same options give on the command line."""
    whole = run("generate", "fox", "--target", model, "--temperature", "0", "--max-tokens", "20").out
    lines = [
        {"prompt": "fox", "id": "a"},
        {"prompt": "fox", "max_tokens": 5, "seed": 8},
        {"prompt": "fox", "temperature": 0, "max_tokens": 20},
        {"prompt": "fox", "temperature": 0, "max_tokens": 20, "stop": whole[5:7]},
        {"prompt": "fox", "top_k": 1, "metadata": {"temperature": 3}},
        {"prompt": "fox", "temperature": 0, "logit_bias": {"90": 1000}, "max_tokens": 3},
        {"prompt": "fox", "id": "a", "seed": None},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    said = run("generate", "--prompts", str(file), "--target", model, *SHORT)
    assert said.status == 0, said.err
    made = [json.loads(line) for line in said.out.splitlines()]

    def alone(*flags):
        return json.loads(run("generate", "fox", "--target", model, "--json", *flags).out)["tokens"]

    assert made[0]["tokens"] == made[6]["tokens"] == alone(*SHORT)
    assert made[1]["tokens"] == alone("--max-tokens", "5", "--seed", "8")
    assert made[2]["text"] + "\n" == whole
    assert made[3]["text"] == whole[: whole.index(whole[5:7])]
    assert made[4]["tokens"] == alone("--top-k", "1", *SHORT)
    assert made[5]["tokens"] == [90, 90, 90]
    assert [line["prompt"] for line in made] == ["fox"] * 7
    assert made[4]["metadata"] == {"temperature": 3}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no prompts"),
        ("fox", "line 1: not JSON"),
        ('{"text": "fox"}', 'an object with "prompt"'),
        ('"fox"\n\n{"prompt": "fox", "max_new_tokens": 3}', 'line 3: "max_new_tokens" looks like an option'),
        ('{"prompt": "fox", "temprature": 1}', 'did you mean "temperature"?'),
        ('{"prompt": "fox", "top-p": 1}', 'did you mean "top_p"?'),
        ('{"prompt": "fox", "num_beams": 2}', 'into "metadata"'),
        ('{"prompt": "fox", "temperature": -1}', "line 1: temperature must be a number"),
        ('{"prompt": "fox", "temperature": "hot"}', "line 1: temperature must be a number"),
        ('{"prompt": "fox", "top_k": -1}', "line 1: top_k must be 0 (off) or a whole number"),
        ('{"prompt": "fox", "max_tokens": -1}', "line 1: max_tokens must be a whole number ≥ 0; got -1"),
        ('{"prompt": "fox", "max_tokens": true}', "line 1: max_tokens must be a whole number"),
        ('{"prompt": "fox", "stop": 5}', "line 1: stop must be a text"),
        ('{"prompt": "fox", "stop": ["a", ""]}', "line 1: stop must be a text"),
        ('{"prompt": "fox", "logit_bias": {"fox": 1}}', "line 1: logit_bias must be an object of token ids"),
        ('{"prompt": "fox", "logit_bias": {"9": "x"}}', "line 1: logit_bias of token 9 must be a number; got 'x'"),
        ('{"prompt": "fox", "seed": 1.5}', "line 1: seed must be a whole number; got 1.5"),
        (b'"fox"\n"f\xf6x"', "line 2: not valid UTF-8 (byte 0xf6 at offset 2)"),
        ('"fox"\n"f\\ud800x"', "line 2: character 13 is U+D800, a lone surrogate"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_loaded(run, tmp_path, text, complaint):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = run("generate", "--prompts", str(file), "--target", "no-such-model")
    assert said.status == 2
    assert complaint in said.err


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff"one\u2028two"\r\n"three"\n'.encode())
    assert [item["prompt"] for item in read_prompts(file)] == ["one\u2028two", "three"]


def test_invalid_utf_8_on_stdin_is_named(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    said = run("generate", "--target", "no-such-model")
    assert said.status == 2
    assert "stdin: not valid UTF-8 (byte 0xe9 at offset 3)" in said.err


@pytest.mark.parametrize("command", ["generate", "explain"])
def test_a_lone_surrogate_in_the_prompt_is_named(run, command):
    said = run(command, "caf\udce9", "--target", "no-such-model")
    assert said.status == 2
    assert "PROMPT: character 3 is U+DCE9, a lone surrogate" in said.err


@pytest.mark.parametrize(
    ("deviation", "shown"),
    [(0.25, "up to 0.25 at a position"), (None, "unknown")],
)
def test_an_answer_that_is_not_exact_says_so(deviation, shown):
    chunk = SimpleNamespace(text="a", tokens=[1], stats=Stats(), finish_reason="stop", exact=False, deviation=deviation)
    answer = Answer()
    assert list(stream_answer(SimpleNamespace(stream=lambda prompt: [chunk]), "fox", {}, answer)) == ["a"]
    assert stats_line(answer).endswith(f"lossy rule: total variation {shown}")
    assert answer.as_dict()["exact"] is False


def test_an_exact_answer_says_nothing_about_it(run, model):
    said = run("generate", "fox", "--target", model, "--json", "--stats", *SHORT)
    assert "lossy" not in said.err
    assert "exact" not in json.loads(said.out)


INTERRUPTIBLE = (  # background jobs of a shell ignore SIGINT, and children inherit that
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from draftproof.cli.main import main; main(sys.argv[1:])"
)


def test_ctrl_c_keeps_the_text_so_far(model):
    command = [
        sys.executable,
        "-c",
        INTERRUPTIBLE,
        "generate",
        "fox",
        "--target",
        model,
        "--max-tokens",
        "900",
        "--temperature",
        "0",
        "--drafter",
        "none",
        "--stats",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert first
    assert rest.endswith(b"\n")
    assert 0 < int(err.split(b" tokens in")[0].split()[-1]) < 900


def test_a_closed_pipe_is_no_error(model):
    command = f"{sys.executable} -m draftproof.cli generate fox --target {model} --max-tokens 300 | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, check=False)
    assert b"Error" not in done.stderr
    assert b"Traceback" not in done.stderr
