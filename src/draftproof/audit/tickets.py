"""Two ways to write a bet: on a set of tokens, and on another law."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.audit.teacher import SMALL, Laws
from draftproof.audit.wealth import STRENGTHS, Ticket

STRIDE: Final = 8
"""On a large vocabulary the growth of a bet on a law is worked out at every so many positions, and stands for them."""


LARGEST: Final = 80.0
"""The log of a ratio a/p beyond which growth is not counted: float32 would overflow."""


@dataclass(frozen=True, slots=True)
class Table:
    """Where bets are written: the laws, the positions at which one may bet, and what rounding may do to them."""

    laws: Laws
    open: Bool[Tensor, " N"]
    tolerance: float

    @property
    def finest(self) -> float:
        """A mass below this is not known to within the tolerance if it is found as 1 − the rest."""
        return 16 * float(torch.finfo(self.laws.log_p.dtype).eps) / self.tolerance

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
        mass = self.laws.p.gather(1, token.clamp_min(0)[:, None])[:, 0]
        return self.both(name, mass, self.laws.positions.token == token, there)

    def partly(self, name: str, token: Int[Tensor, " N"], weight: Float[Tensor, " N"]) -> Ticket:
        """A bet on the law (1 − weight)·p + weight·(that token)."""
        mass = self.laws.p.gather(1, token.clamp_min(0)[:, None])[:, 0].double()
        placed = self.open & (token >= 0) & (1 - mass > self.finest) & (mass > 0)
        return _on_set(name, mass, self.laws.positions.token == token, placed, weight.double())

    def law(self, name: str, log_a: Float[Tensor, "N V"], where: Bool[Tensor, " N"] | None = None) -> Ticket:
        """A bet on another law. Where p is 0 it may say anything: nothing is won there."""
        said = log_a.gather(1, self.laws.positions.token[:, None])[:, 0].double()
        placed = self.open if where is None else self.open & where
        placed = placed & ~said.isnan()
        ratio = torch.where(placed, (said - self.laws.log_p_said).exp(), 1.0)
        return Ticket(name, placed, ratio, *_growth_of_law(self.laws, log_a, placed))


def _on_set(
    name: str,
    mass: Float[Tensor, " N"],
    hit: Bool[Tensor, " N"],
    placed: Bool[Tensor, " N"],
    weight: Float[Tensor, " N"] | None = None,
) -> Ticket:
    """A bet on the law that leaves a set with its own mass and moves `weight` of everything into it; all if None."""
    mass = torch.where(placed, mass, 0.5)
    moved = torch.ones_like(mass) if weight is None else weight
    won, lost = moved * (1 / mass - 1), -moved  # a/p − 1 inside the set and outside
    ratio = torch.where(placed, 1 + torch.where(hit, won, lost), 1.0)
    shares = torch.tensor(STRENGTHS, dtype=torch.float64, device=mass.device)
    gain, loss = 1 + shares * won[:, None], 1 + shares * lost[:, None]
    inside = mass[:, None] * gain  # the set's mass under the alternative
    growth = inside * gain.log() + (1 - inside) * loss.log()
    return Ticket(name, placed, ratio, growth * placed[:, None], moved * (1 - mass) * placed)


def _growth_of_law(
    laws: Laws, log_a: Float[Tensor, "N V"], placed: Bool[Tensor, " N"]
) -> tuple[Float[Tensor, "N E"], Float[Tensor, " N"]]:
    """The growth for each strength, and the total variation between the two laws."""
    stride = 1 if log_a.shape[-1] <= SMALL else STRIDE
    p = laws.p[::stride]
    log_ratio = (log_a[::stride] - laws.log_p[::stride]).clamp(max=LARGEST)
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
