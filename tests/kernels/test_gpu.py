"""Test the kernels on a GPU at full size: equality with the reference, distribution, graphs, determinism."""

import subprocess
import sys
from pathlib import Path

import pytest

import draftproof as dp
from kernels import claims, distribution_claims

pytestmark = pytest.mark.gpu
CHECK = Path(__file__).parents[2] / "benchmarks" / "check_gpu.py"


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile by several processes side by side: one by one the kernels would take longer than all tests."""
    subprocess.run([sys.executable, str(CHECK), "--compile-only"], check=True, timeout=300)


def test_large_shapes_give_the_reference_verdict():
    claims.large_shapes()


def test_ordinary_cutoffs_come_from_a_short_list():
    claims.short_lists()


def test_a_million_rows_give_the_reference_verdict():
    assert claims.many_rows()["rows"] >= 1_000_000


@pytest.mark.statistical
@pytest.mark.parametrize(("rule", "name", "sampling", "drawn"), list(distribution_claims.distribution_cases()))
def test_the_emitted_distribution_is_the_target_distribution(rule, name, sampling, drawn):
    """Fails by chance once in a million runs."""
    assert distribution_claims.dist(rule, sampling, drawn)["p"] > distribution_claims.ALPHA


@pytest.mark.statistical
def test_the_distribution_test_can_fail():
    """Drafts drawn from another distribution than the one declared: a total variation of a few hundredths."""
    wrong = distribution_claims.dist(
        "token", dp.SamplingParams(temperature=0.8), True, 400_000, drawn_with=dp.SamplingParams(temperature=1.1)
    )
    assert wrong["p"] < distribution_claims.ALPHA


def test_a_graph_follows_its_inputs():
    claims.graph_replay()


def test_the_verdict_is_always_the_same():
    claims.determinism()
