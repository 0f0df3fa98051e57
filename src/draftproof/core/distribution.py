"""A distribution over tokens, held as logits and a few numbers a row; and the facts about two distributions that exactness rests on.

Temperature, top-k, top-p and min-p all come down to three numbers for each row, a scale, a cutoff and a normaliser:

    p(t) = exp(scale · logit(t) − lse)   where logit(t) ≥ cutoff, and 0 elsewhere.

So nothing of the vocabulary's size is written until somebody asks for it. All logits equal to the cutoff are kept.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.draw import chunk_sums, draw, race_weights
from draftproof.core.rng import Philox, Purpose
from draftproof.core.types import PAD


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """A drafter's smaller vocabulary inside the target's: what is not in it has probability 0.

    `ids[r]` is the target's id of entry r; `entry[t]` is the entry of the target's token t, PAD where there is none.
    """

    ids: Int[Tensor, " R"]
    entry: Int[Tensor, " V"]

    @classmethod
    def of(cls, ids: Int[Tensor, " R"], V: int) -> "DraftVocab":
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= V):
            raise ValueError(f"draft_ids must lie in [0, {V}), the target's vocabulary; got up to {int(ids.max())}")
        if len(ids.unique()) != len(ids):
            raise ValueError("draft_ids names a token twice; each entry of the draft vocabulary is one token")
        entry = torch.full((V,), PAD, dtype=torch.long, device=ids.device)
        entry[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, entry)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of any number of rows, by reference to their logits.

    `point` is the one possible token of a greedy row, PAD elsewhere: temperature 0 is the limit distribution, a point mass on
    the first argmax, and never an infinite scale. `lse` is NaN where a row is no distribution at all: NaN or +inf among its
    logits, or nothing allowed. `scale` and `lse` are float64: log-probabilities are differences of large numbers.
    `plain` says that no row has a cutoff or a point: who made the distribution knows, and nobody needs to look.
    """

    logits: Float[Tensor, "*B R"]
    scale: Float[Tensor, "*B"]
    cutoff: Float[Tensor, "*B"]
    lse: Float[Tensor, "*B"]
    point: Int[Tensor, "*B"]
    vocab: DraftVocab | None = None
    plain: bool = False

    @classmethod
    def of(cls, probs: Float[Tensor, "*B V"]) -> "Distribution":
        """The distribution with these probabilities, or with these weights normalised."""
        lse = probs.double().sum(-1).log()
        return cls(
            probs.log(),
            torch.ones_like(lse),
            torch.full_like(lse, -torch.inf, dtype=probs.dtype),
            lse.masked_fill(~torch.isfinite(lse), torch.nan),
            torch.full_like(lse, PAD, dtype=torch.long),
            plain=True,
        )

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1] if self.vocab is None else len(self.vocab.entry)

    def at(self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> "Distribution":
        """The distributions of N places out of [B, J], their logits copied."""
        if self.logits.is_contiguous():  # whole rows are copied several times faster so
            logits = self.logits.flatten(0, 1).index_select(0, rows * self.logits.shape[1] + positions)
        else:
            logits = self.logits[rows, positions]
        return self._part(logits, (rows, positions))

    def head(self, K: int) -> "Distribution":
        """The first K positions out of [B, J], by reference."""
        return self._part(self.logits[:, :K], (slice(None), slice(K)))

    @property
    def first(self) -> "Distribution":
        """The first position out of [B, J], by reference: distributions of shape [B]."""
        return self._part(self.logits[:, 0], (slice(None), 0))

    def _part(self, logits: Tensor, place: Any) -> "Distribution":
        numbers = [part[place] for part in (self.scale, self.cutoff, self.lse, self.point)]
        return Distribution(logits, numbers[0], numbers[1], numbers[2], numbers[3], self.vocab, self.plain)

    def log_prob(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        """log p(token), float64, −inf where impossible. A PAD is read as token 0: the caller masks what it padded."""
        return self.log_probs(tokens[..., None])[..., 0]

    def log_probs(self, tokens: Int[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
        """log p of several tokens a row."""
        tokens, entry = self._entries(tokens)
        return self._log(self.logits.gather(-1, entry.clamp_min(0)), tokens, entry)

    def log_probs_at(
        self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"], tokens: Int[Tensor, "N M"]
    ) -> Float[Tensor, "N M"]:
        """log p of several tokens at N places out of [B, J]: `at(…).log_probs(…)` without copying a row."""
        tokens, entry = self._entries(tokens)
        logit = self.logits[rows[:, None], positions[:, None], entry.clamp_min(0)]
        return self._part(logit, (rows, positions))._log(logit, tokens, entry)

    def _entries(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        tokens = tokens.clamp_min(0)
        return tokens, tokens if self.vocab is None else self.vocab.entry[tokens]

    def _log(self, logit: Tensor, tokens: Tensor, entry: Tensor) -> Tensor:
        log_p = self.scale[..., None] * logit - self.lse[..., None]
        if self.vocab is not None:
            log_p.masked_fill_(entry < 0, -torch.inf)
        if self.plain:
            return log_p
        log_p.masked_fill_(logit < self.cutoff[..., None], -torch.inf)
        point = self.point[..., None]
        return torch.where(point == PAD, log_p, torch.where(tokens == point, 0.0, -torch.inf))

    def probs(self) -> Float[Tensor, "*B V"]:
        """The dense rows, in the logits' precision and over the target's vocabulary."""
        below = None if self.plain else self.logits < self.cutoff[..., None]
        weights, gain = powers(self.logits, self.scale, self.lse)
        return self._spread(weights.mul_(gain.to(weights.dtype)[..., None]), below, self.point)

    def probs_at(self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """The dense rows of N places out of [B, J]."""
        weights, gain = self.weights_at(rows, positions)
        return weights.mul_(gain.to(weights.dtype)[:, None])

    def weights_at(
        self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N V"], Float[Tensor, " N"]]:
        """Weights in proportion to the distributions of N places out of [B, J], and the factors (about 1) that make them
        probabilities. A draw needs no factor, and spares a pass over the row."""
        if self.logits.device.type == "cpu" and len(rows) <= ROW_BY_ROW and self.vocab is None:
            return self._few_weights(list(zip(rows.tolist(), positions.tolist(), strict=True)))
        place = self._part(self.logits[rows, positions], (rows, positions))
        weights, gain = powers(place.logits, place.scale, place.lse)
        below = None if self.plain else place.logits < place.cutoff[:, None]
        gain = gain if self.plain else torch.where(place.point == PAD, gain, 1.0)
        return self._spread(weights, below, place.point), gain

    def _few_weights(self, places: list[tuple[int, int]]) -> tuple[Float[Tensor, "N V"], Float[Tensor, " N"]]:
        """Row by row where the logits lie, with plain numbers: no copy, and none of torch's small operations."""
        scale, lse = self.scale.tolist(), self.lse.tolist()
        weights = self.logits.new_empty(len(places), self.logits.shape[-1])
        gains = [
            power_(out, self.logits[b, j], scale[b][j], lse[b][j]) for out, (b, j) in zip(weights, places, strict=True)
        ]
        weights.exp2_()
        if not self.plain:
            cutoff, point = self.cutoff.tolist(), self.point.tolist()
            for n, (b, j) in enumerate(places):
                if point[b][j] != PAD:
                    weights[n].zero_()[point[b][j]] = gains[n] = 1.0
                elif cutoff[b][j] != -math.inf:
                    weights[n].masked_fill_(self.logits[b, j] < cutoff[b][j], 0.0)
        return weights, torch.tensor(gains, dtype=torch.float64)

    def _spread(self, dense: Tensor, below: Tensor | None, point: Tensor) -> Tensor:
        """Take out what lies below the cutoff, put a reduced vocabulary in its places and points where they are."""
        if below is not None:
            dense.masked_fill_(below, 0.0)
        if self.vocab is not None:
            dense = dense.new_zeros(*dense.shape[:-1], self.vocab_size).index_copy_(-1, self.vocab.ids, dense)
        certain = None if self.plain else point != PAD
        if certain is None or (is_cpu(dense.device) and not bool(certain.any())):
            return dense
        first = point.clamp_min(0)[..., None]
        dense.masked_fill_(certain[..., None], 0.0)
        return dense.scatter_(-1, first, torch.where(certain[..., None], 1.0, dense.gather(-1, first)))

    def draw(self, rng: Philox, purpose: Purpose = Purpose.DRAFT, j: int = 0) -> Int[Tensor, " B"]:
        """One token a row: the j-th draw of the round for this site. For distributions of shape [B]."""
        first, second = rng.pair(purpose, torch.zeros(1, dtype=torch.long, device=self.lse.device), j)
        return draw(self.probs(), first[:, 0], second[:, 0])


LOG2_E = math.log2(math.e)

ROW_BY_ROW = 64
"""Rows up to which each is worked on by itself, with numbers of its own: fewer passes over a large vocabulary."""


def powers(
    logits: Float[Tensor, "*B R"], scale: Float[Tensor, "*B"], lse: Float[Tensor, "*B"]
) -> tuple[Float[Tensor, "*B R"], Float[Tensor, "*B"]]:
    """exp(scale · logit − lse) up to a factor for each row, and that factor, which is about 1.

    scale · logit and lse are both large and their difference small: in float32 it would be right to 1e-6 only. So the
    logit loses lse / scale first, rounded, and the factor makes up for the rounding. By powers of 2, which cost half
    of exp's.
    """
    slope = (scale * LOG2_E).to(logits.dtype)
    centre = (lse / scale).to(logits.dtype)
    gain = torch.exp(scale * centre - lse)
    return (logits - centre[..., None]).mul_(slope[..., None]).exp2_(), gain


def power_(out: Float[Tensor, " R"], row: Float[Tensor, " R"], scale: float, lse: float) -> float:
    """Write log₂ of one row's `powers` and give its factor: slope · logit + offset is one fused step, rounded once."""
    rounded = np.float32 if row.dtype == torch.float32 else np.float64
    slope = float(rounded(scale * LOG2_E))
    wanted = -slope * (lse / scale)
    offset = float(rounded(wanted))
    torch.add(torch.tensor(offset, dtype=row.dtype), row, alpha=slope, out=out)
    return float(2.0 ** (wanted - offset))


BLOCK = 2**18
"""Numbers worked on at a time by `log_sum_exp`: what it writes stays in the cache and is never large."""


def log_sum_exp(
    logits: Float[Tensor, "N R"],
    scale: float,
    peak: Float[Tensor, " N"],
    cutoff: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """log Σ exp(scale · logit) over the logits at or above the cutoff, float64; `peak` is each row's largest logit.

    Summed by chunks of fixed borders: what comes out does not depend on the rows around, and a chunk's sum is short
    enough for float32.
    """
    step = max(2, BLOCK // max(1, logits.shape[-1]))
    slope = float((np.float32 if logits.dtype == torch.float32 else np.float64)(scale * LOG2_E))
    offset = (peak.double() * -slope).to(logits.dtype)
    buffer, totals = torch.empty_like(logits[:step]), [peak.new_empty(0, dtype=torch.float64)]
    for start in range(0, len(logits), step):
        rows = logits[start : start + step]
        dense = torch.add(offset[start : start + step, None], rows, alpha=slope, out=buffer[: len(rows)]).exp2_()
        if cutoff is not None:
            dense.masked_fill_(rows < cutoff[start : start + step, None], 0.0)
        totals.append(chunk_sums(dense).double().sum(-1))
    # Σ 2^(slope · logit + offset); near the peak slope is scale, and further off its rounding does not matter
    return scale * peak.double() - (slope * peak.double() + offset) / LOG2_E + torch.cat(totals).log()


def overlap(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B"]:
    """The chance that one token drawn from q is kept: the mass that p and q share, 1 − TV(p, q)."""
    return p.minimum(q).sum(-1)


def total_variation(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B"]:
    """The largest difference between p and q over all events: half of Σ |p − q|."""
    return (p - q).abs().sum(-1) / 2


def residual(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """The distribution of the token that takes a rejected one's place: norm(max(0, p − q)).

    Why it makes the output exact. A token x drawn from q is kept with probability min(1, p(x)/q(x)), so x leaves as a
    kept token with probability min(q(x), p(x)). Point by point,

        min(q, p) + max(0, p − q) = p,

    so max(0, p − q) is just what is missing. Its mass is Σ max(0, p − q) = 1 − Σ min(p, q), the chance that the
    token was rejected: drawing from norm(max(0, p − q)) after a rejection delivers exactly the missing part.

    Where p = q nothing is missing and nothing is ever rejected; p is returned there, and never NaN.
    """
    return normalise((p - q).clamp_min(0), p)


def normalise(weights: Float[Tensor, "*B V"], otherwise: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """weights / their sum; `otherwise` in the rows that have no mass."""
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass.where(mass > 0, 1.0), otherwise)


def race(dist: Distribution, rng: Philox) -> Int[Tensor, " B"]:
    """The token that wins at each row's absolute position, `noise.starts`."""
    return race_weights(dist.probs(), rng)


def propose(dist: Distribution, rng: Philox, j: int) -> Int[Tensor, " B"]:
    """A drafter's j-th token in each row: its own draw, or under `coupled` its own run of the target's race."""
    return race(dist, rng.shifted(j)) if rng.shared else dist.draw(rng, Purpose.DRAFT, j)
