"""Fixtures for the commands: tiny models on disk, and `run`, which calls a command in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cli.tiny import save_model
from draftproof.cli import console
from draftproof.cli.main import main


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def draft_model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("draft"), layers=1, seed=1))


@pytest.fixture
def run(capsys) -> Callable[..., Ran]:
    """Return a function that runs a command in this process and captures its status and output."""

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        captured = capsys.readouterr()
        return Ran(int(left.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch):
    """Ignore the terminal width that xdist passes to its workers; in a narrow one, tables cut off names."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def silent_spinner(monkeypatch):
    """Never print "Loading …" to a stderr that is no terminal: on a busy machine, loading takes longer than usual."""
    monkeypatch.setattr(console, "SILENT_SECONDS", 600.0)
