"""A model drafter's draws on the host from laws without filters: one pass over the logits gives law and token.

Twin: `core.sampling.warp` and `Law.draw`, which make a row's powers twice, and some sixty small tensors. A head's step
takes a few times as long as those.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core import host
from draftproof.core.draw import FEW, chunk_sums, pick
from draftproof.core.law import LOG2_E, Law, Vocab
from draftproof.core.noise import Noise, Site
from draftproof.core.sampling import Sampling
from draftproof.core.types import PAD

Pairs = list[list[float]]
"""Two numbers a row: which chunk, and which token in it."""

AHEAD: Final = torch.arange(8)
"""Tokens whose numbers are made at the same time: those of eight cost as much as those of one."""

LANE: Final = torch.zeros_like(AHEAD)


@dataclass(frozen=True, slots=True)
class HostDraws:
    """Of one round. `blank`: each row's law, but for logits and log-sum-exp; `_numbers`: the noise of each token, for
    all rows."""

    noise: Noise
    scale: float
    slope: float
    blank: tuple[Float[Tensor, " B"], Float[Tensor, " B"], Int[Tensor, " B"]]
    _numbers: dict[int, Pairs] = field(default_factory=dict)

    @classmethod
    def of(cls, sampling: Sampling, noise: Noise) -> "HostDraws":
        scale, rows = 1.0 / sampling.temperature, len(noise.seeds)
        blank = (
            torch.full((rows,), scale, dtype=torch.float64),
            torch.full((rows,), -torch.inf),
            torch.full((rows,), PAD, dtype=torch.long),
        )
        return cls(noise, scale, float(np.float32(scale * LOG2_E)), blank)

    def draw(self, logits: Float[Tensor, "B R"], j: int, vocab: Vocab | None) -> tuple[Law, Int[Tensor, " B"]]:
        """The law of each row's j-th token, and a draw from it."""
        peaks = logits.amax(-1)
        offsets = peaks * -self.slope
        weights = torch.add(offsets[:, None], logits, alpha=self.slope).exp2_()
        sums = chunk_sums(weights).numpy()
        pairs = self._pairs(j)
        rows = zip(weights.numpy(), sums, pairs, strict=True)
        entries = torch.tensor([pick(row, chunks, *pair) for row, chunks, pair in rows])
        totals = sums.sum(-1, dtype=np.float64).tolist()
        numbers = zip(totals, peaks.tolist(), offsets.tolist(), strict=True)
        lse = torch.tensor([self._log_sum_exp(*row) for row in numbers], dtype=torch.float64)
        scales, cutoffs, points = self.blank
        law = Law(logits, scales, cutoffs, lse, points, vocab, plain=True)
        return law, entries if vocab is None else vocab.ids[entries]

    def _pairs(self, j: int) -> Pairs:
        if j not in self._numbers:
            numbers = self.noise.pairs(Site.DRAFT, LANE, j + AHEAD).permute(2, 1, 0).tolist()
            self._numbers.update(enumerate(numbers, j))
        return self._numbers[j]

    def _log_sum_exp(self, total: float, peak: float, offset: float) -> float:
        """Out of Σ 2^(slope · logit + offset), as `core.law.log_sum_exp` has it; NaN where the row is no law."""
        if not math.isfinite(peak):
            return math.nan
        return self.scale * peak - (self.slope * peak + offset) / LOG2_E + math.log(total)


def drawable(logits: Float[Tensor, "B R"], samplings: Sequence[Sampling], noise: Noise) -> bool:
    """Are these few rows on the host, each by the same temperature and nothing else, with noise of their own?"""
    return (
        host.is_host(logits.device)
        and logits.dtype == torch.float32
        and len(samplings) <= FEW
        and not noise.shared
        and all(_only_warm(sampling) for sampling in samplings)
        and len({sampling.temperature for sampling in samplings}) == 1
    )


def _only_warm(sampling: Sampling) -> bool:
    unfiltered = sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0
    return sampling.temperature > 0 and unfiltered and not sampling.penalises and not sampling.logit_bias
