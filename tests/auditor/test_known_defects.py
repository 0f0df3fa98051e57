"""No decoder is cleared before the defects that have a bet of their own would have been seen, and then they are seen.

A redraw after a mismatch is not a mixture with the copied token: the bet on mixtures has its power long before the bet
on redraws does. α = 1e-6 for each audit, seeds fixed.
"""

import pytest

from auditor.toy_decoder import Copier, pair
from draftproof.auditor import betting
from draftproof.auditor.api import audit
from draftproof.auditor.bets import Bettor
from draftproof.auditor.drafter import copies_text
from draftproof.auditor.reference import ReferenceModel
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked

TARGET, DRAFT = pair(6)
PROMPTS = [[3, 1, 5, 3, 1], [4, 2, 4, 2]]
TWICE = "toward copied text, judged twice"
HOW = {
    "sampling": SamplingParams(),
    "drafter": "prompt-lookup",
    "bias": 0.2,
    "length": 16,
    "batch": 4,
    "method": "bets",
}
AUDITS = 24


@pytest.fixture(scope="module")
def seen():
    """Return the certificates of an exact decoder's audit, from the first batch to the last."""
    certificates = []
    with unchecked():
        audit(Copier(TARGET), TARGET, PROMPTS, **HOW, watch=certificates.append)
    return certificates


def refuted(tokens, **copier):
    """Count how many of AUDITS audits with this many tokens say "biased"."""
    how = {**HOW, "batch": tokens // 16, "max_tokens": tokens}
    with unchecked():
        found = [audit(Copier(TARGET, **copier), TARGET, PROMPTS, **how, seed=10**6 * (i + 1)) for i in range(AUDITS)]
    return sum(certificate.verdict == "biased" for certificate in found)


def test_power_against_mixtures_is_not_enough_to_clear_a_decoder(seen):
    early = [c for c in seen if c.smallest_bias is not None and c.smallest_bias <= c.bias and c.coverage.rejected >= 62]
    assert early[0].verdict == "not enough evidence"
    assert TWICE in early[0].reason
    assert early[0].more_tokens is not None
    assert seen[-1].verdict == "no bias found"
    assert seen[-1].visible[TWICE] <= seen[-1].decisive[TWICE] == 0.9
    assert f"of the defect “{TWICE}”; asked for 0.9" in str(seen[-1])


@pytest.mark.statistical
def test_a_redraw_is_found_in_the_tokens_that_clear_an_exact_decoder(seen):
    """At a chance of 0.9 each, fewer than 13 of 24 are found with a chance of 8.5e-7. A sixth of the tokens must not do
    as often, and an exact decoder is not found at all."""
    tokens = seen[-1].tokens
    assert refuted(tokens, redraws=True) >= 13
    assert refuted(tokens // 6, redraws=True) < 13
    assert refuted(tokens) == 0


def test_a_defect_that_would_change_next_to_nothing_is_not_required_and_the_certificate_says_so(seen, monkeypatch):
    monkeypatch.setattr(betting, "NEGLIGIBLE", 10.0)  # above any possible share of the tokens
    with unchecked():
        found = audit(Copier(TARGET), TARGET, PROMPTS, **HOW)
    assert found.verdict == "no bias found"
    assert found.tokens < seen[-1].tokens
    assert TWICE not in found.decisive
    assert 0.01 < found.negligible[TWICE] < 0.25  # m(1 − m) where something is copied
    assert f"“{TWICE}” was not looked for" in str(found)


def test_which_bets_decide_depends_on_the_drafter():
    dist, copies = ("toward the drafter's distribution",), ("toward copied text",)
    draws = ReferenceModel(DRAFT)
    assert Bettor(SamplingParams(), 1e-4, draws).mixtures == dist
    assert Bettor(SamplingParams(), 1e-4, None, copying=True).mixtures == copies
    assert Bettor(SamplingParams(), 1e-4, draws, copying=True).mixtures == dist + copies
    assert Bettor(SamplingParams(), 1e-4, None, copying=True).defects == (TWICE,)
    assert "toward what both hold likely" in Bettor(SamplingParams(), 1e-4, draws).defects
    named = {name: copies_text(name) for name in ("ngram", "suffix", "suffix+head", "suffix+head:folder", "head")}
    assert [name for name, copied in named.items() if not copied] == ["head"]
    assert not copies_text(draws)
