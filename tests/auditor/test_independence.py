"""The auditor imports nothing of what it audits: neither the engine, nor our own warp, nor our drafters."""

import re
from pathlib import Path

import pytest

import draftproof

FOLDER = Path(draftproof.__file__).parent / "auditor"
FORBIDDEN = (
    r"draftproof\.(engine|drafters|kernels|integrations)|import .*\bwarp\b|core\.(filters|penalties|distribution|draw)"
)
PROVES = {"enumerate.py"}
"""Files that prove rules exact, and so must import what rules return."""


def shared(source: str) -> list[str]:
    return [line for line in source.splitlines() if re.search(FORBIDDEN, line) and "import" in line]


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda f: f.name)
def test_the_auditor_uses_nothing_of_the_decoder(file):
    if file.name not in PROVES:
        assert not shared(file.read_text())


@pytest.mark.parametrize(
    "line",
    [
        "from draftproof.core.sampling import SamplingParams, warp",
        "import draftproof.engine.round",
        "from draftproof.core.distribution import Distribution",
    ],
)
def test_that_test_can_fail(line):
    assert shared(line)


def test_audit_stays_a_function_whatever_was_imported_first():
    import draftproof.auditor.enumerate

    assert callable(draftproof.audit)
