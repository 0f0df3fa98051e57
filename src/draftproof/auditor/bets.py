"""Define the bets of an audit. Each is named after the bias that a defect would cause, so the winning bet names it.

If a defect has a distribution of its own, the bet is on that distribution, position by position. A skipped residual
gives min(p, q) + (1 − α)·p with another α at every position; a bet on a fixed share of min(p, q) would lose where α is
small what it wins where α is large.

Bets depend on where drafts matter: on the drafter's distribution recomputed from the text, on the token that a copying
drafter would propose, on the first tokens of rounds. Averaged over all positions, a wrong decoder can look right.
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
    SMALL_VOCABULARY,
    TILTING,
    TOLERANCE,
    ReferenceModel,
    TargetDistributions,
    in_use,
    output_counts,
    tilted,
    without,
)
from draftproof.auditor.texts import Positions
from draftproof.core.sampling import SamplingParams

GROWTH_STRIDE: Final = 8
"""Positions per evaluation of a bet's growth on a large vocabulary; each evaluation counts for all of them."""
MAX_LOG_RATIO: Final = 80.0
"""Log of a/p above which it is clamped: float32 would overflow."""

TAILS: Final[Mapping[str, float]] = MappingProxyType(
    {"the tail below 1e-2": 1e-2, "the tail below 1e-4": 1e-4, "the tail beyond 24 bits": 2.0**-24}
)
"""Sets of rare tokens that are bet on, by the probability below which a token belongs to them."""
FLATTER, SHARPER = 0.8, 1.25
"""Exponents of p in the bets on a flatter and a sharper distribution."""
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
"""Bets that are also placed at first tokens of rounds only, and at later ones only, to locate a defect."""


@dataclass(frozen=True, slots=True)
class Bettor:
    """The bets on a decoder with this sampling and, if it is known, this drafter."""

    sampling: SamplingParams
    tolerance: float
    drafter: ReferenceModel | DistributionOf | None = None
    copying: bool = False
    """Whether some or all drafts are known to be copied from the text."""
    traced: bool = False
    """Whether the decoder reports its rounds."""

    @property
    def mixtures(self) -> tuple[str, ...]:
        """Name the bets on mixtures with the drafts; before "no bias found" each must find the requested bias."""
        dist = () if self.drafter is None else ("toward the drafter's distribution",)
        return dist + (("toward copied text",) if self.copying or not dist else ())

    @property
    def defects(self) -> tuple[str, ...]:
        """Name the bets on known defects; before "no bias found" each defect must be visible.

        They are not mixtures with the drafts: one can stay invisible long after such a mixture would have been found.
        """
        named = {
            "toward the drafter's distribution": (
                "toward what both hold likely",
                "toward the drafter's first choice, judged as drawn",
            ),
            "toward copied text": ("toward copied text, judged twice",),
        }
        return tuple(defect for mixture in self.mixtures for defect in named[mixture])

    def drafted(self, dists: TargetDistributions) -> Drafted | None:
        """Compute the drafter's distributions at these positions; None if no distribution of it is known."""
        return None if self.drafter is None else Drafted.by(self.drafter, dists, self.sampling)

    def tickets(self, dists: TargetDistributions, drafted: Drafted | None) -> list[Ticket]:
        """Place every bet on these positions, always in the same order; `drafted` comes from that method."""
        table = Table(dists, dists.clear & ~dists.impossible, self.tolerance)
        made = [*_on_drafts(table, drafted), *_on_shape(table), *_on_repeats(table), *self._on_parameters(table)]
        return made + (list(_by_place(made, dists.positions)) if self.traced else [])

    def _on_parameters(self, table: "Table") -> Iterator[Ticket]:
        """Bet on distributions without one of the parameters, over the tokens that the right distribution allows."""
        dists = table.dists
        for name in in_use(self.sampling):
            if name in TILTING:
                log_a = _allowed(tilted(dists.scores, dists.positions, without(self.sampling, name)), dists)
                yield table.dist(f"without the {name.replace('_', ' ')}", log_a)
        if self.sampling.penalises:
            positions = dists.positions
            lag = torch.where(positions.depth >= 0, positions.depth, 1).minimum(positions.output_index)
            log_a = _allowed(tilted(dists.scores, positions.late(lag), self.sampling), dists)
            yield table.dist("with penalties a round late", log_a, lag > 0)


