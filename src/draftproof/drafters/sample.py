"""A model drafter's draws: each token and the distribution it was drawn from, in kernels where they run.

On a GPU the reference takes a hundred small launches for a token, which would cost more than a small model's pass; on
the host it takes a third of a head's step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import is_cpu, to_device
from draftproof.core.distribution import LOG2_E, Distribution, DraftVocab, propose
from draftproof.core.draw import ROW_BY_ROW, chunk_sums, pick
from draftproof.core.penalties import any_edits, edited_without_sync
from draftproof.core.rng import Philox, Purpose
from draftproof.core.sampling import SamplingParams, warp_without_sync
from draftproof.core.types import PAD, History
from draftproof.drafters.interface import Context


def seen(context: Context, device: torch.device) -> History:
    """On the device once a round; nothing where there is no penalty."""
    if not context.sampling.penalises:
        return History([], [])
    n = context.prompt_length
    parts = context.tokens[:n], context.tokens[n:]
    return History(*(to_device(list(part), device) for part in parts))


def grown(histories: list[History], samplings: Sequence[SamplingParams], drafted: list[Tensor]) -> list[History]:
    """The same with the drafted tokens behind it."""
    if not drafted or not any(sampling.penalises for sampling in samplings):
        return histories
    rows = torch.stack(drafted, 1)
    return [
        History(h.prompt, torch.cat([h.output, row])) if isinstance(h.output, Tensor) else h
        for h, row in zip(histories, rows, strict=True)
    ]


Pairs = list[list[float]]
"""Two numbers a row: which chunk, and which token in it."""

AHEAD: Final = torch.arange(8)
"""Tokens whose numbers are made at the same time: those of eight cost as much as those of one."""

LANE: Final = torch.zeros_like(AHEAD)


@dataclass(frozen=True, slots=True)
class HostDraws:
    """Of one round. `blank`: each row's distribution, but for logits and log-sum-exp; `_numbers`: the noise of each token, for
    all rows."""

    rng: Philox
    scale: float
    slope: float
    blank: tuple[Float[Tensor, " B"], Float[Tensor, " B"], Int[Tensor, " B"]]
    _numbers: dict[int, Pairs] = field(default_factory=dict)

    @classmethod
    def of(cls, sampling: SamplingParams, rng: Philox) -> "HostDraws":
        scale, rows = 1.0 / sampling.temperature, len(rng.seeds)
        blank = (
            torch.full((rows,), scale, dtype=torch.float64),
            torch.full((rows,), -torch.inf),
            torch.full((rows,), PAD, dtype=torch.long),
        )
        return cls(rng, scale, float(np.float32(scale * LOG2_E)), blank)

    def draw(
        self, logits: Float[Tensor, "B R"], j: int, vocab: DraftVocab | None
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        """The distribution of each row's j-th token, and a draw from it."""
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
        dist = Distribution(logits, scales, cutoffs, lse, points, vocab, plain=True)
        return dist, entries if vocab is None else vocab.ids[entries]

    def _pairs(self, j: int) -> Pairs:
        if j not in self._numbers:
            numbers = self.rng.pairs(Purpose.DRAFT, LANE, j + AHEAD).permute(2, 1, 0).tolist()
            self._numbers.update(enumerate(numbers, j))
        return self._numbers[j]

    def _log_sum_exp(self, total: float, peak: float, offset: float) -> float:
        """Out of Σ 2^(slope · logit + offset), as `core.distribution.log_sum_exp` has it; NaN where the row is no distribution."""
        if not math.isfinite(peak):
            return math.nan
        return self.scale * peak - (self.slope * peak + offset) / LOG2_E + math.log(total)


def drawable(logits: Float[Tensor, "B R"], samplings: Sequence[SamplingParams], rng: Philox) -> bool:
    """Are these few rows on the host, each by the same temperature and nothing else, with noise of their own?"""
    return (
        is_cpu(logits.device)
        and logits.dtype == torch.float32
        and len(samplings) <= ROW_BY_ROW
        and not rng.shared
        and all(_only_warm(sampling) for sampling in samplings)
        and len({sampling.temperature for sampling in samplings}) == 1
    )


