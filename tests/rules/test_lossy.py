"""Lossy rules mark their verdicts as inexact, and the deviation they report is right."""

import pytest
import torch

import loop
from draftproof.core.distribution import Distribution, total_variation
from draftproof.core.rng import Philox
from draftproof.rules import RULES, lossy

LOSSY = {"unadjusted": lossy.unadjusted, "lenient": lossy.lenient(0.7), "typical": lossy.typical()}


def first_tokens(rule, proposer, n=400_000):
    """Return the sampled distribution of a round's first token, and a verdict with the deviation it reports."""
    last, rng = torch.zeros(n, dtype=torch.long), Philox(torch.arange(n) * 17, torch.ones(n, dtype=torch.long))
    draft = proposer(last, rng)
    verdict = rule(loop.distribution_of(torch.cat([last[:, None], draft.tokens], 1), loop.TARGET), draft, rng)
    seen = torch.bincount(verdict.tokens[:, 0], minlength=loop.V) / n
    return seen, verdict


@pytest.mark.statistical
@pytest.mark.parametrize("drafts", ["drawn", "chosen"])
@pytest.mark.parametrize("name", LOSSY)
def test_the_reported_deviation_agrees_with_sampling(name, drafts):
    """4e5 rounds: the sampled total variation is within 5 standard errors, 0.005, of the reported one."""
    seen, verdict = first_tokens(LOSSY[name], getattr(loop, drafts))
    p = loop.TARGET.softmax(-1)[0]
    assert not verdict.exact
    assert verdict.deviation is not None
    assert abs(total_variation(seen, p) - verdict.deviation.total_variation[0, 0]) < 0.005
    kl = (seen * (seen / p).clamp_min(1e-12).log()).sum()
    assert abs(kl - verdict.deviation.kl[0, 0]) < 0.01


def test_a_skipped_residual_is_off_by_the_closed_form():
    p, q = torch.tensor([0.1, 0.5, 0.4]), torch.tensor([0.6, 0.1, 0.3])
    rng = Philox(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    from draftproof.core.types import Draft

    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), Distribution.of(q.view(1, 1, 3)))
    verdict = lossy.unadjusted(Distribution.of(p.expand(1, 2, 3)), draft, rng)
    alpha = p.minimum(q).sum()
    accepted, left = p.minimum(q) / alpha, (p - q).clamp_min(0) / (1 - alpha)
    wanted = alpha * (1 - alpha) * total_variation(accepted, left)
    assert verdict.deviation.total_variation.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert wanted <= 0.25


def test_no_lossy_rule_has_a_name():
    assert not set(RULES) & {"unadjusted", "lenient", "typical", "lossy"}
    assert lossy.lenient(1.0)(*toy()).deviation.total_variation.max() < 1e-6


def test_a_description_names_the_lossy_rule():
    assert [rule.__name__ for rule in LOSSY.values()] == list(LOSSY)


def toy(n=4):
    rng = Philox(torch.arange(n), torch.arange(n))
    last = torch.zeros(n, dtype=torch.long)
    draft = loop.drawn(last, rng)
    return loop.distribution_of(torch.cat([last[:, None], draft.tokens], 1), loop.TARGET), draft, rng


@pytest.mark.parametrize("make", [lambda: lossy.lenient(0.0), lambda: lossy.lenient(1.2), lambda: lossy.typical(0.0)])
def test_wrong_thresholds_are_refused(make):
    with pytest.raises(ValueError, match="must lie in"):
        make()
