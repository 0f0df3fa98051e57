"""Show that the exactness tests can fail: every wrong verifier is rejected, and the table says by which test."""

from pathlib import Path

import pytest

import loop
from controls import DRAFTERS, STOP_TABLES, VERIFIERS
from draftproof.auditor.enumerate import round_distribution
from draftproof.core.distribution import total_variation
from draftproof.rules import RULES
from draftproof.rules.token import stop_table as token_stop_table
from g_test import g_test
from worlds import TREES, chains, trees

ALPHA = 1e-6
S = 500_000  # texts: TV 0.007 is detected at alpha
DOC = Path(__file__).parent.parent / "docs" / "controls.md"


def worlds_of(kind):
    if kind.startswith("tree"):
        return trees(100, 3, TREES["fork"], seed=3, kind=kind.split()[1])
    return chains(150, 4, 3, seed=43, kind=kind)


@pytest.fixture
def record(record_property):
    """Add a row to the table that the run prints and `make controls` writes (conftest.py)."""

    def row(control, test, size, found):
        description = (control.__doc__ or "").strip().split("\n")[0]
        record_property("control", f"| `{control.__name__}` | {description} | {test} | {size} | {found} |")

    return row


def rejected(control, counts, record):
    value, off = g_test(counts, loop.joint()), total_variation(counts / counts.sum(), loop.joint())
    record(
        control,
        "G-test in a loop",
        f"{S:,} texts",
        f"TV {off:.3f}, p {f'= {value:.0e}' if value > 1e-300 else '< 1e-300'}",
    )
    assert value < ALPHA


@pytest.mark.parametrize("stop_table", STOP_TABLES, ids=lambda s: s.__name__)
def test_enumeration_rejects_a_wrong_stop_table(stop_table, record):
    worlds = worlds_of(STOP_TABLES[stop_table])
    off = total_variation(round_distribution(stop_table, worlds).dist, worlds.joint)
    record(stop_table, "enumeration", f"{len(off)} worlds, no sampling", f"TV up to {off.max():.3f}")
    assert (round_distribution(stop_table, worlds).dist - worlds.joint).abs().max() > 1e-3


@pytest.mark.statistical
@pytest.mark.parametrize("verify", VERIFIERS, ids=lambda v: v.__name__)
def test_the_loop_rejects_a_wrong_verifier(verify, record):
    drafts = VERIFIERS[verify]
    made = loop.texts(verify, loop.chosen if drafts == "chosen" else loop.drawn, S, shared=drafts == "shared")
    rejected(verify, made.counts, record)


@pytest.mark.statistical
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda d: d.__name__)
def test_the_loop_rejects_a_wrong_drafter(drafter, record):
    rejected(drafter, loop.texts(RULES[DRAFTERS[drafter]], drafter, S).counts, record)


def test_the_same_enumeration_passes_the_right_stop_table():
    worlds = worlds_of("drawn")
    assert (round_distribution(token_stop_table, worlds).dist - worlds.joint).abs().max() < 1e-12


def test_there_are_enough_controls_and_the_documentation_names_them_all():
    names = [c.__name__ for c in (*STOP_TABLES, *VERIFIERS, *DRAFTERS)]
    assert len(names) >= 15
    missing = [n for n in names if f"`{n}`" not in DOC.read_text()]
    assert not missing, f"docs/controls.md lacks {missing}: run `make controls`"
