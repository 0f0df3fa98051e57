"""A model drafter's draws: each token and the law it was drawn from, in kernels where they run.

On a GPU the reference takes a hundred small launches for a token, which would cost more than a small model's pass; on
the host it takes a third of a head's step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core import race
from draftproof.core.dense import edited, edits, law_of
from draftproof.core.host import sent
from draftproof.core.law import Law, Vocab
from draftproof.core.noise import Noise
from draftproof.core.sampling import Sampling
from draftproof.core.types import PAD, History
from draftproof.drafters.hostdraws import HostDraws, drawable


@dataclass(slots=True)
class Draws:
    """Of one round: the same rows, sampled in the same way, one token after another.

    `vocab`, where the drafter has fewer tokens than the target: its entries must be the target's first tokens in order,
    as noise is thrown by the target's names and the kernels by the logits' places.
    """

    samplings: Sequence[Sampling]
    noise: Noise
    vocab: Vocab | None = None
    _device: "_OnDevice | None" = field(default=None, init=False)
    _host: HostDraws | None = field(default=None, init=False)

    def __call__(
        self, logits: Float[Tensor, "B R"], histories: Sequence[History], j: int
    ) -> tuple[Law, Int[Tensor, " B"]]:
        """The law of each row's j-th token, and a draw from it."""
        if self.on_host(logits):
            if self._host is None:
                self._host = HostDraws.of(self.samplings[0], self.noise)
            return self._host.draw(logits, j, self.vocab)
        if self.greedy or not kernels.draws_from(logits):
            law = self.law(logits, histories)
            # from point masses there is nothing to draw, and no need to write them out first
            return law, law.point if self.greedy else race.propose(law, self.noise, j)
        if edits(self.samplings):
            logits = edited(logits, self.samplings, histories, self.vocab)
        if self._device is None:
            self._device = _OnDevice.of(self.samplings, self.noise, logits)
        return self._device.draw(logits, self.noise, j, self.vocab)

    def on_host(self, logits: Float[Tensor, "B R"]) -> bool:
        """Are law and token made at once there?"""
        return self._host is not None or drawable(logits, self.samplings, self.noise)

    def law(self, logits: Float[Tensor, "B R"], histories: Sequence[History]) -> Law:
        """The law of each row's next token, by the reference."""
        return law_of(logits[:, None], self.samplings, histories, self.vocab).first

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
    def of(cls, samplings: Sequence[Sampling], noise: Noise, logits: Float[Tensor, "B R"]) -> "_OnDevice":
        B, device = len(samplings), logits.device
        nothing = torch.zeros(B, dtype=torch.long, device=device)
        parameters = kernels.Parameters.of(
            samplings, samplings, seeds=noise.seeds, positions=noise.starts, lengths=nothing
        )
        cold = [s.temperature == 0 for s in samplings]
        return cls(
            parameters,
            kernels.Workspace.empty(B, 0, logits.shape[-1], device, filtered=parameters.filtered),
            sent([1.0 / (s.temperature or 1.0) for s in samplings], device, torch.float64),
            sent(cold, device, torch.bool) if any(cold) else None,
        )

    def draw(
        self, logits: Float[Tensor, "B R"], noise: Noise, j: int, vocab: Vocab | None
    ) -> tuple[Law, Int[Tensor, " B"]]:
        from draftproof.kernels.drawing import draw_rows

        if noise.shared:
            torch.add(noise.starts, j, out=self.parameters["positions"])
        drawn = draw_rows(logits, self.parameters, j, shared=noise.shared, workspace=self.workspace)
        tokens, cutoff = drawn.tokens.clamp_min(0), drawn.cutoff.to(torch.float32)
        tokens = tokens if vocab is None else vocab.ids[tokens]
        point = torch.full_like(tokens, PAD)
        if self.greedy is not None:
            point = torch.where(self.greedy, tokens, point)
            cutoff = cutoff.masked_fill(self.greedy, -torch.inf)
        filtered = self.parameters.filtered
        law = Law(
            logits.float(),
            self.scale,
            cutoff,
            drawn.base + drawn.mass.log(),
            point,
            vocab,
            plain=self.greedy is None and not filtered,
        )
        return law, tokens