@dataclass(frozen=True, slots=True)
class Table:
    """A factory of bets on N positions: the distributions, the positions open to bets, and the tolerance."""

    dists: TargetDistributions
    open: Bool[Tensor, " N"]
    tolerance: float

    @property
    def finest(self) -> float:
        """Return the mass below which 1 − (the rest) is not accurate to the tolerance."""
        tolerance = self.tolerance or TOLERANCE[torch.float64]  # 0 is allowed, and float64 still rounds
        return 16 * float(torch.finfo(self.dists.log_p.dtype).eps) / tolerance

    def both(
        self, name: str, mass: Float[Tensor, " N"], hit: Bool[Tensor, " N"], where: Bool[Tensor, " N"] | None = None
    ) -> tuple[Ticket, Ticket]:
        """Bet toward and away from a set of tokens of this mass; `hit`: the emitted token is in it."""
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
        """Bet toward and away from one token per position; no bet is placed where it is negative."""
        placed = token >= 0 if where is None else (token >= 0) & where
        mass = self.dists.p.gather(1, token.clamp_min(0)[:, None])[:, 0]
        return self.both(name, mass, self.dists.positions.token == token, placed)

    def partly(self, name: str, token: Int[Tensor, " N"], weight: Float[Tensor, " N"]) -> Ticket:
        """Bet on the distribution (1 − weight)·p + weight·(that token)."""
        mass = self.dists.p.gather(1, token.clamp_min(0)[:, None])[:, 0].double()
        placed = self.open & (token >= 0) & (1 - mass > self.finest) & (mass > 0)
        return _on_set(name, mass, self.dists.positions.token == token, placed, weight.double())

    def dist(self, name: str, log_a: Float[Tensor, "N V"], where: Bool[Tensor, " N"] | None = None) -> Ticket:
        """Bet on another distribution; its values where p is 0 do not matter."""
        log_a_token = log_a.gather(1, self.dists.positions.token[:, None])[:, 0].double()
        placed = self.open if where is None else self.open & where
        placed = placed & ~log_a_token.isnan()
        ratio = torch.where(placed, (log_a_token - self.dists.log_p_token).exp(), 1.0)
        return Ticket(name, placed, ratio, *_growth_of_distribution(self.dists, log_a, placed))


def _on_set(
    name: str,
    mass: Float[Tensor, " N"],
    hit: Bool[Tensor, " N"],
    placed: Bool[Tensor, " N"],
    weight: Float[Tensor, " N"] | None = None,
) -> Ticket:
    """Bet on (1 − weight)·p + weight·(p given the set); weight 1 if None."""
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
    """Return the growth for each strength, and the total variation between a and p."""
    stride = 1 if log_a.shape[-1] <= SMALL_VOCABULARY else GROWTH_STRIDE
    p = dists.p[::stride]
    log_ratio = (log_a[::stride] - dists.log_p[::stride]).clamp(max=MAX_LOG_RATIO)
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
    # a coin that rejects is large: reused in an inverse CDF, it draws the later tokens of the residual
    later = residual * (2 * residual.cumsum(-1) - residual)
    yield table.dist("toward later tokens after a rejection", (shared + rejected * later).log(), apart)
    if drafted.log_raw is not None:
        yield table.dist("toward drafts judged by their raw distribution", _verified(p, q, drafted.log_raw.exp()).log())
    first = drafted.log_q.argmax(-1)
    yield from table.token("the drafter's first choice", first)
    yield table.partly(
        "toward the drafter's first choice, judged as drawn", first, (_at(p, first) / _at(q, first)).clamp(max=1)
    )


def _verified(
    p: Float[Tensor, "N V"], drawn: Float[Tensor, "N V"], declared: Float[Tensor, "N V"]
) -> Float[Tensor, "N V"]:
    """Return what the token rule emits if drafts are drawn from one distribution and declared as another."""
    kept = drawn * torch.where(declared > 0, p / declared, 1.0).clamp(max=1.0)
    residual = torch.where(_differ(p, declared)[:, None], _normalised((p - declared).clamp_min(0.0)), p)
    return kept + (1 - kept.sum(-1, keepdim=True)) * residual


