"""Run a reference package in its own environment, which `make test-references` makes."""

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PYTHON = os.environ.get("DRAFTPROOF_REFERENCES", str(TESTS.parent / ".venv-references" / "bin" / "python"))


def run_reference(kind: str, folder: Path, *arguments: str) -> None:
    """Run KIND_reference.py, which writes to a folder; skip the test where the environment is not there."""
    if not Path(PYTHON).is_file():
        pytest.skip("the reference packages are not installed: make test-references")
    paths = {"PYTHONPATH": str(TESTS), "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-m", f"models.{kind}_reference", str(folder), *arguments]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
