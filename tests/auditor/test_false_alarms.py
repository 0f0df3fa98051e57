"""Hundreds of whole audits: exact decoders are rarely called biased, and wrong ones are."""

import math

import pytest
import torch
from scipy.stats import binom

from auditor.toy_decoder import Speaker, pair
from draftproof.auditor.api import audit
from draftproof.auditor.bets import Bettor
from draftproof.auditor.e_process import Wealth
from draftproof.auditor.reference import ReferenceModel
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked

pytestmark = pytest.mark.statistical

AUDITS = 240
RATE = 0.01
ALPHA = 1e-6
"""Probability that a test of this file fails although the auditor is right."""
TOKENS = 1_600


def biased(n, **speaker):
    """Count the audits, of n at error rate RATE, that say "biased"; each has its own models, seeds and temperature."""
    count = 0
    with unchecked():
        for i in range(n):
            target, draft = pair(24, seed=i, order=1 + i % 2)
            certificate = audit(
                Speaker(target, draft, K=1 + i % 4, **speaker), target, [[i % 24, 1]],
                sampling=SamplingParams(temperature=0.7 + 0.1 * (i % 5)), alpha=RATE, bias=1e-4, max_tokens=TOKENS,
                drafter=draft, seed=1_000_000 * i, length=16, batch=50, method="bets",
            )  # fmt: skip
            count += certificate.verdict == "biased"
    return count


def test_exact_decoders_are_rarely_called_biased():
    """At a true rate of RATE the count exceeds the bound with a chance below ALPHA; at a rate of 0.1 it stays below it
    with a chance below 0.01."""
    bound = int(binom.isf(ALPHA, AUDITS, RATE))
    assert binom.cdf(bound, AUDITS, 0.1) < 0.01
    assert biased(AUDITS) <= bound


def test_the_same_audits_find_a_mixture_of_a_fifth():
    assert biased(20, mixed=0.2) == 20


ROWS, LENGTH = 100, 20


def evidence(gate):
    """Return the log evidence of one bet on an exact rule; `gate` picks its positions by what a bet must not know."""
    target, draft = pair(8)
    speaker = Speaker(target, draft)
    samples = speaker.decode([[0, 1]] * ROWS, SamplingParams(), max_tokens=LENGTH, seeds=range(ROWS))
    dists = ReferenceModel(target).dists(
        Positions.of([Text((0, 1), s.tokens, s.rounds) for s in samples]), SamplingParams()
    )
    bettor = Bettor(SamplingParams(), 1e-4, ReferenceModel(draft), traced=True)
    tickets = {t.name: t for t in bettor.tickets(dists, bettor.drafted(dists))}
    kept = torch.stack(speaker.kept, 1).flatten()
    proposal = torch.stack(speaker.proposals, 1).flatten()
    return float(Wealth().play([gate(tickets, dists, kept, proposal)], 1e-4)[-1])


def on_the_drawn_proposal(tickets, dists, kept, proposal):
    from draftproof.auditor.bets import Table

    return Table(dists, dists.clear, 1e-4).token("what was drafted", proposal)[0]


def where_it_was_kept(tickets, dists, kept, proposal):
    return tickets["toward what both hold likely"].only(kept, "where kept")


def where_it_was_the_rounds_last(tickets, dists, kept, proposal):
    return tickets["away from the drafter's distribution"].only(~kept, "where last")


@pytest.mark.parametrize("forbidden", [on_the_drawn_proposal, where_it_was_kept, where_it_was_the_rounds_last])
def test_forbidden_bets_raise_false_alarms_on_an_exact_rule(forbidden):
    assert evidence(forbidden) > -math.log(ALPHA)


@pytest.mark.parametrize("name", ["toward what both hold likely", "away from the drafter's distribution"])
def test_the_same_bets_without_that_knowledge_do_not(name):
    assert evidence(lambda tickets, *_: tickets[name]) < -math.log(ALPHA)
