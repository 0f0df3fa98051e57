"""Draw a model drafter's tokens, each together with the distribution it was drawn from.

There are three ways. The reference (`core.sampling.warp_without_sync`, `core.distribution.propose`) serves every
request. On a GPU it takes about a hundred small launches per token, more than a small model's pass, so the kernels are
used instead. On a CPU it takes a third of a head's step, so plain temperature sampling of a few rows has a fast path.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import is_cpu, runs_kernels, to_device
from draftproof.core.distribution import LOG2_E, Distribution, DraftVocab, propose
from draftproof.core.draw import chunk_sums, exp2_by_row_, pick, row_by_row
from draftproof.core.penalties import edited_without_sync
from draftproof.core.rng import Philox, Purpose
from draftproof.core.sampling import SamplingParams, any_edits, only_temperature, warp_without_sync
from draftproof.core.types import PAD, History
from draftproof.drafters.interface import Context


@dataclass(slots=True)
class Draws:
    """The draws of one round: the same rows with the same sampling parameters, one token after another.

    `vocab` is the drafter's vocabulary if it is smaller than the target's. With shared random numbers its entries must
    be the target's first tokens in order: those numbers are addressed by token id, which the kernels take to be the
    index of the logit.
    """

    samplings: Sequence[SamplingParams]
    rng: Philox
    vocab: DraftVocab | None = None
    _device: "KernelDraws | None" = field(default=None, init=False)
    _cpu: "_CpuDraws | None" = field(default=None, init=False)
    _parts: "list[list[int]] | None" = field(default=None, init=False)
    """Rows that are drawn for together, on a CPU: those with the same way of drawing."""
    _draws: "list[Draws]" = field(default_factory=list, init=False)

    def __call__(
        self, logits: Float[Tensor, "B R"], histories: Sequence[History], j: int
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        """Draw each row's j-th token; return its distribution and the token."""
        if self._parts is None:
            self._parts = _by_sampling(self.samplings, self.rng, logits)
        if len(self._parts) > 1:
            return self._each_part(self._parts, logits, histories, j)
        if self.on_cpu_path(logits):
            if self._cpu is None:
                self._cpu = _CpuDraws.of(self.samplings[0], self.rng)
            return self._cpu.draw(logits, j, self.vocab)
        if self.greedy or not (runs_kernels(logits.device) and kernels.draws_from(logits)):
            dist = self.distribution(logits, histories)
            # A greedy row's token is its point mass, so no probabilities need to be written.
            return dist, dist.point if self.greedy else propose(dist, self.rng, j)
        if any_edits(self.samplings):
            logits = edited_without_sync(logits, self.samplings, histories, self.vocab)
        if self._device is None:
            self._device = KernelDraws.of(self.samplings, self.rng, logits)
        return self._device.draw(logits, self.rng, j, self.vocab)

    def _each_part(
        self, parts: list[list[int]], logits: Float[Tensor, "B R"], histories: Sequence[History], j: int
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        """Draw part by part, so that a row's bits do not depend on how its neighbours are drawn for."""
        if not self._draws:
            rngs = [self.rng.take(torch.tensor(rows)) for rows in parts]
            samplings = [[self.samplings[b] for b in rows] for rows in parts]
            self._draws = [Draws(s, rng, self.vocab) for s, rng in zip(samplings, rngs, strict=True)]
        made = [
            draws(logits[rows], [histories[b] for b in rows], j) for draws, rows in zip(self._draws, parts, strict=True)
        ]
        order = torch.tensor([b for rows in parts for b in rows]).argsort()
        # The logits of a part are its own: penalties and biases have changed them.
        columns = zip(*((d.logits, d.scale, d.cutoff, d.lse, d.point, token) for d, token in made), strict=True)
        edited, scale, cutoff, lse, point, tokens = (torch.cat(column)[order] for column in columns)
        plain = all(dist.plain for dist, _ in made)
        return Distribution(edited, scale, cutoff, lse, point, self.vocab, plain), tokens

    def on_cpu_path(self, logits: Float[Tensor, "B R"]) -> bool:
        """Tell whether the fast CPU path draws from these logits."""
        return self._cpu is not None or cpu_path_applies(logits, self.samplings, self.rng)

    def distribution(self, logits: Float[Tensor, "B R"], histories: Sequence[History]) -> Distribution:
        """Return the distribution of each row's next token, computed by the reference."""
        return warp_without_sync(logits[:, None], self.samplings, histories, self.vocab).first

    @property
    def greedy(self) -> bool:
        return all(s.temperature == 0 for s in self.samplings)


def penalty_history(context: Context, device: torch.device) -> History:
    """Copy the row's prompt and output to the device for the penalties; empty if the request has none.

    Penalties count the target's tokens, which a context in a draft model's own vocabulary has as well.
    """
    if not context.sampling.penalises:
        return History([], [])
    n, tokens = context.prompt_length, getattr(context, "target_tokens", context.tokens)
    parts = tokens[:n], tokens[n:]
    return History(*(to_device(list(part), device) for part in parts))


def with_drafted(histories: list[History], samplings: Sequence[SamplingParams], drafted: list[Tensor]) -> list[History]:
    """Append the tokens drafted so far to each row's output."""
    if not drafted or not any(sampling.penalises for sampling in samplings):
        return histories
    rows = torch.stack(drafted, 1)
    return [
        History(h.prompt, torch.cat([h.output, row])) if isinstance(h.output, Tensor) else h
        for h, row in zip(histories, rows, strict=True)
    ]


def draw_token(
    draws: Draws, logits: Float[Tensor, "B R"], histories: list[History], j: int, greedy: bool
) -> tuple[Distribution, Int[Tensor, " B"]]:
    """Draw each row's j-th token, or take the argmax if all rows are greedy; return its distribution and the token.

    The draw stays in the reduced vocabulary, so nothing of the target's vocabulary size is written. The exception is
    shared random numbers: they address the target's tokens.
    """
    rng, vocab = draws.rng, draws.vocab
    assert vocab is not None
    on_kernels = runs_kernels(logits.device) and kernels.draws_from(logits) and not rng.shared
    if not greedy and (draws.on_cpu_path(logits) or on_kernels):
        return draws(logits, histories, j)
    dist = draws.distribution(logits, histories)
    if greedy:
        return dist, vocab.ids[dist.logits.argmax(-1)]
    if rng.shared:
        return dist, propose(dist, rng, j)
    point = torch.where(dist.point == PAD, PAD, vocab.entry[dist.point.clamp_min(0)])
    return dist, vocab.ids[replace(dist, vocab=None, point=point).draw(rng, Purpose.DRAFT, j)]


def own_log_prob(
    draws: Draws, logits: Float[Tensor, "B R"], histories: list[History], dist: Distribution, token: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Return the log-probability of each row's token: for a greedy row, the drafter's own (see `ranking`)."""
    log_p = dist.log_prob(token)
    greedy = [b for b, sampling in enumerate(draws.samplings) if sampling.temperature == 0]
    if greedy:
        rows = to_device(greedy, logits.device)
        samplings = [ranking(draws.samplings[b]) for b in greedy]
        own = warp_without_sync(logits[rows][:, None], samplings, [histories[b] for b in greedy], draws.vocab).first
        log_p = log_p.index_copy(0, rows, own.log_prob(token[rows]))
    return log_p


def ranking(sampling: SamplingParams) -> SamplingParams:
    """Replace temperature 0 by 1 to rank candidates.

    A greedy target takes its argmax, but the head does not know for certain which token that is; its own probabilities
    say how sure it is.
    """
    return replace(sampling, temperature=1.0) if sampling.temperature == 0 else sampling


def _by_sampling(samplings: Sequence[SamplingParams], rng: Philox, logits: Float[Tensor, "B R"]) -> list[list[int]]:
    """Return rows that share a way of drawing: by temperature where the fast CPU path applies, and all others."""
    every = list(range(len(samplings)))
    has_cpu_path = is_cpu(logits.device) and not runs_kernels(logits.device)
    if not has_cpu_path or rng.shared or all(s.temperature == 0 for s in samplings):
        return [every]
    keys = [s.temperature if only_temperature(s) else None for s in samplings]
    return [[b for b in every if keys[b] == key] for key in dict.fromkeys(keys)]


def cpu_path_applies(logits: Float[Tensor, "B R"], samplings: Sequence[SamplingParams], rng: Philox) -> bool:
    """Tell whether the fast CPU path applies.

    It needs float32 rows on the CPU, one temperature, no filters or penalties, and independent random numbers.
    """
    return (
        row_by_row(len(logits), logits.shape[-1], logits.device)
        and logits.dtype == torch.float32
        and not rng.shared
        and all(only_temperature(sampling) for sampling in samplings)
        and len({sampling.temperature for sampling in samplings}) == 1
    )


UniformPairs = list[list[float]]
"""Two random numbers per row: one picks the chunk of the vocabulary, the other the token in it."""

AHEAD: Final = torch.arange(8)
"""Offsets of the tokens whose random numbers are made in one call: eight cost as much as one."""

LANES: Final = torch.zeros_like(AHEAD)


@dataclass(frozen=True, slots=True)
class _CpuDraws:
    """The fast CPU path: distribution and token of each row from one pass over the logits.

    `constants` are scale, cutoff and point, which do not change during the round. `_pairs` caches the random
    numbers of each token for all rows.

    Reference: core/sampling.warp and core/distribution.Distribution.draw.
    """

    rng: Philox
    scale: float
    slope: float
    constants: tuple[Float[Tensor, " B"], Float[Tensor, " B"], Int[Tensor, " B"]]
    _pairs: dict[int, UniformPairs] = field(default_factory=dict)

    @classmethod
    def of(cls, sampling: SamplingParams, rng: Philox) -> "_CpuDraws":
        scale, rows = 1.0 / sampling.temperature, len(rng.seeds)
        constants = (
            torch.full((rows,), scale, dtype=torch.float64),
            torch.full((rows,), -torch.inf),
            torch.full((rows,), PAD, dtype=torch.long),
        )
        return cls(rng, scale, float(np.float32(scale * LOG2_E)), constants)

    def draw(
        self, logits: Float[Tensor, "B R"], j: int, vocab: DraftVocab | None
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        """Draw each row's j-th token; return its distribution and the token."""
        peaks = logits.amax(-1)
        offsets = peaks * -self.slope
        weights = exp2_by_row_(torch.add(offsets[:, None], logits, alpha=self.slope))
        sums = chunk_sums(weights).numpy()
        rows = zip(weights.numpy(), sums, self._uniforms(j), strict=True)
        entries = torch.tensor([pick(row, chunks, *pair) for row, chunks, pair in rows])
        totals = sums.sum(-1, dtype=np.float64).tolist()
        numbers = zip(totals, peaks.tolist(), offsets.tolist(), strict=True)
        lse = torch.tensor([self._log_sum_exp(*row) for row in numbers], dtype=torch.float64)
        scales, cutoffs, points = self.constants
        dist = Distribution(logits, scales, cutoffs, lse, points, vocab, plain=True)
        return dist, entries if vocab is None else vocab.ids[entries]

    def _uniforms(self, j: int) -> UniformPairs:
        if j not in self._pairs:
            numbers = self.rng.pairs(Purpose.DRAFT, LANES, j + AHEAD).permute(2, 1, 0).tolist()
            self._pairs.update(enumerate(numbers, j))
        return self._pairs[j]

    def _log_sum_exp(self, total: float, peak: float, offset: float) -> float:
        """Compute a row's log-sum-exp from Σ 2^(slope · logit + offset); NaN if the row is not a distribution.

        Reference: core/distribution.log_sum_exp.
        """
        if not math.isfinite(peak):
            return math.nan
        return self.scale * peak - (self.slope * peak + offset) / LOG2_E + math.log(total)


@dataclass(frozen=True, slots=True)
class KernelDraws:
    """The kernels' arguments that stay the same for every token of a round."""

    parameters: kernels.Parameters
    workspace: kernels.Workspace
    scale: Float[Tensor, " B"]
    greedy: Bool[Tensor, " B"] | None
    """The greedy rows; None if there are none."""

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams], rng: Philox, logits: Float[Tensor, "B R"]) -> "KernelDraws":
        B, device = len(samplings), logits.device
        nothing = torch.zeros(B, dtype=torch.long, device=device)
        parameters = kernels.Parameters.of(samplings, samplings, seeds=rng.seeds, positions=rng.starts, lengths=nothing)
        greedy = [s.temperature == 0 for s in samplings]
        return cls(
            parameters,
            kernels.Workspace.empty(B, 0, logits.shape[-1], device, filtered=parameters.filtered),
            to_device([1.0 / (s.temperature or 1.0) for s in samplings], device, torch.float64),
            to_device(greedy, device, torch.bool) if any(greedy) else None,
        )

    def draw(
        self, logits: Float[Tensor, "B R"], rng: Philox, j: int, vocab: DraftVocab | None
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        """Draw each row's j-th token with the kernels; return its distribution and the token."""
        from draftproof.kernels import round_steps
        from draftproof.kernels.draw_rows import draw_rows

        if rng.shared:
            torch.add(rng.starts, j, out=self.parameters["positions"])
        drawn = draw_rows(logits, self.parameters, j, shared=rng.shared, workspace=self.workspace)
        made = round_steps.describe_draws(drawn, self.greedy, None if vocab is None else vocab.ids)
        plain = self.greedy is None and not self.parameters.filtered
        dist = Distribution(logits.float(), self.scale, made.cutoff, made.lse, made.point, vocab, plain=plain)
        return dist, made.tokens
