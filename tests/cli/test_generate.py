"""`draftproof generate` with a prompt, stdin, or a file of prompts."""

import io
import json
import signal
import subprocess
import sys

import pytest

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
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick\n"))
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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "no prompts"), ("fox", "line 1: not JSON"), ('{"text": "fox"}', 'an object with "prompt"')],
)
def test_a_wrong_file_is_refused_before_anything_is_loaded(run, tmp_path, text, complaint):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    said = run("generate", "--prompts", str(file), "--target", "no-such-model")
    assert said.status == 2
    assert complaint in said.err


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