def _on_shape(table: Table) -> Iterator[Ticket]:
    dists = table.dists
    for name, power in (("flatter", FLATTER), ("sharper", SHARPER)):
        scaled = torch.where(dists.log_p > -torch.inf, dists.log_p * power, -torch.inf)
        yield table.dist(f"toward a {name} distribution", scaled.log_softmax(-1))
    yield from table.token("the likeliest token", dists.log_p.argmax(-1))
    for name, edge in TAILS.items():
        mass = dists.p.masked_fill(dists.p >= edge, 0.0).sum(-1)
        hit = dists.p.gather(1, dists.positions.token[:, None])[:, 0] < edge
        yield from table.both(name, mass, hit)


def _on_repeats(table: Table) -> Iterator[Ticket]:
    dists = table.dists
    seen = output_counts(dists.positions, dists.p.shape[-1]) > 0
    mass = dists.p.masked_fill(~seen, 0.0).sum(-1)
    yield from table.both("what was said before", mass, seen.gather(1, dists.positions.token[:, None])[:, 0])
    yield table.token("the last token again", dists.positions.last)[0]


def _by_place(made: Sequence[Ticket], positions: Positions) -> Iterator[Ticket]:
    first, inside = positions.depth == 0, positions.depth > 0
    for ticket in made:
        if ticket.name in PLACED:
            yield ticket.only(first, "at the first token of a round")
            yield ticket.only(inside, "inside a round")


def _at(dist: Float[Tensor, "N V"], token: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    return dist.gather(1, token.clamp_min(0)[:, None])[:, 0]


def _normalised(weights: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """Normalise to probabilities; NaN in rows without mass, where no bet is placed."""
    return weights / weights.sum(-1, keepdim=True)


def _differ(p: Float[Tensor, "N V"], q: Float[Tensor, "N V"]) -> Bool[Tensor, " N"]:
    """Return where the residual is more than rounding."""
    return (p - q).clamp_min(0.0).sum(-1) > 1e-3


def _allowed(scores: Float[Tensor, "N V"], dists: TargetDistributions) -> Float[Tensor, "N V"]:
    """Return log-probabilities over the tokens that the target allows: any other is already reported as impossible."""
    return scores.masked_fill(dists.log_p == -torch.inf, -torch.inf).log_softmax(-1)


HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "toward the drafter's distribution": "drafts are kept too often, or tokens come from the drafter",
        "toward what both hold likely": "after a rejection the target is drawn from and not the residual",
        "away from the drafter's distribution": "drafts are kept too rarely, or bonus tokens come from the residual",
        "toward the drafter's first choice, judged as drawn": "drafts are argmaxes, and are tested as if drawn",
        "toward the drafter's first choice": "likely drafts are kept too often",
        "away from the drafter's first choice": "good drafts are thrown away",
        "toward later tokens after a rejection": "the coin that rejected a draft also draws its replacement",
        "toward drafts judged by their raw distribution": "q lacks the sampling parameters of the draft",
        "toward copied text, judged twice": "after a mismatch the token is drawn once more",
        "toward copied text": "copied drafts are kept too often",
        "away from copied text": "copied drafts are kept too rarely",
        "toward a flatter distribution": "the temperature is too high or not applied",
        "toward a sharper distribution": "the temperature is too low, or applied twice",
        "toward the likeliest token": "some tokens are greedy",
        "away from the likeliest token": "the likeliest token loses mass",
        "away from the tail beyond 24 bits": "the random numbers have too few bits to reach rare tokens",
        "toward what was said before": "a penalty is ignored, or drafts repeat the text",
        "away from what was said before": "a penalty is applied twice",
        "toward the last token again": "a token is emitted twice: a wrong rollback",
        "with penalties a round late": "penalties do not count the drafted tokens before a position",
    }
)


def hint(bet: str) -> str:
    """Return the defect that a winning bet suggests; empty if its name says it."""
    return next((text for name, text in HINTS.items() if bet.startswith(name)), "")
