"""What every test runs under: no model hub, and one bundled model for the whole session."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: a test that asks a hub should fail at once
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # chosen when Triton is imported, which torch may do at any time

import pytest
from hypothesis import settings

# Every run tries the same examples: a test that fails for one in a million is found by looking, not by landing.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of the bundled model, out of the user's own cache: fetched once for each machine."""
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


def pytest_addoption(parser):
    parser.addoption("--write-controls", action="store_true", help="keep the table of controls in docs/controls.md")


def pytest_terminal_summary(terminalreporter, config):
    """Print which test caught which wrong verifier, and keep the table if asked to."""
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    rows = [value for report in reports for name, value in report.user_properties if name == "control"]
    if rows:
        terminalreporter.section("wrong verifiers")
        terminalreporter.write_line("\n".join(rows))
    if rows and config.getoption("--write-controls"):
        CONTROLS.write_text(HEAD + "\n".join(rows) + "\n")
