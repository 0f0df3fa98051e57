"""What is known of a drafter: the distribution it draws from, recomputed from the text, or that it copies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.auditor.reference import ReferenceModel, TargetDistributions, fingerprint, in_use
from draftproof.core.sampling import SamplingParams
from draftproof.models.head.attach import SHIPPED, FittedHead, fitted

DistributionOf = Callable[[Sequence[int]], Float[Tensor, " V"]]
"""A drafter's distribution of the next token, given all tokens before it."""

COPYING: Final = ("ngram", "suffix", "prompt-lookup")
"""Drafters that copy from the text. Of any other a name does not tell the distribution, and to bet on copies would find nothing
wrong with a skipped residual."""


@dataclass(frozen=True)
class Drafted:
    """A drafter's log-probabilities at N positions, over the target's vocabulary; `log_raw` are those without the
    sampling parameters, None where that is the same or cannot be told."""

    log_q: Float[Tensor, "N V"]
    log_raw: Float[Tensor, "N V"] | None = None

    @cached_property
    def q(self) -> Float[Tensor, "N V"]:
        return self.log_q.exp()

    @classmethod
    def by(
        cls, drafter: ReferenceModel | DistributionOf, dists: TargetDistributions, sampling: SamplingParams
    ) -> "Drafted":
        """What this drafter would draw from where the target has these distributions."""
        positions = dists.positions
        if isinstance(drafter, ReferenceModel):
            own = drafter.dists(positions, sampling)
            raw = _fitted(own.scores.log_softmax(-1), dists) if in_use(sampling) else None
            return cls(_fitted(own.log_p, dists), raw)
        rows = zip(positions.before.tolist(), positions.length.tolist(), strict=True)
        return cls(_fitted(torch.stack([drafter(row[:n]) for row, n in rows]).log(), dists))


def _fitted(log_q: Float[Tensor, "N U"], dists: TargetDistributions) -> Float[Tensor, "N V"]:
    """Over the target's vocabulary: what it has more is never drafted, what it has less is never kept."""
    V = dists.log_p.shape[-1]
    wide = torch.nn.functional.pad(log_q[:, :V], (0, max(0, V - log_q.shape[1])), value=-torch.inf)
    return wide.to(dists.log_p)


def copies_text(drafter: Any) -> bool:
    """Whether a drafter of this name copies, always or where it can."""
    return isinstance(drafter, str) and drafter.split("+")[0] in COPYING


def as_drafter(drafter: Any) -> ReferenceModel | DistributionOf | None:
    """A draft model, its `Teacher`, or a function from the tokens before to a distribution; None or a name where the drafts are
    copied from the text."""
    if drafter is None or isinstance(drafter, ReferenceModel):
        return drafter
    if isinstance(drafter, str) and drafter in COPYING:
        return None
    if getattr(drafter, "config", None) is not None or hasattr(drafter, "new_cache"):
        return ReferenceModel(drafter)
    if callable(drafter):
        dist: DistributionOf = drafter
        return dist
    raise ValueError(
        "drafter must be a draft model, a head, a function from tokens to a distribution, the name of one that copies "
        f"({', '.join(COPYING)}), or None; got {drafter!r:.80}"
    )


NAMES: Final = ("head", "suffix+head")
"""Drafters that draw from a head; behind a colon stands its folder."""


class HeadTeacher(ReferenceModel):
    """A head as a teacher of its own distribution: 0 outside its vocabulary, warped as any other by the judge's processors.

    At position t − 2 the head reads the target's states there and the token x_{t−1}, and predicts x_t. The target is
    read once more for its states: one pass over the text, without its output layer.
    """

    def __init__(self, head: FittedHead, target: PreTrainedModel) -> None:
        super().__init__(target)
        self._head = head
        self._vocab_size = len(head.vocab.entry)

    def _logits(self, tokens: Int[Tensor, "B T"], scored: int) -> Float[Tensor, "B J V"]:
        """Behind each of the last `scored` tokens; all alike behind a text's first one, where a head has no guess."""
        head, B, n = self._head, len(tokens), tokens.shape[1] - 1
        hidden = self._pass(tokens, 1, output_hidden_states=True).hidden_states
        h = head.head.fuse([hidden[tap][:, :n].float() for tap in head.head.shape.taps])
        follow, positions = tokens[:, 1:].to(h.device), torch.arange(n, device=h.device).expand(B, n)
        made = head.head.step(head.embedded(follow), h, positions, head.head.new_cache(B, n), reach=n) if n else h
        guessed = head.logits(made[:, max(0, n - scored) :])
        logits = guessed.new_full((B, scored, self.vocab_size), -torch.inf)
        logits[..., head.vocab.ids] = torch.nn.functional.pad(guessed, (0, 0, scored - guessed.shape[1], 0))
        return logits

    def describe(self) -> dict[str, str]:
        """Which head this is: how many tokens it can say, and a hash of its weights."""
        return {"model": f"a head of {len(self._head.vocab.ids):,} tokens", "weights": fingerprint(self._head.head)}


def with_states(drafter: Any, target: Any) -> Any:
    """A head or the name of one as a `HeadTeacher` on the target; any other drafter as it is."""
    name, _, folder = drafter.partition(":") if isinstance(drafter, str) else ("", "", "")
    if name not in NAMES and not isinstance(drafter, FittedHead):
        return drafter
    if getattr(target, "config", None) is None:
        raise ValueError(f"a head reads the states of a transformers model; the target is a {type(target).__name__}")
    return HeadTeacher(fitted(folder or SHIPPED, target) if name in NAMES else drafter, target)
