"""Record what a verification rule saw and decided, by wrapping the rule that the engine calls."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.distribution import Distribution, normalise
from draftproof.core.rng import Philox
from draftproof.core.types import Draft, Verdict
from draftproof.rules import RULES, Verifier
from draftproof.rules.block import log_weights, stop_point
from draftproof.rules.chain import draft_prob_of, draft_probs, log_ratios

WATCHED: Final = ("token", "block")
"""Rules that can be recorded: those with one coin per draft token. `coupled` has none, and `tree` has no chain."""

TOP_TOKENS: Final = 6
"""Tokens of each of p, q and the residual that are shown at a position."""

Fate = Literal["kept", "rejected", "dropped"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token shown at a position, with its probability under p and q and its residual max(0, w·p − q)."""

    token: int
    p: float
    q: float
    residual: float


@dataclass(frozen=True, slots=True)
class Slot:
    """A draft token and the decision about it.

    ratio   p/q
    chance  the threshold of the coin: min(1, p/q) by token; by block, the chance of keeping the draft up to here
    judged  whether the rule compared this coin
    drawn   whether the token was drawn from q; otherwise it was chosen, and q is 1 on it
    """

    token: int
    p: float
    q: float
    ratio: float
    chance: float
    coin: float
    judged: bool
    kept: bool
    drawn: bool
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Closing:
    """The round's last token: the residual token after a rejection, the bonus token after none.

    `weight` is the w of the residual max(0, w·p − q), and 1 except by block. `chance` is the token's probability under
    the distribution it was drawn from.
    """

    token: int
    p: float
    after_rejection: bool
    weight: float
    candidates: tuple[Candidate, ...]
    chance: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round: its draft tokens, how many were kept, and its last token.

    `as_block` tells whether the draft was verified as a block.
    """

    slots: tuple[Slot, ...]
    kept: int
    closing: Closing
    as_block: bool

    @property
    def tokens(self) -> list[int]:
        """Return the tokens that the round emitted."""
        return [slot.token for slot in self.slots[: self.kept]] + [self.closing.token]

    def fate(self, i: int) -> Fate:
        """Return what happened to draft token i. By token, those after a rejected one are dropped unexamined."""
        if i < self.kept:
            return "kept"
        return "rejected" if i == self.kept or self.as_block else "dropped"


class Recorder:
    """A rule that decides as the named one does, for a batch of one, and records the rounds.

    The coins are computed again for the record: the rng is addressed by position, so they are the rule's own.
    """

    def __init__(self, rule: str) -> None:
        if rule not in WATCHED:
            raise ValueError(f"rounds can be shown for the rules {' and '.join(WATCHED)}, not for {rule!r}")
        self._verify: Verifier = RULES[rule]
        self._rule = rule
        self.rounds: list[Round] = []

    def __call__(self, p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        if len(draft.lengths) != 1:
            raise ValueError(f"a recorder records one request at a time; got a batch of {len(draft.lengths)}")
        verdict = self._verify(p, draft, rng)
        # without q both rules verify token by token
        as_block = self._rule == "block" and draft.q is not None
        self.rounds.append(_RoundReader(p, draft, rng, as_block).round(verdict))
        return verdict


class _RoundReader:
    """The numbers of one round of a single request, as Python values."""

    def __init__(self, p: Distribution, draft: Draft, rng: Philox, as_block: bool) -> None:
        self.p, self.draft, self.as_block = p, draft, as_block
        self.K = int(draft.lengths[0])
        self.tokens = draft.tokens[0, : self.K].tolist()
        self.coins = rng.coins(draft.tokens.shape[1])[0, : self.K].tolist()
        self.ratios = log_ratios(p, draft)[0, : self.K].exp().tolist()
        weights = log_weights(p, draft)[0, : self.K + 1].exp().tolist() if as_block else [1.0] * (self.K + 1)
        # after the whole draft the bonus token comes from p itself: the last weight is only the chance of getting there
        self.whole_chance, self.weights = weights[self.K], [*weights[: self.K], 1.0]

    def round(self, verdict: Verdict) -> Round:
        """Combine the verdict with the numbers it came from."""
        kept = int(verdict.accepted[0])
        last = int(verdict.tokens[0, kept])
        slots = tuple(self._slot(i, kept, last) for i in range(self.K))
        dist = normalise(self._residual(kept), self._target_probs(kept))
        return Round(
            slots,
            kept,
            Closing(
                last,
                float(self._target_probs(kept)[last]),
                kept < self.K,
                self.weights[kept],
                self._candidates(kept, (last,)),
                float(dist[last]),
            ),
            self.as_block,
        )

    def _slot(self, i: int, kept: int, last: int) -> Slot:
        token = self.tokens[i]
        always_shown = (token, last) if i == kept else (token,)
        q = draft_prob_of(self.draft, *self._index(i), torch.tensor([[token]], device=self.p.lse.device))
        return Slot(
            token=token,
            p=float(self._target_probs(i)[token]),
            q=float(q[0, 0]),
            ratio=self.ratios[i],
            chance=self._chance(i),
            coin=self.coins[i],
            # by token: in order, up to the first rejection; by block: from the end, down to the first success
            judged=i >= kept - 1 if self.as_block else i <= kept,
            kept=i < kept,
            drawn=self._drawn(i),
            candidates=self._candidates(i, always_shown),
        )

    def _chance(self, i: int) -> float:
        """Return the threshold of coin i; by block, the chance of keeping exactly the draft up to token i."""
        if not self.as_block:
            return float(min(1.0, self.ratios[i]))
        if i == self.K - 1:
            return float(self.whole_chance)
        rows, at = self._index(i + 1)
        weight = torch.tensor([self.weights[i + 1]], dtype=torch.float64, device=self.p.lse.device).log()
        return float(stop_point(self.p, self.draft, weight, rows, at)[0])

    def _drawn(self, i: int) -> bool:
        return self.draft.q is not None and (self.draft.drawn is None or bool(self.draft.drawn[0, i]))

    def _index(self, i: int) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
        """Return row 0 and position i as index tensors."""
        device = self.p.lse.device
        return torch.zeros(1, dtype=torch.long, device=device), torch.tensor([i], device=device)

    def _target_probs(self, i: int) -> Float[Tensor, " V"]:
        return self.p.at(*self._index(i)).probs()[0]

    def _draft_probs(self, i: int) -> Float[Tensor, " V"]:
        """Return q at position i, and zeros after the end of the draft."""
        p = self.p.at(*self._index(i)).probs()
        return torch.zeros_like(p[0]) if i >= self.K else draft_probs(self.draft, *self._index(i), p)[0]

    def _residual(self, i: int) -> Float[Tensor, " V"]:
        """Return max(0, w·p − q) at position i, not normalised."""
        difference: Tensor = self.weights[i] * self._target_probs(i) - self._draft_probs(i)
        return difference.clamp_min(0)

    def _candidates(self, i: int, tokens: tuple[int, ...]) -> tuple[Candidate, ...]:
        """Return these tokens and the likeliest under p, q and the residual at position i."""
        p, q, residual = self._target_probs(i), self._draft_probs(i), self._residual(i)
        count = min(TOP_TOKENS, len(p))
        found = {*tokens, *(t for dist in (p, q, residual) for t in dist.topk(count).indices.tolist() if dist[t] > 0)}
        order = sorted(found, key=lambda t: (-max(float(p[t]), float(q[t])), t))
        shown = [t for n, t in enumerate(order) if n < TOP_TOKENS + 2 or t in tokens]
        return tuple(Candidate(t, float(p[t]), float(q[t]), float(residual[t])) for t in shown)
