"""Set up all tests: no model hub, fixed hypothesis examples, one bundled model for the session, the controls table."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test that needs a hub must fail at once
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which torch may do at any time

import pytest
from hypothesis import settings

from budget import thin

# Every run tries the same examples, so that a failure is reproducible.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def smollm2():
    """Return (model, tokenizer) of the bundled model from the user's cache: downloaded once for each machine."""
    from draftproof.models import bundled

    try:
        return bundled.load()
    except bundled.UnavailableError as error:
        pytest.skip(str(error))


CONTROLS = Path(__file__).parent.parent / "docs" / "controls.md"
HEAD = """# Wrong verifiers, and what catches them

Each of these verifiers has a real defect of the field (`tests/controls.py`): its output does not have the target's
distribution. The tests that the exact rules pass reject every one of them. `make controls` writes this table. TV is the
total variation between the distribution of the output and the target's.

| control | what it does wrong | caught by | sample | found |
|---|---|---|---|---|
"""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    thin(items)


def pytest_addoption(parser):
    parser.addoption("--write-controls", action="store_true", help="write the table of controls to docs/controls.md")


def pytest_terminal_summary(terminalreporter, config):
    """Print which test caught which wrong verifier; with --write-controls, write the table to the documentation."""
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    rows = [value for report in reports for name, value in report.user_properties if name == "control"]
    if rows:
        terminalreporter.section("wrong verifiers")
        terminalreporter.write_line("\n".join(rows))
    if rows and config.getoption("--write-controls"):
        CONTROLS.write_text(HEAD + "\n".join(rows) + "\n")
