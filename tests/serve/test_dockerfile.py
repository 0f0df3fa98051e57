"""The Dockerfile copies what is there, and its entry point is a command that exists."""

import json
import re
from pathlib import Path

from click.testing import CliRunner

from draftproof.cli.main import app

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def arguments_of(instruction: str) -> list[str]:
    return [line.removeprefix(instruction).strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_everything_that_is_copied_exists_and_is_not_ignored():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in arguments_of("COPY") for name in line.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_entry_point_is_a_list_and_its_options_exist():
    command, *arguments = json.loads(arguments_of("ENTRYPOINT")[0])
    assert command == "draftproof"
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0


def test_it_installs_the_extra_and_the_torch_of_the_constraints():
    steps = " ".join(arguments_of("RUN"))
    assert '".[serve]"' in steps
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert pinned[0] in steps
