"""Check that imports go down the table of layers and never up, and that this check can fail."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import draftproof

ROOT = Path(draftproof.__file__).parent
MAY_IMPORT = {
    "core": set(),
    "kernels": {"core"},
    "rules": {"core", "kernels"},
    "models": {"core", "kernels"},
    "drafters": {"core", "kernels", "models"},
    "engine": {"core", "kernels", "rules", "models", "drafters"},
    "auditor": {"core", "rules", "models"},
    "bench": {"core", "rules", "models", "drafters", "engine"},
    "explain": {"core", "rules", "models", "drafters", "engine"},
    "integrations": {"core", "kernels", "rules", "models", "drafters", "engine"},
    "train": {"core", "rules", "models", "drafters", "engine"},
    "serve": {"core", "models", "engine", "integrations"},
}
TOP = set(MAY_IMPORT) | {"cli"}  # the package's own files are above all folders
MAY_IMPORT["cli"] = TOP
LAZY_HOSTS = {"core": {"transformers", "triton"}, "rules": {"transformers", "triton"}, "drafters": {"transformers"}}


def breaches(layer: str, source: str) -> list[str]:
    """Return the modules that a file of this layer imports and may not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            head, *rest = name.split(".")
            if head in LAZY_HOSTS.get(layer, set()) or (
                head == "draftproof" and rest and rest[0] != layer and rest[0] not in MAY_IMPORT.get(layer, TOP)
            ):
                found.append(name)
    return found


FILES = sorted(f for f in ROOT.rglob("*.py") if len(f.relative_to(ROOT).parts) > 1)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_only_go_down(file):
    layer = file.relative_to(ROOT).parts[0]
    assert layer in MAY_IMPORT, f"{layer}/ is not in the table MAY_IMPORT"
    assert not breaches(layer, file.read_text())


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("core", "from draftproof.rules.token import token"),
        ("auditor", "import draftproof.engine.round"),
        ("rules", "def f():\n    from draftproof.models import Model"),
        ("core", "import transformers"),
    ],
)
def test_the_layering_test_can_fail(layer, line):
    assert breaches(layer, line)


def test_importing_draftproof_imports_neither_torch_nor_transformers():
    code = "import sys, draftproof; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_verifying_does_not_import_transformers():
    code = "import sys, draftproof; draftproof.verify; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FORBIDDEN = ("utils", "common", "misc", "helpers", "manager", "handler", "base")


def test_no_file_has_a_name_that_says_nothing():
    assert not [f for f in ROOT.rglob("*.py") if f.stem.lower() in FORBIDDEN]


def test_the_engine_names_no_concrete_drafter():
    concrete = ("NGram", "Suffix", "PromptLookup", "ModelDrafter", "EarlyExit", "isinstance(drafter")
    rounds = [
        f for f in (ROOT / "engine").glob("*.py") if f.stem in ("round", "engine", "stop", "request", "draft_length")
    ]
    assert not [(f.name, word) for f in rounds for word in concrete if word in f.read_text()]


@pytest.mark.parametrize("name", draftproof.__all__)
def test_every_public_name_exists(name):
    assert getattr(draftproof, name) is not None


def test_verify_stays_a_function_whatever_was_imported_first():
    code = "import draftproof.rules.token, draftproof as dp; import sys; sys.exit(not callable(dp.verify))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
