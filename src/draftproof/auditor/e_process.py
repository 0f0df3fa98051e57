"""Bet against a decoder's tokens: wealth that an exact decoder cannot raise on average, wherever the audit stops.

A bet names another distribution a for the next token, fixed before the token is drawn. A share ε of the wealth is bet
on a: wealth is multiplied by 1 − ε + ε·a(x)/p(x), whose mean under p is 1. So wealth is a martingale, as is the mean
over many bets. Under an exact decoder it ever reaches 1/α with probability at most α (Ville's inequality).

p is known up to rounding only. If every probability is within a factor 1 + δ, the mean is at most 1 + ε·δ; every token
that is bet on is charged for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof.auditor.power import POWER_SCORE

STRENGTHS: Final = (0.01, 0.03, 0.1, 0.3, 0.9)
"""Shares ε of the wealth that are bet; each bet is placed with all of them, each with wealth of its own."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A bet on N positions.

    ratio   a(x)/p(x) of the emitted token x; 1 where the bet is not placed
    growth  the mean growth of log wealth if the decoder's distribution were (1 − ε)·p + ε·a, for each strength ε
    moved   the total variation between a and p
    """

    name: str
    placed: Bool[Tensor, " N"]
    ratio: Float[Tensor, " N"]
    growth: Float[Tensor, "N E"]
    moved: Float[Tensor, " N"]

    def only(self, where: Bool[Tensor, " N"], suffix: str) -> "Ticket":
        """Return this bet restricted to the positions in `where`."""
        here = self.placed & where
        return Ticket(
            f"{self.name} {suffix}",
            here,
            torch.where(here, self.ratio, 1.0),
            self.growth * here[:, None],
            self.moved * here,
        )


@dataclass(slots=True)
class Wealth:
    """Log wealth of J bets at E strengths, and how far it would have grown against a biased decoder.

    growth  mean log wealth of each bet under its own alternative (1 − ε)·p + ε·a
    moved   sum over positions of the total variation between a and p
    """

    names: tuple[str, ...] = ()
    logs: Float[Tensor, "J E"] = field(default_factory=lambda: torch.zeros(0, len(STRENGTHS)).double())
    growth: Float[Tensor, "J E"] = field(default_factory=lambda: torch.zeros(0, len(STRENGTHS)).double())
    moved: Float[Tensor, " J"] = field(default_factory=lambda: torch.zeros(0).double())

    def play(self, tickets: Sequence[Ticket], tolerance: float, level: float = math.inf) -> Float[Tensor, " M"]:
        """Settle the bets on N more tokens, or on fewer if the log evidence reaches `level`.

        Returns the running log evidence after each settled token.
        """
        names = tuple(ticket.name for ticket in tickets)
        if not self.names:
            self.names = names
            self.logs = self.growth = torch.zeros(len(names), len(STRENGTHS), dtype=torch.float64)
            self.moved = torch.zeros(len(names), dtype=torch.float64)
        if names != self.names:
            raise ValueError(f"the bets of an audit must not change: it began with {self.names}, and now has {names}")
        placed = torch.stack([t.placed for t in tickets]).cpu()[..., None]  # [J, N, 1]
        ratio = torch.stack([t.ratio for t in tickets]).double().cpu()[..., None]
        shares = torch.tensor(STRENGTHS, dtype=torch.float64)
        charge = torch.log1p(shares * tolerance) * placed
        steps = torch.log1p(shares * (ratio - 1)) - charge  # [J, N, E]
        paths = self.logs[:, None] + steps.cumsum(1)
        running = log_mean(paths.transpose(0, 1).flatten(1))
        over = (running >= level).nonzero()
        settled = int(over[0]) + 1 if len(over) else len(running)
        self.logs = paths[:, settled - 1]
        expected = torch.stack([t.growth[:settled].double().sum(0) for t in tickets]).cpu()
        self.growth = self.growth + expected - charge[:, :settled].sum(1)
        self.moved = self.moved + torch.stack([t.moved[:settled].double().sum() for t in tickets]).cpu()
        return running[:settled]

    @property
    def log_evidence(self) -> float:
        """Return the log of the mean wealth of all bets and strengths."""
        return float(log_mean(self.logs.flatten()[None])) if len(self.names) else 0.0

    def by_bet(self) -> dict[str, float]:
        """Return each bet's own log evidence, the mean over its strengths."""
        return dict(zip(self.names, log_mean(self.logs).tolist(), strict=True))

    def visible(self, alpha: float) -> dict[str, float | None]:
        """Return for each bet the smallest share of its distribution that would have been found nine times in ten.

        None if not even the largest strength would have been found.
        """
        wanted = growth_needed(len(self.names), alpha)
        return {name: _crossing(row, wanted) for name, row in zip(self.names, self.growth.tolist(), strict=True)}

    def growth_at(self, bet: str, share: float) -> float:
        """Return a bet's growth at any share, from the nearest strength: growth is quadratic in a small share."""
        row = self.growth[self.names.index(bet)].tolist()
        nearest = min(range(len(STRENGTHS)), key=lambda i: abs(math.log(STRENGTHS[i] / share)))
        return float(row[nearest] * (share / STRENGTHS[nearest]) ** 2)


def log_mean(logs: Float[Tensor, "N M"]) -> Float[Tensor, " N"]:
    return logs.logsumexp(-1) - math.log(logs.shape[-1])


def growth_needed(bets: int, alpha: float) -> float:
    """Return the mean growth of one log wealth at which the mean of all reaches 1/alpha nine times in ten.

    Under its own alternative a log wealth of mean G has a variance of about 2G, as any sum of small bets has.
    """
    level = math.log(max(bets, 1) * len(STRENGTHS) / alpha)
    root = (POWER_SCORE * math.sqrt(2) + math.sqrt(2 * POWER_SCORE**2 + 4 * level)) / 2
    return root**2


def _crossing(growth: Sequence[float], wanted: float) -> float | None:
    """Return the strength at which growth reaches `wanted`, by a power law between neighbouring strengths."""
    for i, (strength, reached) in enumerate(zip(STRENGTHS, growth, strict=True)):
        if reached < wanted:
            continue
        below = growth[i - 1] if i else 0.0
        if below <= 0:
            return strength if i else strength * math.sqrt(wanted / reached)  # growth is quadratic in the strength
        slope = math.log(reached / below) / math.log(strength / STRENGTHS[i - 1])
        return float(STRENGTHS[i - 1] * (wanted / below) ** (1 / slope))
    return None
