"""The entry point: help without heavy imports, errors in one line."""

import subprocess
import sys
from pkgutil import iter_modules

import pytest

from draftproof import cli
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


def heavy_modules_after(code):
    """Run Python code in a fresh process and return the slow modules it has imported."""
    heavy = ("torch", "transformers", "rich", "prompt_toolkit", "matplotlib")
    report = f"\nimport sys; sys.stderr.write(' '.join(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + report], check=True, capture_output=True, text=True)
    return done.stderr.split()


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments):
    code = f"from draftproof.cli.main import main\ntry: main({arguments})\nexcept SystemExit: pass"
    assert heavy_modules_after(code) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_importing_a_command_imports_nothing_heavy(command):
    assert heavy_modules_after(f"import {COMMANDS[command]}") == []


@pytest.mark.parametrize("module", sorted(module.name for module in iter_modules(cli.__path__)))
def test_importing_any_file_of_the_command_line_imports_neither_torch_nor_transformers(module):
    if module != "__main__":  # importing it runs the command line
        assert not {"torch", "transformers"} & set(heavy_modules_after(f"import draftproof.cli.{module}"))


def test_the_check_for_heavy_imports_finds_one():
    assert heavy_modules_after("import rich") == ["rich"]


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


def test_the_names_in_help_are_the_names_that_exist():
    assert set(options.RULES) == set(RULES)
    assert set(DRAFTERS) < set(options.DRAFTERS)
    assert all(is_name(name.replace("N", "1")) for name in options.DRAFTERS)


def test_a_misspelt_drafter_is_not_looked_for_on_a_hub(run):
    said = run("generate", "hello", "--drafter", "nrgam")
    assert said.status == 2
    assert "--draft-model" in said.err
