"""Distributions over tokens, held as logits and a few numbers per row, and the residual that exactness rests on.

Temperature, top-k, top-p and min-p come down to three numbers for each row, a scale, a cutoff and a normaliser:

    p(t) = exp(scale · logit(t) − lse)   if logit(t) ≥ cutoff, else 0.

No tensor of the vocabulary's size is written until probabilities are needed. All logits equal to the cutoff are kept.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.draw import chunk_sums, draw, exp2_by_row_, race_weights, row_by_row
from draftproof.core.rng import Philox, Purpose
from draftproof.core.types import PAD

LOG2_E = math.log2(math.e)

LSE_BLOCK = 2**18
"""Logits that `log_sum_exp` processes at a time: its buffer stays in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """A drafter's smaller vocabulary inside the target's: tokens outside it have probability 0.

    `ids[r]` is the target's id of entry r; `entry[t]` is the entry of the target's token t, PAD if it has none.
    """

    ids: Int[Tensor, " R"]
    entry: Int[Tensor, " V"]

    @classmethod
    def of(cls, ids: Int[Tensor, " R"], V: int) -> "DraftVocab":
        """Build the vocabulary from the target's ids of its entries; refuse ids outside [0, V) and repeated ones."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= V):
            raise ValueError(f"draft_ids must lie in [0, {V}), the target's vocabulary; got up to {int(ids.max())}")
        if len(ids.unique()) != len(ids):
            raise ValueError("draft_ids names a token twice; each entry of the draft vocabulary is one token")
        entry = torch.full((V,), PAD, dtype=torch.long, device=ids.device)
        entry[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, entry)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of any number of rows, as references to their logits.

    `point` is the only possible token of a greedy row, PAD in other rows: temperature 0 is a point mass on the first
    argmax, never an infinite scale. `lse` is NaN if a row is not a distribution: NaN or +inf among its logits, or no
    token allowed. `scale` and `lse` are float64, because log-probabilities are differences of large numbers. `plain`
    says that no row has a cutoff or a point; it is stored because testing the tensors would be a sync.
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
        """Build distributions from probabilities, or from weights, which are normalised.

        A row with NaN, a negative or an infinite entry is not a distribution: its log-sum-exp is NaN.
        """
        lse = probs.double().sum(-1).log()
        lse = lse.masked_fill((probs < 0).any(-1), torch.nan)
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
        """The size of the target's vocabulary."""
        return self.logits.shape[-1] if self.vocab is None else len(self.vocab.entry)

    def at(self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> "Distribution":
        """Return the distributions at N places out of [B, J]; their logits are copied."""
        if self.logits.is_contiguous():  # copies whole rows, several times faster
            logits = self.logits.flatten(0, 1).index_select(0, rows * self.logits.shape[1] + positions)
        else:
            logits = self.logits[rows, positions]
        return self._part(logits, (rows, positions))

    def head(self, K: int) -> "Distribution":
        """Return the first K positions out of [B, J], sharing the logits."""
        return self._part(self.logits[:, :K], (slice(None), slice(K)))

    def rows(self, index: Int[Tensor, " N"], K: int) -> "Distribution":
        """Return the first K positions of these rows out of [B, J]; their logits are copied."""
        return self._part(self.logits[index, :K], (index[:, None], torch.arange(K, device=index.device)))

    @property
    def first(self) -> "Distribution":
        """The first position out of [B, J], sharing the logits: distributions of shape [B]."""
        return self._part(self.logits[:, 0], (slice(None), 0))

    def _part(self, logits: Tensor, place: Any) -> "Distribution":
        """Return distributions of these logits with the scale, cutoff, lse and point at `place`."""
        numbers = [part[place] for part in (self.scale, self.cutoff, self.lse, self.point)]
        return Distribution(logits, numbers[0], numbers[1], numbers[2], numbers[3], self.vocab, self.plain)

    def log_prob(self, tokens: Int[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        """Return log p(token), float64, −inf if impossible. PAD is read as token 0: the caller masks its padding."""
        return self.log_probs(tokens[..., None])[..., 0]

    def log_probs(self, tokens: Int[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
        """Return log p of several tokens for each row; see `log_prob`."""
        tokens, entry = self._entries(tokens)
        return self._log(self.logits.gather(-1, entry.clamp_min(0)), tokens, entry)

    def log_probs_at(
        self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"], tokens: Int[Tensor, "N M"]
    ) -> Float[Tensor, "N M"]:
        """Return log p of several tokens at N places out of [B, J]: `at(…).log_probs(…)` without copying a row."""
        tokens, entry = self._entries(tokens)
        logit = self.logits[rows[:, None], positions[:, None], entry.clamp_min(0)]
        return self._part(logit, (rows, positions))._log(logit, tokens, entry)

    def _entries(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens, PAD read as 0, and their entries in the logits, PAD if the draft vocabulary has none."""
        tokens = tokens.clamp_min(0)
        return tokens, tokens if self.vocab is None else self.vocab.entry[tokens]

    def _log(self, logit: Tensor, tokens: Tensor, entry: Tensor) -> Tensor:
        """Return log p of these tokens from their logits and entries."""
        log_p = self.scale[..., None] * logit - self.lse[..., None]
        if self.vocab is not None:
            log_p.masked_fill_(entry < 0, -torch.inf)
        if self.plain:
            return log_p
        log_p.masked_fill_(logit < self.cutoff[..., None], -torch.inf)
        point = self.point[..., None]
        return torch.where(point == PAD, log_p, torch.where(tokens == point, 0.0, -torch.inf))

    def probs(self) -> Float[Tensor, "*B V"]:
        """Return dense probabilities over the target's vocabulary, in the logits' precision."""
        below = None if self.plain else self.logits < self.cutoff[..., None]
        weights, gain = powers(self.logits, self.scale, self.lse)
        return self._spread(weights.mul_(gain.to(weights.dtype)[..., None]), below, self.point)

    def probs_at(self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Return dense probabilities at N places out of [B, J]."""
        weights, gain = self.weights_at(rows, positions)
        return weights.mul_(gain.to(weights.dtype)[:, None])

    def points_at(self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Int[Tensor, " N"] | None:
        """Return the tokens at N places if all are point masses, as with temperature 0; None otherwise.

        Drawing from them, or from what any q leaves of them, takes no random numbers and no pass over the vocabulary.
        On a GPU, where looking is a sync, it is None.
        """
        if self.plain or not is_cpu(self.point.device):
            return None
        tokens = self.point[rows, positions]
        return tokens if bool((tokens != PAD).all()) else None

    def weights_at(
        self, rows: Int[Tensor, " N"], positions: Int[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N V"], Float[Tensor, " N"]]:
        """Return weights proportional to the distributions at N places out of [B, J], and their normalising factors.

        The factors are about 1. A draw does not need them, which saves a pass over the row.
        """
        if row_by_row(len(rows), self.logits.shape[-1], self.logits.device) and self.vocab is None:
            return self._weights_row_by_row(list(zip(rows.tolist(), positions.tolist(), strict=True)))
        place = self._part(self.logits[rows, positions], (rows, positions))
        weights, gain = powers(place.logits, place.scale, place.lse)
        below = None if self.plain else place.logits < place.cutoff[:, None]
        gain = gain if self.plain else torch.where(place.point == PAD, gain, 1.0)
        return self._spread(weights, below, place.point), gain

    def _weights_row_by_row(self, places: list[tuple[int, int]]) -> tuple[Float[Tensor, "N V"], Float[Tensor, " N"]]:
        """Compute `weights_at` one row at a time with Python numbers: no copy of the logits, few small torch calls."""
        scale, lse = self.scale.tolist(), self.lse.tolist()
        weights = self.logits.new_empty(len(places), self.logits.shape[-1])
        gains = [
            power_(out, self.logits[b, j], scale[b][j], lse[b][j]) for out, (b, j) in zip(weights, places, strict=True)
        ]
        exp2_by_row_(weights)
        if not self.plain:
            cutoff, point = self.cutoff.tolist(), self.point.tolist()
            for n, (b, j) in enumerate(places):
                if point[b][j] != PAD:
                    weights[n].zero_()[point[b][j]] = gains[n] = 1.0
                elif cutoff[b][j] != -math.inf:
                    weights[n].masked_fill_(self.logits[b, j] < cutoff[b][j], 0.0)
        return weights, torch.tensor(gains, dtype=torch.float64)

    def _spread(self, dense: Tensor, below: Tensor | None, point: Tensor) -> Tensor:
        """Zero what is below the cutoff, expand a draft vocabulary to the target's, and write point masses."""
        if below is not None:
            dense.masked_fill_(below, 0.0)
        if self.vocab is not None:
            dense = dense.new_zeros(*dense.shape[:-1], self.vocab_size).index_copy_(-1, self.vocab.ids, dense)
        is_point = None if self.plain else point != PAD
        if is_point is None or (is_cpu(dense.device) and not bool(is_point.any())):
            return dense
        token = point.clamp_min(0)[..., None]
        dense.masked_fill_(is_point[..., None], 0.0)
        return dense.scatter_(-1, token, torch.where(is_point[..., None], 1.0, dense.gather(-1, token)))

    def draw(self, rng: Philox, purpose: Purpose = Purpose.DRAFT, j: int = 0) -> Int[Tensor, " B"]:
        """Draw one token for each row, as the round's j-th draw for this purpose. For distributions of shape [B]."""
        first, second = rng.pair(purpose, torch.zeros(1, dtype=torch.long, device=self.lse.device), j)
        return draw(self.probs(), first[:, 0], second[:, 0])


def propose(dist: Distribution, rng: Philox, j: int) -> Int[Tensor, " B"]:
    """Draw a drafter's j-th token in each row; under `coupled`, by a race with the target's random numbers."""
    return race(dist, rng.shifted(j)) if rng.shared else dist.draw(rng, Purpose.DRAFT, j)


def race(dist: Distribution, rng: Philox) -> Int[Tensor, " B"]:
    """Draw the token that wins the race at each row's absolute position, `rng.starts`."""
    return race_weights(dist.probs(), rng)


def residual(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """Return the distribution of the token that replaces a rejected one: norm(max(0, p − q)).

    Why it makes the output exact: a token x drawn from q is accepted with probability min(1, p(x)/q(x)), so x is
    emitted as an accepted token with probability min(q(x), p(x)). For every token,

        min(q, p) + max(0, p − q) = p,

    so max(0, p − q) is exactly what is missing. Its mass is Σ max(0, p − q) = 1 − Σ min(p, q), the probability that the
    token was rejected: drawing from norm(max(0, p − q)) after a rejection adds exactly the missing part.

    If p = q nothing is missing and nothing is ever rejected; the result is then p, never NaN.
    """
    return normalise((p - q).clamp_min(0), p)


def normalise(weights: Float[Tensor, "*B V"], otherwise: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
    """Divide the weights by their sum; rows without mass are taken from `otherwise`."""
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass.where(mass > 0, 1.0), otherwise)


def overlap(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B"]:
    """Return the probability that a token drawn from q is accepted: the mass that p and q share, 1 − TV(p, q)."""
    return p.minimum(q).sum(-1)


def total_variation(p: Float[Tensor, "*B V"], q: Float[Tensor, "*B V"]) -> Float[Tensor, "*B"]:
    """Return the largest difference between p and q over all events: half of Σ |p − q|."""
    return (p - q).abs().sum(-1) / 2


def powers(
    logits: Float[Tensor, "*B R"], scale: Float[Tensor, "*B"], lse: Float[Tensor, "*B"]
) -> tuple[Float[Tensor, "*B R"], Float[Tensor, "*B"]]:
    """Return exp(scale · logit − lse) up to a factor for each row, and that factor, which is about 1.

    scale · logit and lse are large and their difference is small: in float32 it would have an error of 1e-6. So lse /
    scale, rounded, is subtracted from the logits first, and the factor corrects the rounding. exp2 costs half of exp.
    """
    slope = (scale * LOG2_E).to(logits.dtype)
    centre = (lse / scale).to(logits.dtype)
    gain = torch.exp(scale * centre - lse)
    return (logits - centre[..., None]).mul_(slope[..., None]).exp2_(), gain


def power_(out: Float[Tensor, " R"], row: Float[Tensor, " R"], scale: float, lse: float) -> float:
    """Write log₂ of one row's `powers` to `out` and return its factor.

    slope · logit + offset is one fused multiply-add, rounded once.
    """
    rounded = np.float32 if row.dtype == torch.float32 else np.float64
    slope = float(rounded(scale * LOG2_E))
    wanted = -slope * (lse / scale)
    offset = float(rounded(wanted))
    torch.add(torch.tensor(offset, dtype=row.dtype), row, alpha=slope, out=out)
    return float(2.0 ** (wanted - offset))


def log_sum_exp(
    logits: Float[Tensor, "N R"],
    scale: float,
    peak: Float[Tensor, " N"],
    cutoff: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """Return log Σ exp(scale · logit) over the logits ≥ cutoff, in float64; `peak` is each row's largest logit.

    The sum goes over the fixed chunks of `core.draw`: the result does not depend on neighbouring rows, and a chunk is
    short enough to be summed in float32.
    """
    step = max(2, LSE_BLOCK // max(1, logits.shape[-1]))
    slope = float((np.float32 if logits.dtype == torch.float32 else np.float64)(scale * LOG2_E))
    offset = (peak.double() * -slope).to(logits.dtype)
    buffer, totals = torch.empty_like(logits[:step]), [peak.new_empty(0, dtype=torch.float64)]
    for start in range(0, len(logits), step):
        rows = logits[start : start + step]
        dense = torch.add(offset[start : start + step, None], rows, alpha=slope, out=buffer[: len(rows)])
        exp2_by_row_(dense)
        if cutoff is not None:
            dense.masked_fill_(rows < cutoff[start : start + step, None], 0.0)
        totals.append(chunk_sums(dense).double().sum(-1))
    # Σ 2^(slope · logit + offset). Rounding of the slope is corrected at the peak; far below it, it does not matter.
    return scale * peak.double() - (slope * peak.double() + offset) / LOG2_E + torch.cat(totals).log()
