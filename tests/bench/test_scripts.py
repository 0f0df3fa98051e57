"""What the scripts in benchmarks/ import from the package is there: no other test runs these documented commands."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))


def imported(script: Path) -> list[tuple[str, str]]:
    """Return the modules of the package and the names that a script imports from them."""
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    return [
        (node.module, alias.name)
        for node in nodes
        if node.module is not None and node.module.partition(".")[0] == "draftproof"
        for alias in node.names
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_names_that_a_script_imports_exist(script):
    for module, name in imported(script):
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "draftproof":
                raise
            continue  # needs a package that is not installed, such as triton
        if not hasattr(found, name):
            import_module(f"{module}.{name}")  # raises an error that names what is missing


def test_a_name_that_is_gone_is_found(tmp_path):
    """Control."""
    script = tmp_path / "script.py"
    script.write_text("from draftproof.engine.draft_length import DraftLengthPolicy\n")
    with pytest.raises(ModuleNotFoundError, match="DraftLengthPolicy"):
        test_the_names_that_a_script_imports_exist(script)
