"""The door: help that is quick and teaches, errors in one line."""

import subprocess
import sys

import pytest

from draftproof.cli import options
from draftproof.cli.main import COMMANDS
from draftproof.drafters.registry import DRAFTERS, is_name
from draftproof.rules import RULES


def test_help_names_every_command_and_gives_examples(run):
    said = run("--help")
    assert said.status == 0
    assert all(name in said.out for name in COMMANDS)
    assert "First steps" in said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    said = run(command, "--help")
    assert said.status == 0
    assert "--debug" in said.out
    assert "Examples:" in said.out or command == "demo"


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom draftproof.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'rich', 'prompt_toolkit', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_no_command_shows_the_help(run):
    said = run()
    assert said.status == 0
    assert "First steps" in said.out


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (["genrate"], "No such command 'genrate'"),
        (["explain"], "Missing argument 'PROMPT'"),
        (["generate", "fox", "--rule", "strict"], "'strict' is not one of"),
        (["generate", "fox", "--num-draft-tokens", "many"], "neither 'auto' nor a whole number"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line_that_names_the_help(run, call, complaint):
    said = run(*call)
    assert said.status == 2
    assert complaint in said.err
    assert "--help`" in said.err
    assert said.err.count("\n") == 1


def test_errors_are_one_line_that_says_what_to_do(run, tmp_path):
    said = run("generate", "hello", "--target", str(tmp_path))
    assert said.status == 2
    assert said.err.count("\n") == 1
    assert said.err.startswith("Error: ")
    assert "neither 'smollm2' (bundled), a model folder nor a hub id" in said.err


def test_debug_shows_the_traceback(tmp_path, capsys):
    from draftproof.cli.main import main

    with pytest.raises(ValueError, match="neither"):
        main(["generate", "hello", "--debug", "--target", str(tmp_path)])


def test_drafters_that_do_not_fit_are_refused_with_the_reason(run, model, tmp_path):
    said = run("generate", "hello", "--target", model, "--drafter", f"head:{tmp_path}")
    assert said.status == 2
    assert "is no head" in said.err
    assert said.err.count("\n") == 1


def test_wrong_numbers_name_the_option(run, model):
    said = run("generate", "hello", "--target", model, "--temperature", "-1")
    assert said.status == 2
    assert "temperature must be a number" in said.err
    assert run("generate", "hello", "--num-draft-tokens", "many").status == 2


def test_what_is_on_offer_is_what_there_is():
    assert set(options.RULES) == set(RULES)
    assert set(DRAFTERS) < set(options.DRAFTERS)
    assert all(is_name(name.replace("N", "1")) for name in options.DRAFTERS)


def test_a_misspelt_drafter_is_not_looked_for_on_a_hub(run):
    said = run("generate", "hello", "--drafter", "nrgam")
    assert said.status == 2
    assert "--draft-model" in said.err
