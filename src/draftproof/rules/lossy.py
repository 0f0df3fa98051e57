"""The only place with inexact rules. Each is opt-in, says so in its verdict, and measures how far off it is.

None of them has a name that `rule=` would take: who wants one passes it, `rule=draftproof.lossy.lenient(0.8)`. For
each draft position the verdict carries the total variation and the KL divergence between the distribution of the token that
leaves there and the target's, given that the round gets there; both bounds add up along a text (KL exactly).
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
    """Token verification with the residual skipped: a rejected position is drawn from p itself.

    Other implementations offer this as "skip the sample adjustment". What leaves has the distribution min(p, q) + β·p with
    β = TV(p, q): tokens that the drafter likes come too often, by α·(1 − α)·TV(accepted distribution, residual distribution) ≤ 1/4.
    """
    refuse_inexact(draft, "unadjusted")
    kept = rng.coins(draft.tokens.shape[1]).log() < log_ratios(p, draft)
    return _from_p(p, draft, rng, kept, lambda p, q: p.minimum(q) + (1 - overlap(p, q))[..., None] * p)


@dataclass(frozen=True, slots=True)
class lenient:  # noqa: N801  (it is used as a function that returns a rule)
    """Keep with probability min(1, p/(ℓ·q)), ℓ < 1: more is kept, and no token comes more often than p/ℓ.

    With the standard residual the total variation is Σ max(0, min(q, p/ℓ) − p), the least that any correction allows.
    """

    leniency: float

    def __post_init__(self) -> None:
        if not 0 < self.leniency <= 1:
            raise ValueError(f"leniency must lie in (0, 1] (1 is exact); got {self.leniency!r}")

    def __call__(self, p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        refuse_inexact(draft, "lenient")
        coins = rng.coins(draft.tokens.shape[1]) * self.leniency
        accepted = leading((coins.log() < log_ratios(p, draft)) & real(draft))
        exact = verdict(draft, accepted, closing(p, draft, accepted, rng))
        return _metered(exact, p, draft, self._dist)

    def _dist(self, p: Tensor, q: Tensor) -> Tensor:
        kept = q.minimum(p / self.leniency)
        return kept + (1 - kept.sum(-1, keepdim=True)) * residual(p, q)


@dataclass(frozen=True, slots=True)
class typical:  # noqa: N801
    """Keep what the target finds typical: p(x) > min(ε, δ·exp(−H(p))) (Cai et al. 2024, Medusa). No coin is thrown.

    The drift is not bounded: an accepted chosen token is always emitted, however unlikely (total variation 1 − p).
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1]; got {getattr(self, name)!r}")

    def __call__(self, p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        refuse_inexact(draft, "typical")
        K = draft.tokens.shape[1]
        kept = self._accepts(p.head(K).probs()).gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0]
        return _from_p(p, draft, rng, kept, self._dist)

    def _accepts(self, p: Float[Tensor, "*B V"]) -> Bool[Tensor, "*B V"]:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        typical_enough: Tensor = p > (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        return typical_enough

    def _dist(self, p: Tensor, q: Tensor) -> Tensor:
        accepted = q * self._accepts(p)
        return accepted + (1 - accepted.sum(-1, keepdim=True)) * p


Output = Callable[[Tensor, Tensor], Tensor]
"""(p, q) ↦ the distribution of the token that leaves."""


def _from_p(p: Distribution, draft: Draft, rng: Philox, kept: Bool[Tensor, "B K"], output: Output) -> Verdict:
    """Keep the leading run, close from p whatever happened."""
    accepted = leading(kept & real(draft))
    rows = torch.arange(len(accepted), device=accepted.device)
    return _metered(verdict(draft, accepted, close(p.weights_at(rows, accepted)[0], rng)), p, draft, output)


def _metered(made: Verdict, p: Distribution, draft: Draft, output: Output) -> Verdict:
    B, K = draft.tokens.shape
    here = p.head(K).probs()
    rows, at = torch.arange(B, device=here.device).repeat_interleave(K), torch.arange(K, device=here.device).repeat(B)
    q = draft_probs(draft, rows, at, here.flatten(0, 1)).view_as(here)
    out = output(here, q)
    log_ratio = torch.where(out > 0, (out / here).log(), 0.0)
    outside = ~real(draft)
    deviation = Deviation(
        total_variation(out, here).masked_fill(outside, 0.0),
        (out * log_ratio).sum(-1).clamp_min(0).masked_fill(outside, 0.0),
    )
    return Verdict(made.tokens, made.accepted, exact=False, deviation=deviation)
