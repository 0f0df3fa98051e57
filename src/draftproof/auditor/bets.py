"""The bets of an audit. Each is named after where a defect would lead, so that the one that wins names it.

Where a defect has a distribution of its own, that distribution is the bet, weighted position by position: a skipped residual gives
min(p, q) + (1 − α)·p with another α everywhere, and a fixed share of min(p, q) would lose where α is small what it wins
where α is large.

Bets look where drafts fire: at the drafter's distribution recomputed from the text, at what a copying drafter would propose, at
rounds' first tokens. A distribution averaged over everything else can be right where the drafts are wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.auditor.drafter import DistributionOf, Drafted
from draftproof.auditor.e_process import STRENGTHS, Ticket
from draftproof.auditor.reference import (
    SMALL,
    TILTING,
    ReferenceModel,
    TargetDistributions,
    in_use,
    output_counts,
    tilted,
    without,
)
from draftproof.auditor.texts import Positions
from draftproof.core.sampling import SamplingParams

STRIDE: Final = 8
"""On a large vocabulary the growth of a bet on a distribution is worked out at every so many positions, and stands for them."""


LARGEST: Final = 80.0
"""The log of a ratio a/p beyond which growth is not counted: float32 would overflow."""


@dataclass(frozen=True, slots=True)
class Table:
    """Where bets are written: the distributions, the positions at which one may bet, and what rounding may do to them."""

    dists: TargetDistributions
    open: Bool[Tensor, " N"]
    tolerance: float

    @property
    def finest(self) -> float:
        """A mass below this is not known to within the tolerance if it is found as 1 − the rest."""
        return 16 * float(torch.finfo(self.dists.log_p.dtype).eps) / self.tolerance

    def both(
        self, name: str, mass: Float[Tensor, " N"], hit: Bool[Tensor, " N"], where: Bool[Tensor, " N"] | None = None
    ) -> tuple[Ticket, Ticket]:
        """Bets toward and away from a set of tokens of this mass; `hit`: the token that came is in it."""
        where = self.open if where is None else self.open & where
        rest = 1 - mass.double()
        inside = where & (rest > self.finest) & (mass > 0)
        return (
            _on_set(f"toward {name}", mass.double(), hit, inside),
            _on_set(f"away from {name}", rest, ~hit, inside),
        )

    def token(
        self, name: str, token: Int[Tensor, " N"], where: Bool[Tensor, " N"] | None = None
    ) -> tuple[Ticket, Ticket]:
        """Bets toward and away from one token a position; none is placed where it is negative."""
        there = token >= 0 if where is None else (token >= 0) & where
        mass = self.dists.p.gather(1, token.clamp_min(0)[:, None])[:, 0]
        return self.both(name, mass, self.dists.positions.token == token, there)

    def partly(self, name: str, token: Int[Tensor, " N"], weight: Float[Tensor, " N"]) -> Ticket:
        """A bet on the distribution (1 − weight)·p + weight·(that token)."""
        mass = self.dists.p.gather(1, token.clamp_min(0)[:, None])[:, 0].double()
        placed = self.open & (token >= 0) & (1 - mass > self.finest) & (mass > 0)
        return _on_set(name, mass, self.dists.positions.token == token, placed, weight.double())

    def dist(self, name: str, log_a: Float[Tensor, "N V"], where: Bool[Tensor, " N"] | None = None) -> Ticket:
        """A bet on another distribution. Where p is 0 it may say anything: nothing is won there."""
        said = log_a.gather(1, self.dists.positions.token[:, None])[:, 0].double()
        placed = self.open if where is None else self.open & where
        placed = placed & ~said.isnan()
        ratio = torch.where(placed, (said - self.dists.log_p_said).exp(), 1.0)
        return Ticket(name, placed, ratio, *_growth_of_distribution(self.dists, log_a, placed))


def _on_set(
    name: str,
    mass: Float[Tensor, " N"],
    hit: Bool[Tensor, " N"],
    placed: Bool[Tensor, " N"],
    weight: Float[Tensor, " N"] | None = None,
) -> Ticket:
    """A bet on the distribution that leaves a set with its own mass and moves `weight` of everything into it; all if None."""
    mass = torch.where(placed, mass, 0.5)
    moved = torch.ones_like(mass) if weight is None else weight
    won, lost = moved * (1 / mass - 1), -moved  # a/p − 1 inside the set and outside
    ratio = torch.where(placed, 1 + torch.where(hit, won, lost), 1.0)
    shares = torch.tensor(STRENGTHS, dtype=torch.float64, device=mass.device)
    gain, loss = 1 + shares * won[:, None], 1 + shares * lost[:, None]
    inside = mass[:, None] * gain  # the set's mass under the alternative
    growth = inside * gain.log() + (1 - inside) * loss.log()
    return Ticket(name, placed, ratio, growth * placed[:, None], moved * (1 - mass) * placed)


def _growth_of_distribution(
    dists: TargetDistributions, log_a: Float[Tensor, "N V"], placed: Bool[Tensor, " N"]
) -> tuple[Float[Tensor, "N E"], Float[Tensor, " N"]]:
    """The growth for each strength, and the total variation between the two distributions."""
    stride = 1 if log_a.shape[-1] <= SMALL else STRIDE
    p = dists.p[::stride]
    log_ratio = (log_a[::stride] - dists.log_p[::stride]).clamp(max=LARGEST)
    ratio = torch.where(p > 0, log_ratio.exp(), 1.0)
    growth = torch.zeros(len(placed), len(STRENGTHS), dtype=torch.float64, device=placed.device)
    moved = torch.zeros(len(placed), dtype=torch.float64, device=placed.device)
    scale = len(placed) / len(p)
    moved[::stride] = scale * (p * (ratio - 1).clamp_min(0.0)).sum(-1).double()
    for i, share in enumerate(STRENGTHS):
        alternative = 1 + share * (ratio - 1)
        here = (p * torch.special.xlogy(alternative, alternative)).sum(-1).double()
        growth[::stride, i] = here * scale
    return torch.where(placed[:, None], growth, 0.0), torch.where(placed, moved, 0.0)


TAILS: Final[Mapping[str, float]] = MappingProxyType(
    {"the tail below 1e-2": 1e-2, "the tail below 1e-4": 1e-4, "the tail beyond 24 bits": 2.0**-24}
)
FLATTER, SHARPER = 0.8, 1.25


@dataclass(frozen=True, slots=True)
class Bettor:
    """All bets on a decoder with this sampling and, where it is known, this drafter."""

    sampling: SamplingParams
    tolerance: float
    drafter: ReferenceModel | DistributionOf | None = None
    copying: bool = False
    """Whether drafts are known to be copied from the text, all or some of them."""
    traced: bool = False
    """Whether the decoder tells its rounds."""

    @property
    def mixtures(self) -> tuple[str, ...]:
        """Bets on what is drafted: a clean audit must have been able to see the bias that is asked for in each."""
        dist = () if self.drafter is None else ("toward the drafter's distribution",)
        return dist + (("toward copied text",) if self.copying or not dist else ())

    @property
    def defects(self) -> tuple[str, ...]:
        """Bets on distributions that known defects have: a clean audit must have been able to see each whole defect. They are no
        mixtures with the draft, and one can be invisible long after the other would have been seen."""
        named = {
            "toward the drafter's distribution": (
                "toward what both hold likely",
                "toward the drafter's first choice, judged as drawn",
            ),
            "toward copied text": ("toward copied text, judged twice",),
        }
        return tuple(defect for mixture in self.mixtures for defect in named[mixture])

    def drafted(self, dists: TargetDistributions) -> Drafted | None:
        """What the drafter would draw from at these positions; None where no distribution of it is known."""
        return None if self.drafter is None else Drafted.by(self.drafter, dists, self.sampling)

    def tickets(self, dists: TargetDistributions, drafted: Drafted | None) -> list[Ticket]:
        """Every bet on these positions, always in the same order; `drafted` as that method tells it."""
        table = Table(dists, dists.clear & ~dists.impossible, self.tolerance)
        made = [*_on_drafts(table, drafted), *_on_shape(table), *_on_repeats(table), *self._on_parameters(table)]
        return made + (list(_by_place(made, dists.positions)) if self.traced else [])

    def _on_parameters(self, table: Table) -> Iterator[Ticket]:
        """Distributions with one parameter left out, on the tokens that the right distribution allows: the others are impossible."""
        dists = table.dists
        for name in in_use(self.sampling):
            if name in TILTING:
                log_a = _allowed(tilted(dists.scores, dists.positions, without(self.sampling, name)), dists)
                yield table.dist(f"without the {name.replace('_', ' ')}", log_a)
        if self.sampling.penalises:
            positions = dists.positions
            lag = torch.where(positions.depth >= 0, positions.depth, 1).minimum(positions.said)
            log_a = _allowed(tilted(dists.scores, positions.late(lag), self.sampling), dists)
            yield table.dist("with penalties a round late", log_a, lag > 0)


def _on_drafts(table: Table, drafted: Drafted | None) -> Iterator[Ticket]:
    copied, p = table.dists.positions.continuation, table.dists.p
    yield from table.token("copied text", copied)
    yield table.partly("toward copied text, judged twice", copied, _at(p, copied))
    if drafted is not None:
        yield from _on_distributions(table, drafted)


def _on_distributions(table: Table, drafted: Drafted) -> Iterator[Ticket]:
    p, q = table.dists.p, drafted.q
    shared, residual = torch.minimum(p, q), _normalised((p - q).clamp_min(0.0))
    rejected, apart = 1 - shared.sum(-1, keepdim=True), _differ(p, q)
    yield table.dist("toward the drafter's distribution", _allowed(drafted.log_q, table.dists))
    yield table.dist("toward what both hold likely", (shared + rejected * p).log())
    yield table.dist("away from the drafter's distribution", residual.log(), apart)
    # a coin that rejects is large; used once more, by inverse CDF, it draws the later tokens of the residual
    later = residual * (2 * residual.cumsum(-1) - residual)
    yield table.dist("toward later tokens after a rejection", (shared + rejected * later).log(), apart)
    if drafted.log_raw is not None:
        yield table.dist("toward drafts judged by their raw distribution", _judged(p, q, drafted.log_raw.exp()).log())
    first = drafted.log_q.argmax(-1)
    yield from table.token("the drafter's first choice", first)
    yield table.partly(
        "toward the drafter's first choice, judged as drawn", first, (_at(p, first) / _at(q, first)).clamp(max=1)
    )


def _judged(p: Float[Tensor, "N V"], drawn: Float[Tensor, "N V"], said: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """What the token rule emits if drafts are drawn from one distribution and said to come from another."""
    kept = drawn * torch.where(said > 0, p / said, 1.0).clamp(max=1.0)
    closing = torch.where(_differ(p, said)[:, None], _normalised((p - said).clamp_min(0.0)), p)
    return kept + (1 - kept.sum(-1, keepdim=True)) * closing


def _on_shape(table: Table) -> Iterator[Ticket]:
    dists = table.dists
    for name, power in (("flatter", FLATTER), ("sharper", SHARPER)):
        scaled = torch.where(dists.log_p > -torch.inf, dists.log_p * power, -torch.inf)
        yield table.dist(f"toward a {name} distribution", scaled.log_softmax(-1))
    yield from table.token("the likeliest token", dists.log_p.argmax(-1))
    for name, edge in TAILS.items():
        mass = dists.p.masked_fill(dists.p >= edge, 0.0).sum(-1)
        said = dists.p.gather(1, dists.positions.token[:, None])[:, 0] < edge
        yield from table.both(name, mass, said)


def _on_repeats(table: Table) -> Iterator[Ticket]:
    dists = table.dists
    seen = output_counts(dists.positions, dists.p.shape[-1]) > 0
    mass = dists.p.masked_fill(~seen, 0.0).sum(-1)
    yield from table.both("what was said before", mass, seen.gather(1, dists.positions.token[:, None])[:, 0])
    yield table.token("the last token again", dists.positions.last)[0]


PLACED: Final = (
    "toward copied text",
    "toward copied text, judged twice",
    "away from copied text",
    "toward the drafter's distribution",
    "toward what both hold likely",
    "away from the drafter's distribution",
    "toward a flatter distribution",
    "toward a sharper distribution",
)
"""Bets that are also made at rounds' first tokens only, and behind them only: where in a round a defect strikes."""


