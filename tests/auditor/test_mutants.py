"""The auditor at its default settings finds wrong decoders, and does not call right ones biased.

α = 1e-6 for each audit, seeds fixed. A mutant's budget is about three times the tokens it took when it was added; the
latest numbers are in docs/reading-a-certificate.md (`make audit-mutants`).
"""

import pytest

from auditor.mutants import MUTANTS
from auditor.mutants.bundled import BUDGETS, bundled_mutants
from auditor.mutants.mutant import Mutant
from auditor.mutants.variation import total_variation
from draftproof.core.sampling import SamplingParams

pytestmark = pytest.mark.statistical

QUICK = 6_000
"""Tokens up to which an audit is part of `make test`; above that it is marked slow."""

FOUND = {name: mutant for name, mutant in MUTANTS.items() if mutant.budget is not None}
UNFOUND = {name: mutant for name, mutant in MUTANTS.items() if mutant.budget is None}
FAMILIES = {
    "wrong q",
    "residual",
    "acceptance",
    "block",
    "tree",
    "randomness",
    "processors",
    "state",
    "adaptive length",
}


def by_cost(mutants: dict[str, Mutant]) -> list[object]:
    return [
        pytest.param(mutant, id=name, marks=[] if (mutant.budget or QUICK + 1) <= QUICK else [pytest.mark.slow])
        for name, mutant in mutants.items()
    ]


@pytest.mark.parametrize("mutant", by_cost(FOUND))
def test_a_wrong_decoder_is_found(mutant):
    certificate = mutant.examined()
    assert certificate.verdict == "biased", str(certificate)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", UNFOUND.values(), ids=UNFOUND)
def test_what_is_documented_as_not_found_is_not(mutant):
    """A failure means that the documentation is out of date: give a mutant that is found now a budget."""
    assert mutant.because
    assert mutant.examined().verdict != "biased"


RIGHT = {
    "token": lambda world: world.engine(),
    "block": lambda world: world.engine(rule="block"),
    "coupled": lambda world: world.engine(rule="coupled"),
    "tree": lambda world: world.engine(rule="tree", drafter=world.drafter(branches=2)),
    "another drafter's temperature": lambda world: world.engine(rule="block", drafter=world.drafter(temperature=0.5)),
}


@pytest.mark.parametrize("build", RIGHT.values(), ids=RIGHT)
def test_a_right_decoder_in_the_same_world_is_not_called_biased(build):
    right = Mutant(build, "none", "model", SamplingParams(temperature=0.8, top_p=0.95), QUICK)
    assert right.examined().verdict != "biased"


def test_every_family_has_its_mutants():
    assert {mutant.family for mutant in FOUND.values()} == set(FAMILIES)
    assert len([m for m in FOUND.values() if m.budget <= QUICK]) >= 20


@pytest.mark.slow
def test_a_mutant_is_wrong_by_a_measure_that_does_not_use_the_auditor():
    """The total variation of the documented table: a skipped residual shows, the right engine does not, within six
    standard errors of 0.008."""
    skipped = total_variation(MUTANTS["residual_skipped"])
    right = total_variation(Mutant(lambda world: world.engine(), "none", "model", SamplingParams(), QUICK))
    assert skipped.total_variation > 0.1
    assert abs(right.total_variation) < 6 * right.error


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETS)
def test_a_wrong_decoder_of_a_real_vocabulary_is_found(name, smollm2):
    certificate = bundled_mutants(*smollm2)[name].examined()
    assert certificate.verdict == "biased", str(certificate)
