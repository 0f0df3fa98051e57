from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cli.tiny import save_model
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
    """Run a command in this process, as the shell would."""

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as left:
            main(arguments)
        said = capsys.readouterr()
        return Ran(int(left.value.code or 0), said.out, said.err)

    return run


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch):
    """xdist tells its workers the width of the terminal it runs in, and a table would leave off its names."""
    monkeypatch.delenv("COLUMNS", raising=False)
