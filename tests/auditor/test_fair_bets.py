"""No bet gains on average against an exact decoder: summed without sampling, over every text and every trace.

A bet's factor must have mean 1 under the target's distribution, whatever it depends on. Here the wealth of each bet is
summed over all texts of three tokens and all ways in which the token rule can emit them. Bets that the audit must not
make are put to the same test, and fail it.
"""

from itertools import product

import pytest
import torch

from auditor.toy_decoder import pair
from draftproof.auditor.bets import Bettor
from draftproof.auditor.e_process import STRENGTHS, Wealth
from draftproof.auditor.reference import ReferenceModel
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

V, T, K = 4, 3, 2
PROMPT = (0, 1)
WITHIN = 1e-9


def outcomes(p, q):
    """Yield every (text, kept flags, probability) of T tokens under the token rule; p and q are by prefix."""
    for tokens in product(range(V), repeat=T):
        for kept in product((False, True), repeat=T):
            chance, depth = 1.0, 0
            for t, (x, accepted) in enumerate(zip(tokens, kept, strict=True)):
                px, qx = float(p[tokens[:t]][x]), float(q[tokens[:t]][x])
                if depth < K:
                    chance *= min(px, qx) if accepted else max(px - qx, 0.0)
                else:
                    chance *= 0.0 if accepted else px
                depth = depth + 1 if accepted else 0
            if chance > 0:
                yield tokens, kept, chance


def rounds(kept):
    ended, depth = [], 0
    for accepted in kept:
        if accepted:
            depth += 1
        else:
            ended.append(Round(K, depth))
            depth = 0
    return (*ended, Round(K, depth)) if depth else tuple(ended)


def distributions_by_prefix(model, sampling):
    reference = ReferenceModel(model)
    prefixes = [prefix for n in range(T) for prefix in product(range(V), repeat=n)]
    return {prefix: reference.probs(PROMPT, (*prefix, 0), sampling)[-1] for prefix in prefixes}


def mean_wealth(sampling, forbidden=None):
    """Return each bet's mean wealth over all outcomes, for each strength; `forbidden` adds a bet."""
    target, draft = pair(V)
    p, q = distributions_by_prefix(target, sampling), distributions_by_prefix(draft, sampling)
    found = list(outcomes(p, q))
    texts = [Text(PROMPT, tokens, rounds(kept)) for tokens, kept, _ in found]
    chance = torch.tensor([c for *_, c in found], dtype=torch.float64)
    assert abs(float(chance.sum()) - 1) < WITHIN
    bettor = Bettor(sampling, 1e-12, ReferenceModel(draft), traced=True)
    dists = ReferenceModel(target, tolerance=1e-12).dists(Positions.of(texts), sampling)
    tickets = bettor.tickets(dists, bettor.drafted(dists))
    if forbidden is not None:
        flags = torch.tensor([kept for _, kept, _ in found]).flatten()
        tickets.append(forbidden(tickets, flags))
    shares = torch.tensor(STRENGTHS, dtype=torch.float64)
    ratio = torch.stack([t.ratio for t in tickets]).double().view(len(tickets), len(found), T)
    wealth = (1 + shares * (ratio[..., None] - 1)).prod(2)  # [J, outcomes, E]
    return {t.name: row for t, row in zip(tickets, (wealth * chance[:, None]).sum(1), strict=True)}


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(frequency_penalty=0.5, repetition_penalty=1.3)],
    ids=["plain", "warm", "penalties"],
)
def test_every_bet_has_mean_one(sampling):
    means = mean_wealth(sampling)
    assert len(means) > 30
    assert any("first token of a round" in name for name in means)
    worst = {name: float((row - 1).abs().max()) for name, row in means.items()}
    assert max(worst.values()) < WITHIN, worst


def test_bets_under_a_cutoff_never_gain():
    means = mean_wealth(SamplingParams(top_p=0.8))
    assert all(float(row.max()) < 1 + WITHIN for row in means.values())


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "last"])
def test_a_bet_that_knows_whether_the_token_was_a_draft_gains(accepted):
    """An accepted draft token leans toward what both hold likely, a round's last token away from the drafter."""

    def forbidden(tickets, flags):
        lean = "toward what both hold likely" if accepted else "away from the drafter's distribution"
        return next(t for t in tickets if t.name == lean).only(flags == accepted, "where known")

    means = mean_wealth(SamplingParams(), forbidden)
    [row] = [row for name, row in means.items() if name.endswith("where known")]
    assert float(row.max()) > 1.05


def test_the_mean_wealth_of_all_bets_is_an_e_value():
    """`Wealth` with its charge for rounding is never more than 1 on average."""
    sampling = SamplingParams()
    target, draft = pair(V)
    p, q = distributions_by_prefix(target, sampling), distributions_by_prefix(draft, sampling)
    bettor = Bettor(sampling, 1e-4, ReferenceModel(draft), traced=True)
    total = 0.0
    for tokens, kept, chance in outcomes(p, q):
        dists = ReferenceModel(target).dists(Positions.of([Text(PROMPT, tokens, rounds(kept))]), sampling)
        running = Wealth().play(bettor.tickets(dists, bettor.drafted(dists)), 1e-4)
        total += chance * float(running[-1].exp())
    assert 0.999 < total <= 1
