"""A rule that remembers what it saw and what it decided. The engine does not know that it is watched."""

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

Fate = Literal["kept", "rejected", "dropped"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that matters at a position: under p, under q, and in the residual max(0, w·p − q)."""

    token: int
    p: float
    q: float
    residual: float


@dataclass(frozen=True, slots=True)
class Slot:
    """A drafted token and what became of it.

    ratio   p/q
    chance  what the coin was held against; by token min(1, p/q), by block the chance of keeping the draft up to here
    judged  whether the rule came to look at this coin
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
    """The token that ends the round: from the residual after a rejection, from p after none.

    `weight` is the w of the residual max(0, w·p − q), 1 unless a block was judged; `chance` is the token's probability
    under the distribution it was drawn from.
    """

    token: int
    p: float
    after_rejection: bool
    weight: float
    candidates: tuple[Candidate, ...]
    chance: float


@dataclass(frozen=True, slots=True)
class Round:
    slots: tuple[Slot, ...]
    kept: int
    closing: Closing
    as_block: bool

    @property
    def tokens(self) -> list[int]:
        """What the round emitted."""
        return [slot.token for slot in self.slots[: self.kept]] + [self.closing.token]

    def fate(self, i: int) -> Fate:
        """Of slot i. By token, what stands behind a rejected token is dropped without a look at it."""
        if i < self.kept:
            return "kept"
        return "rejected" if i == self.kept or self.as_block else "dropped"


WATCHED: Final = ("token", "block")
"""The rules that throw a coin a token. `coupled` throws none, and `tree` judges no chain."""

SHOWN: Final = 6
"""Tokens that each of p, q and the residual brings into a picture."""


class Recorder:
    """Decides as its rule does, for one row, and keeps the rounds.

    Nothing is drawn twice: noise is a key, so the coins the rule threw are read off it afterwards.
    """

    def __init__(self, rule: str) -> None:
        if rule not in WATCHED:
            raise ValueError(f"rounds can be shown for the rules {' and '.join(WATCHED)}, not for {rule!r}")
        self._verify: Verifier = RULES[rule]
        self._rule = rule
        self.rounds: list[Round] = []

    def __call__(self, p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        if len(draft.lengths) != 1:
            raise ValueError(f"a recorder watches one request at a time; got a batch of {len(draft.lengths)}")
        verdict = self._verify(p, draft, rng)
        # a chosen draft is judged token by token under either rule
        as_block = self._rule == "block" and draft.q is not None
        self.rounds.append(_Row(p, draft, rng, as_block).round(verdict))
        return verdict


class _Row:
    """One round of one row, laid out for reading."""

    def __init__(self, p: Distribution, draft: Draft, rng: Philox, as_block: bool) -> None:
        self.p, self.draft, self.as_block = p, draft, as_block
        self.K = int(draft.lengths[0])
        self.tokens = draft.tokens[0, : self.K].tolist()
        self.coins = rng.coins(draft.tokens.shape[1])[0, : self.K].tolist()
        self.ratios = log_ratios(p, draft)[0, : self.K].exp().tolist()
        # behind the whole draft nothing is taken away from p: its weight is only the chance of getting there
        walked = log_weights(p, draft)[0, : self.K + 1].exp().tolist() if as_block else [1.0] * (self.K + 1)
        self.whole, self.weights = walked[self.K], [*walked[: self.K], 1.0]

    def round(self, verdict: Verdict) -> Round:
        kept = int(verdict.accepted[0])
        closing = int(verdict.tokens[0, kept])
        slots = tuple(self._slot(i, kept, closing) for i in range(self.K))
        spare = self._spare(kept)
        dist = normalise(spare, self._probs(kept))
        return Round(
            slots,
            kept,
            Closing(
                closing,
                float(self._probs(kept)[closing]),
                kept < self.K,
                self.weights[kept],
                self._candidates(kept, (closing,)),
                float(dist[closing]),
            ),
            self.as_block,
        )

    def _slot(self, i: int, kept: int, closing: int) -> Slot:
        token = self.tokens[i]
        matter = (token, closing) if i == kept else (token,)
        q = draft_prob_of(self.draft, *self._place(i), torch.tensor([[token]], device=self.p.lse.device))
        return Slot(
            token=token,
            p=float(self._probs(i)[token]),
            q=float(q[0, 0]),
            ratio=self.ratios[i],
            chance=self._chance(i),
            coin=self.coins[i],
            # by token: in order, up to the first miss; by block: from the end, down to the first success
            judged=i >= kept - 1 if self.as_block else i <= kept,
            kept=i < kept,
            drawn=self._drawn(i),
            candidates=self._candidates(i, matter),
        )

    def _chance(self, i: int) -> float:
        """What the coin of slot i is held against: for a block, of keeping exactly the draft up to it."""
        if not self.as_block:
            return float(min(1.0, self.ratios[i]))
        if i == self.K - 1:
            return float(self.whole)
        rows, at = self._place(i + 1)
        weight = torch.tensor([self.weights[i + 1]], dtype=torch.float64, device=self.p.lse.device).log()
        return float(stop_point(self.p, self.draft, weight, rows, at)[0])

    def _drawn(self, i: int) -> bool:
        return self.draft.q is not None and (self.draft.drawn is None or bool(self.draft.drawn[0, i]))

    def _place(self, i: int) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
        device = self.p.lse.device
        return torch.zeros(1, dtype=torch.long, device=device), torch.tensor([i], device=device)

    def _probs(self, i: int) -> Float[Tensor, " V"]:
        return self.p.at(*self._place(i)).probs()[0]

    def _guess(self, i: int) -> Float[Tensor, " V"]:
        """q at position i; nothing behind the end of the draft."""
        p = self.p.at(*self._place(i)).probs()
        return torch.zeros_like(p[0]) if i >= self.K else draft_probs(self.draft, *self._place(i), p)[0]

    def _spare(self, i: int) -> Float[Tensor, " V"]:
        spare: Tensor = self.weights[i] * self._probs(i) - self._guess(i)
        return spare.clamp_min(0)

    def _candidates(self, i: int, tokens: tuple[int, ...]) -> tuple[Candidate, ...]:
        """The tokens that matter at position i: these, and the likeliest under p, q and the residual."""
        p, q, spare = self._probs(i), self._guess(i), self._spare(i)
        count = min(SHOWN, len(p))
        found = {*tokens, *(t for dist in (p, q, spare) for t in dist.topk(count).indices.tolist() if dist[t] > 0)}
        order = sorted(found, key=lambda t: (-max(float(p[t]), float(q[t])), t))
        wanted = [t for n, t in enumerate(order) if n < SHOWN + 2 or t in tokens]
        return tuple(Candidate(t, float(p[t]), float(q[t]), float(spare[t])) for t in wanted)