def _by_place(made: Sequence[Ticket], positions: Positions) -> Iterator[Ticket]:
    first, inside = positions.depth == 0, positions.depth > 0
    for ticket in made:
        if ticket.name in PLACED:
            yield ticket.only(first, "at the first token of a round")
            yield ticket.only(inside, "inside a round")


def _at(dist: Float[Tensor, "N V"], token: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    return dist.gather(1, token.clamp_min(0)[:, None])[:, 0]


def _normalised(weights: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """As probabilities; NaN where there is no mass, which is no bet."""
    return weights / weights.sum(-1, keepdim=True)


def _differ(p: Float[Tensor, "N V"], q: Float[Tensor, "N V"]) -> Bool[Tensor, " N"]:
    """Where the residual is more than rounding."""
    return (p - q).clamp_min(0.0).sum(-1) > 1e-3


def _allowed(scores: Float[Tensor, "N V"], dists: TargetDistributions) -> Float[Tensor, "N V"]:
    """As log-probabilities over the tokens that the target's distribution allows: what is outside shows as impossible."""
    return scores.masked_fill(dists.log_p == -torch.inf, -torch.inf).log_softmax(-1)


HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "toward the drafter's distribution": "drafts are kept too often, or tokens come from the drafter",
        "toward what both hold likely": "after a rejection the target is drawn from and not the residual",
        "away from the drafter's distribution": "drafts are kept too rarely, or the residual closes rounds that kept all",
        "toward the drafter's first choice, judged as drawn": "drafts are argmaxes, and are judged as if drawn",
        "toward the drafter's first choice": "likely drafts are kept too often",
        "away from the drafter's first choice": "good drafts are thrown away",
        "toward later tokens after a rejection": "the coin that rejected a draft also draws its replacement",
        "toward drafts judged by their raw distribution": "q is the drafter's distribution without the sampling parameters",
        "toward copied text, judged twice": "after a mismatch the token is drawn once more",
        "toward copied text": "copied drafts are kept too often",
        "away from copied text": "copied drafts are kept too rarely",
        "toward a flatter distribution": "the temperature is too high or not applied",
        "toward a sharper distribution": "the temperature is too low, or applied twice",
        "toward the likeliest token": "some tokens are greedy",
        "away from the likeliest token": "the likeliest token loses mass",
        "away from the tail beyond 24 bits": "the noise has too few bits to reach rare tokens",
        "toward what was said before": "a penalty is ignored, or drafts repeat the text",
        "away from what was said before": "a penalty is applied twice",
        "toward the last token again": "a token is emitted twice: a wrong rollback",
        "with penalties a round late": "penalties do not count the drafted tokens before a position",
    }
)


def hint(bet: str) -> str:
    """What a bet that wins speaks for; empty where its name says all."""
    return next((text for name, text in HINTS.items() if bet.startswith(name)), "")