def _only_warm(sampling: SamplingParams) -> bool:
    unfiltered = sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0
    return sampling.temperature > 0 and unfiltered and not sampling.penalises and not sampling.logit_bias


@dataclass(slots=True)
class Draws:
    """Of one round: the same rows, sampled in the same way, one token after another.

    `vocab`, where the drafter has fewer tokens than the target: its entries must be the target's first tokens in order,
    as noise is thrown by the target's names and the kernels by the logits' places.
    """

    samplings: Sequence[SamplingParams]
    rng: Philox
    vocab: DraftVocab | None = None
    _device: "_OnDevice | None" = field(default=None, init=False)
    _host: HostDraws | None = field(default=None, init=False)

    def __call__(
        self, logits: Float[Tensor, "B R"], histories: Sequence[History], j: int
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        """The distribution of each row's j-th token, and a draw from it."""
        if self.on_host(logits):
            if self._host is None:
                self._host = HostDraws.of(self.samplings[0], self.rng)
            return self._host.draw(logits, j, self.vocab)
        if self.greedy or not kernels.draws_from(logits):
            dist = self.dist(logits, histories)
            # from point masses there is nothing to draw, and no need to write them out first
            return dist, dist.point if self.greedy else propose(dist, self.rng, j)
        if any_edits(self.samplings):
            logits = edited_without_sync(logits, self.samplings, histories, self.vocab)
        if self._device is None:
            self._device = _OnDevice.of(self.samplings, self.rng, logits)
        return self._device.draw(logits, self.rng, j, self.vocab)

    def on_host(self, logits: Float[Tensor, "B R"]) -> bool:
        """Are distribution and token made at once there?"""
        return self._host is not None or drawable(logits, self.samplings, self.rng)

    def dist(self, logits: Float[Tensor, "B R"], histories: Sequence[History]) -> Distribution:
        """The distribution of each row's next token, by the reference."""
        return warp_without_sync(logits[:, None], self.samplings, histories, self.vocab).first

    @property
    def greedy(self) -> bool:
        return all(s.temperature == 0 for s in self.samplings)


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """What the kernels are given for every token of a round."""

    parameters: kernels.Parameters
    workspace: kernels.Workspace
    scale: Float[Tensor, " B"]
    greedy: Bool[Tensor, " B"] | None
    """None where no row is."""

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams], rng: Philox, logits: Float[Tensor, "B R"]) -> "_OnDevice":
        B, device = len(samplings), logits.device
        nothing = torch.zeros(B, dtype=torch.long, device=device)
        parameters = kernels.Parameters.of(samplings, samplings, seeds=rng.seeds, positions=rng.starts, lengths=nothing)
        cold = [s.temperature == 0 for s in samplings]
        return cls(
            parameters,
            kernels.Workspace.empty(B, 0, logits.shape[-1], device, filtered=parameters.filtered),
            to_device([1.0 / (s.temperature or 1.0) for s in samplings], device, torch.float64),
            to_device(cold, device, torch.bool) if any(cold) else None,
        )

    def draw(
        self, logits: Float[Tensor, "B R"], rng: Philox, j: int, vocab: DraftVocab | None
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        from draftproof.kernels.draw_rows import draw_rows

        if rng.shared:
            torch.add(rng.starts, j, out=self.parameters["positions"])
        drawn = draw_rows(logits, self.parameters, j, shared=rng.shared, workspace=self.workspace)
        tokens, cutoff = drawn.tokens.clamp_min(0), drawn.cutoff.to(torch.float32)
        tokens = tokens if vocab is None else vocab.ids[tokens]
        point = torch.full_like(tokens, PAD)
        if self.greedy is not None:
            point = torch.where(self.greedy, tokens, point)
            cutoff = cutoff.masked_fill(self.greedy, -torch.inf)
        filtered = self.parameters.filtered
        dist = Distribution(
            logits.float(),
            self.scale,
            cutoff,
            drawn.base + drawn.mass.log(),
            point,
            vocab,
            plain=self.greedy is None and not filtered,
        )
        return dist, tokens
