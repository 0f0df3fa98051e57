"""The bets of an audit. Each is named after where a defect would lead, so that the one that wins names it.

Where a defect has a law of its own, that law is the bet, weighted position by position: a skipped residual gives
min(p, q) + (1 − α)·p with another α everywhere, and a fixed share of min(p, q) would lose where α is small what it wins
where α is large.

Bets look where drafts fire: at the drafter's law recomputed from the text, at what a copying drafter would propose, at
rounds' first tokens. A law averaged over everything else can be right where the drafts are wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.audit.drafted import Drafted, LawOf
from draftproof.audit.positions import Positions
from draftproof.audit.processors import TILTING, in_use, output_counts, tilted, without
from draftproof.audit.teacher import Laws, Teacher
from draftproof.audit.tickets import Table
from draftproof.audit.wealth import Ticket
from draftproof.core.sampling import Sampling

TAILS: Final[Mapping[str, float]] = MappingProxyType(
    {"the tail below 1e-2": 1e-2, "the tail below 1e-4": 1e-4, "the tail beyond 24 bits": 2.0**-24}
)
FLATTER, SHARPER = 0.8, 1.25


@dataclass(frozen=True, slots=True)
class Bettor:
    """All bets on a decoder with this sampling and, where it is known, this drafter."""

    sampling: Sampling
    tolerance: float
    drafter: Teacher | LawOf | None = None
    copying: bool = False
    """Whether drafts are known to be copied from the text, all or some of them."""
    traced: bool = False
    """Whether the decoder tells its rounds."""

    @property
    def mixtures(self) -> tuple[str, ...]:
        """Bets on what is drafted: a clean audit must have been able to see the bias that is asked for in each."""
        law = () if self.drafter is None else ("toward the drafter's law",)
        return law + (("toward copied text",) if self.copying or not law else ())

    @property
    def defects(self) -> tuple[str, ...]:
        """Bets on laws that known defects have: a clean audit must have been able to see each whole defect. They are no
        mixtures with the draft, and one can be invisible long after the other would have been seen."""
        named = {
            "toward the drafter's law": (
                "toward what both hold likely",
                "toward the drafter's first choice, judged as drawn",
            ),
            "toward copied text": ("toward copied text, judged twice",),
        }
        return tuple(defect for mixture in self.mixtures for defect in named[mixture])

    def drafted(self, laws: Laws) -> Drafted | None:
        """What the drafter would draw from at these positions; None where no law of it is known."""
        return None if self.drafter is None else Drafted.by(self.drafter, laws, self.sampling)

    def tickets(self, laws: Laws, drafted: Drafted | None) -> list[Ticket]:
        """Every bet on these positions, always in the same order; `drafted` as that method tells it."""
        table = Table(laws, laws.clear & ~laws.impossible, self.tolerance)
        made = [*_on_drafts(table, drafted), *_on_shape(table), *_on_repeats(table), *self._on_parameters(table)]
        return made + (list(_by_place(made, laws.positions)) if self.traced else [])

    def _on_parameters(self, table: Table) -> Iterator[Ticket]:
        """Laws with one parameter left out, on the tokens that the right law allows: the others are impossible."""
        laws = table.laws
        for name in in_use(self.sampling):
            if name in TILTING:
                log_a = _allowed(tilted(laws.scores, laws.positions, without(self.sampling, name)), laws)
                yield table.law(f"without the {name.replace('_', ' ')}", log_a)
        if self.sampling.penalises:
            positions = laws.positions
            lag = torch.where(positions.depth >= 0, positions.depth, 1).minimum(positions.said)
            log_a = _allowed(tilted(laws.scores, positions.late(lag), self.sampling), laws)
            yield table.law("with penalties a round late", log_a, lag > 0)


def _on_drafts(table: Table, drafted: Drafted | None) -> Iterator[Ticket]:
    copied, p = table.laws.positions.continuation, table.laws.p
    yield from table.token("copied text", copied)
    yield table.partly("toward copied text, judged twice", copied, _at(p, copied))
    if drafted is not None:
        yield from _on_laws(table, drafted)


def _on_laws(table: Table, drafted: Drafted) -> Iterator[Ticket]:
    p, q = table.laws.p, drafted.q
    shared, residual = torch.minimum(p, q), _normalised((p - q).clamp_min(0.0))
    rejected, apart = 1 - shared.sum(-1, keepdim=True), _differ(p, q)
    yield table.law("toward the drafter's law", _allowed(drafted.log_q, table.laws))
    yield table.law("toward what both hold likely", (shared + rejected * p).log())
    yield table.law("away from the drafter's law", residual.log(), apart)
    # a coin that rejects is large; used once more, by inverse CDF, it draws the later tokens of the residual
    later = residual * (2 * residual.cumsum(-1) - residual)
    yield table.law("toward later tokens after a rejection", (shared + rejected * later).log(), apart)
    if drafted.log_raw is not None:
        yield table.law("toward drafts judged by their raw law", _judged(p, q, drafted.log_raw.exp()).log())
    first = drafted.log_q.argmax(-1)
    yield from table.token("the drafter's first choice", first)
    yield table.partly(
        "toward the drafter's first choice, judged as drawn", first, (_at(p, first) / _at(q, first)).clamp(max=1)
    )


def _judged(p: Float[Tensor, "N V"], drawn: Float[Tensor, "N V"], said: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """What the token rule emits if drafts are drawn from one law and said to come from another."""
    kept = drawn * torch.where(said > 0, p / said, 1.0).clamp(max=1.0)
    closing = torch.where(_differ(p, said)[:, None], _normalised((p - said).clamp_min(0.0)), p)
    return kept + (1 - kept.sum(-1, keepdim=True)) * closing


def _on_shape(table: Table) -> Iterator[Ticket]:
    laws = table.laws
    for name, power in (("flatter", FLATTER), ("sharper", SHARPER)):
        scaled = torch.where(laws.log_p > -torch.inf, laws.log_p * power, -torch.inf)
        yield table.law(f"toward a {name} law", scaled.log_softmax(-1))
    yield from table.token("the likeliest token", laws.log_p.argmax(-1))
    for name, edge in TAILS.items():
        mass = laws.p.masked_fill(laws.p >= edge, 0.0).sum(-1)
        said = laws.p.gather(1, laws.positions.token[:, None])[:, 0] < edge
        yield from table.both(name, mass, said)


def _on_repeats(table: Table) -> Iterator[Ticket]:
    laws = table.laws
    seen = output_counts(laws.positions, laws.p.shape[-1]) > 0
    mass = laws.p.masked_fill(~seen, 0.0).sum(-1)
    yield from table.both("what was said before", mass, seen.gather(1, laws.positions.token[:, None])[:, 0])
    yield table.token("the last token again", laws.positions.last)[0]


PLACED: Final = (
    "toward copied text",
    "toward copied text, judged twice",
    "away from copied text",
    "toward the drafter's law",
    "toward what both hold likely",
    "away from the drafter's law",
    "toward a flatter law",
    "toward a sharper law",
)
"""Bets that are also made at rounds' first tokens only, and behind them only: where in a round a defect strikes."""


def _by_place(made: Sequence[Ticket], positions: Positions) -> Iterator[Ticket]:
    first, inside = positions.depth == 0, positions.depth > 0
    for ticket in made:
        if ticket.name in PLACED:
            yield ticket.only(first, "at the first token of a round")
            yield ticket.only(inside, "inside a round")


def _at(law: Float[Tensor, "N V"], token: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    return law.gather(1, token.clamp_min(0)[:, None])[:, 0]


def _normalised(weights: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """As probabilities; NaN where there is no mass, which is no bet."""
    return weights / weights.sum(-1, keepdim=True)


def _differ(p: Float[Tensor, "N V"], q: Float[Tensor, "N V"]) -> Bool[Tensor, " N"]:
    """Where the residual is more than rounding."""
    return (p - q).clamp_min(0.0).sum(-1) > 1e-3


def _allowed(scores: Float[Tensor, "N V"], laws: Laws) -> Float[Tensor, "N V"]:
    """As log-probabilities over the tokens that the target's law allows: what is outside shows as impossible."""
    return scores.masked_fill(laws.log_p == -torch.inf, -torch.inf).log_softmax(-1)
