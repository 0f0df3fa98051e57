"""Lossy rules: inexact verification, opt-in, with a measure of the bias in every verdict.

This is the only file with inexact rules. None of them has a name that `rule=` accepts: they are passed as functions,
`rule=draftproof.lossy.lenient(0.8)`. For each draft position the verdict holds the total variation and the KL
divergence between the distribution of the token emitted there and the target's, given that the round gets there. Along
a text both add up to bounds (KL exactly).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof.core.distribution import Distribution, overlap, residual, total_variation
from draftproof.core.draw import close
from draftproof.core.rng import Philox
from draftproof.core.tree import real
from draftproof.core.types import Deviation, Draft, Verdict
from draftproof.rules.chain import draft_probs, log_ratios, refuse_inexact, verdict
from draftproof.rules.token import closing, leading


def unadjusted(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Verify token by token without the residual: a rejected position is drawn from p itself.

    Other implementations offer this as "skip the sample adjustment". The emitted token has the distribution
    min(p, q) + β·p with β = TV(p, q): tokens that the drafter favours come too often. With α = 1 − β, the bias is
    α·(1 − α)·TV(norm(min(p, q)), norm(max(0, p − q))) ≤ 1/4 in total variation.
    """
    refuse_inexact(draft, "unadjusted")
    kept = rng.coins(draft.tokens.shape[1]).log() < log_ratios(p, draft)
    return _last_from_p(p, draft, rng, kept, lambda p, q: p.minimum(q) + (1 - overlap(p, q))[..., None] * p)


def lenient(leniency: float) -> "LenientRule":
    """Return a rule that accepts with probability min(1, p/(ℓ·q)), ℓ ≤ 1: more is kept, no token exceeds p/ℓ.

    With the standard residual the total variation is Σ max(0, min(q, p/ℓ) − p), the least that any correction allows.
    """
    return LenientRule(leniency)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> "TypicalRule":
    """Return a rule that accepts typical tokens: p(x) > min(ε, δ·exp(−H(p))) (Cai et al. 2024, Medusa).

    It needs no coins. The bias is not bounded: a chosen token that is accepted is always emitted, however unlikely
    (total variation 1 − p).
    """
    return TypicalRule(epsilon, delta)


@dataclass(frozen=True, slots=True)
class LenientRule:
    """The rule made by `lenient`."""

    leniency: float

    def __post_init__(self) -> None:
        if not 0 < self.leniency <= 1:
            raise ValueError(f"leniency must lie in (0, 1] (1 is exact); got {self.leniency!r}")

    @property
    def __name__(self) -> str:
        return "lenient"

    def __call__(self, p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        refuse_inexact(draft, "lenient")
        coins = rng.coins(draft.tokens.shape[1]) * self.leniency
        accepted = leading((coins.log() < log_ratios(p, draft)) & real(draft))
        decided = verdict(draft, accepted, closing(p, draft, accepted, rng))
        return _measured(decided, p, draft, self._emitted)

    def _emitted(self, p: Tensor, q: Tensor) -> Tensor:
        kept = q.minimum(p / self.leniency)
        return kept + (1 - kept.sum(-1, keepdim=True)) * residual(p, q)


@dataclass(frozen=True, slots=True)
class TypicalRule:
    """The rule made by `typical`."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]; got {getattr(self, name)!r}")

    @property
    def __name__(self) -> str:
        return "typical"

    def __call__(self, p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        refuse_inexact(draft, "typical")
        K = draft.tokens.shape[1]
        kept = self._accepts(p.head(K).probs()).gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0]
        return _last_from_p(p, draft, rng, kept, self._emitted)

    def _accepts(self, p: Float[Tensor, "*B V"]) -> Bool[Tensor, "*B V"]:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        typical_enough: Tensor = p > (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        return typical_enough

    def _emitted(self, p: Tensor, q: Tensor) -> Tensor:
        accepted = q * self._accepts(p)
        return accepted + (1 - accepted.sum(-1, keepdim=True)) * p


EmittedDistribution = Callable[[Tensor, Tensor], Tensor]
"""Maps p and q of a position to the distribution of the token that a rule emits there."""


def _last_from_p(
    p: Distribution, draft: Draft, rng: Philox, kept: Bool[Tensor, "B K"], emitted: EmittedDistribution
) -> Verdict:
    """Accept the leading run of `kept`, and draw the round's last token from p even after a rejection."""
    accepted = leading(kept & real(draft))
    rows = torch.arange(len(accepted), device=accepted.device)
    return _measured(verdict(draft, accepted, close(p.weights_at(rows, accepted)[0], rng)), p, draft, emitted)


def _measured(decided: Verdict, p: Distribution, draft: Draft, emitted: EmittedDistribution) -> Verdict:
    """Mark a verdict as inexact and add its deviation from the target."""
    B, K = draft.tokens.shape
    here = p.head(K).probs()
    rows, at = torch.arange(B, device=here.device).repeat_interleave(K), torch.arange(K, device=here.device).repeat(B)
    q = draft_probs(draft, rows, at, here.flatten(0, 1)).view_as(here)
    out = emitted(here, q)
    log_ratio = torch.where(out > 0, (out / here).log(), 0.0)
    outside = ~real(draft)
    deviation = Deviation(
        total_variation(out, here).masked_fill(outside, 0.0),
        (out * log_ratio).sum(-1).clamp_min(0).masked_fill(outside, 0.0),
    )
    return Verdict(decided.tokens, decided.accepted, exact=False, deviation=deviation)
