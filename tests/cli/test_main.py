"""The entry point: help without heavy imports, errors in one line."""

import subprocess
import sys
from dataclasses import fields
from pkgutil import iter_modules

import click
import pytest

from draftproof import cli
from draftproof.cli import options, prompt_file
from draftproof.cli.main import COMMANDS
from draftproof.core.sampling import SamplingParams
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
        (["generat"], "No such command 'generat'; did you mean generate?"),
        (["zzz"], "No such command 'zzz'; the commands are generate, chat"),
        (["generate", "fox", "--drafter", "ngramm"], "not 'ngramm'; did you mean ngram?"),
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


@pytest.mark.parametrize("command", [("generate", "fox"), ("explain", "fox"), ("chat",), ("bench",)], ids=" ".join)
def test_a_wrong_temperature_is_refused_before_torch_is_imported(command):
    arguments = [*command, "--temperature", "-1"]
    code = f"from draftproof.cli.main import main\ntry: main({arguments})\nexcept SystemExit as e: assert e.code == 2"
    shown = heavy_modules_after(code)
    assert "'--temperature': -1.0 is not in the range x>=0." in " ".join(shown)
    assert shown[-1] == "examples)"


WRONG_VALUES = {
    "temperature": ("-1", "nan", "inf", "hot"),
    "top-k": ("-1", "2.5"),
    "top-p": ("0", "1.1", "nan"),
    "min-p": ("-0.1", "1.1"),
    "seed": (str(2**63), "1.5"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG_VALUES for value in WRONG_VALUES[name]])
def test_a_wrong_number_is_refused_with_the_name_of_its_option(run, name, value):
    said = run("generate", "hello", "--target", "no-such-model", f"--{name}", value)
    assert said.status == 2
    assert f"'--{name}'" in said.err
    assert "None" not in said.err


@pytest.mark.parametrize("value", ["-3", "-1", "0", "0.5", "1", "1.5", "7", str(2**62), str(2**63), "inf", "nan"])
@pytest.mark.parametrize("field", options.SAMPLING)
def test_options_accept_what_the_library_accepts(field, value):
    """A top_k of 0 is off on the command line; in the library, off is None."""

    def accepted(make, *errors):
        try:
            make()
        except errors:
            return False
        return True

    number = int(value) if value.lstrip("-").isdecimal() else float(value)
    by_option = accepted(lambda: options.SAMPLING[field].convert(value, None, None), click.BadParameter)
    by_library = accepted(lambda: SamplingParams(**options.switch_off_zero({field: number})), ValueError, TypeError)
    assert by_option == by_library


def test_the_names_in_help_are_the_names_that_exist():
    assert set(options.RULES) == set(RULES)
    assert set(DRAFTERS) < set(options.DRAFTERS)
    assert all(is_name(name.replace("N", "1")) for name in options.DRAFTERS)
    assert set(prompt_file.SAMPLING_FIELDS) == {field.name for field in fields(SamplingParams)}


def test_a_misspelt_drafter_is_not_looked_for_on_a_hub(run):
    said = run("generate", "hello", "--drafter", "nrgam")
    assert said.status == 2
    assert "--draft-model" in said.err
