"""A small speculative decoder for toy models, all rows one token at a time: exact, or wrong in a known way.

Drafting K tokens and verifying them is the same as drafting one, verifying it, and continuing while it is accepted, so
every step gives every row one token. The drafts and whether they were accepted, which no bet may know, are kept for the
tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftproof.auditor.interface import Decoded
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round
from draftproof.models.toy import Toy


def pair(V: int = 8, *, noise: float = 0.8, order: int = 2, seed: int = 1) -> tuple[Toy, Toy]:
    """Return a target and a drafter whose logits are the target's plus Gaussian noise."""
    target = Toy.random(V, order=order, seed=seed)
    numbers = torch.Generator().manual_seed(seed + 100)
    return target, Toy(target.table + torch.randn(target.table.shape, generator=numbers) * noise)


@dataclass
class Speaker:
    """A decoder by the token rule.

    keep_residual  if False, draw from the target after a rejection
    mixed          share of tokens that are drawn from the drafter without verification
    traced         whether the rounds are reported
    """

    target: Toy
    draft: Toy
    K: int = 3
    keep_residual: bool = True
    mixed: float = 0.0
    traced: bool = True
    proposals: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        numbers = torch.Generator().manual_seed(seeds[0])
        rows = torch.tensor([([0, *prompt])[-2:] for prompt in prompts])
        depth = torch.zeros(len(rows), dtype=torch.long)
        emitted, kept = [], []
        for _ in range(max_tokens):
            p, q = (self._dist(model, rows, sampling) for model in (self.target, self.draft))
            token, accepted, proposal = self._token(p, q, depth, numbers)
            depth = torch.where(accepted, depth + 1, 0)
            rows = torch.stack([rows[:, 1], token], 1)
            emitted.append(token)
            kept.append(accepted)
            self.proposals.append(proposal)
            self.kept.append(accepted)
        texts, flags = torch.stack(emitted, 1).tolist(), torch.stack(kept, 1).tolist()
        return [Decoded(tuple(t), self._rounds(f) if self.traced else None) for t, f in zip(texts, flags, strict=True)]

    def _dist(self, model: Toy, rows: Tensor, sampling: SamplingParams) -> Tensor:
        logits = model.table[rows[:, 1]] if model.table.ndim == 2 else model.table[rows[:, 0], rows[:, 1]]
        logits = logits.double()
        for token, bias in sampling.logit_bias.items():
            logits[:, token] += bias
        return (logits / sampling.temperature).softmax(-1)

    def _token(self, p: Tensor, q: Tensor, depth: Tensor, numbers: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        proposal = q.multinomial(1, generator=numbers)
        drafting = depth < self.K
        coin = torch.rand(len(p), 1, generator=numbers, dtype=torch.float64)
        accepted = ((coin * q.gather(1, proposal) < p.gather(1, proposal))[:, 0]) & drafting
        residual = (p - q).clamp_min(0) + 1e-300
        last = torch.where(drafting[:, None], residual, p) if self.keep_residual else p
        drawn = last.multinomial(1, generator=numbers)
        token = torch.where(accepted[:, None], proposal, drawn)[:, 0]
        if self.mixed:
            slip = torch.rand(len(p), generator=numbers) < self.mixed
            token = torch.where(slip, q.multinomial(1, generator=numbers)[:, 0], token)
        return token, accepted, proposal[:, 0]

    def _rounds(self, flags: list[bool]) -> tuple[Round, ...]:
        rounds, depth = [], 0
        for accepted in flags:
            if accepted:
                depth += 1
            else:
                rounds.append(Round(self.K, depth))
                depth = 0
        return (*rounds, Round(self.K, depth)) if depth else tuple(rounds)


@dataclass
class Copier:
    """A decoder that drafts the token after the latest longest match, and emits the target's own draw: exact.

    `redraws`: after a mismatch the draw is discarded and repeated.
    """

    target: Toy
    redraws: bool = False

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        numbers = torch.Generator().manual_seed(seeds[0])
        rows = [list(prompt) for prompt in prompts]
        for _ in range(max_tokens):
            ends = torch.tensor([row[-2:] for row in rows])
            p = (self.target.table[ends[:, 0], ends[:, 1]].double() / sampling.temperature).softmax(-1)
            draft = Positions.of([Text(tuple(row), (0,)) for row in rows]).continuation
            first, second = p.multinomial(2, replacement=True, generator=numbers).T
            again = (draft >= 0) & (first != draft) if self.redraws else torch.zeros_like(draft, dtype=torch.bool)
            for row, token in zip(rows, torch.where(again, second, first).tolist(), strict=True):
                row.append(token)
        return [Decoded(tuple(row[len(prompt) :])) for row, prompt in zip(rows, prompts, strict=True)]
