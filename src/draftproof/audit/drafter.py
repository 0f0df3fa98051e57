"""What is known of a drafter: the law it draws from, recomputed from the text, or that it copies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.audit.processors import in_use
from draftproof.audit.teacher import Laws, Teacher
from draftproof.core.sampling import Sampling

LawOf = Callable[[Sequence[int]], Float[Tensor, " V"]]
"""A drafter's law of the next token, given all tokens before it."""

COPYING: Final = ("ngram", "suffix", "prompt-lookup")
"""Drafters that copy from the text. Of any other a name does not tell the law, and to bet on copies would find nothing
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
    def by(cls, drafter: Teacher | LawOf, laws: Laws, sampling: Sampling) -> "Drafted":
        """What this drafter would draw from where the target has these laws."""
        positions = laws.positions
        if isinstance(drafter, Teacher):
            own = drafter.laws(positions, sampling)
            raw = _fitted(own.scores.log_softmax(-1), laws) if in_use(sampling) else None
            return cls(_fitted(own.log_p, laws), raw)
        rows = zip(positions.before.tolist(), positions.length.tolist(), strict=True)
        return cls(_fitted(torch.stack([drafter(row[:n]) for row, n in rows]).log(), laws))


def _fitted(log_q: Float[Tensor, "N U"], laws: Laws) -> Float[Tensor, "N V"]:
    """Over the target's vocabulary: what it has more is never drafted, what it has less is never kept."""
    V = laws.log_p.shape[-1]
    wide = torch.nn.functional.pad(log_q[:, :V], (0, max(0, V - log_q.shape[1])), value=-torch.inf)
    return wide.to(laws.log_p)


def copies_text(drafter: Any) -> bool:
    """Whether a drafter of this name copies, always or where it can."""
    return isinstance(drafter, str) and drafter.split("+")[0] in COPYING


def as_drafter(drafter: Any) -> Teacher | LawOf | None:
    """A draft model, its `Teacher`, or a function from the tokens before to a law; None or a name where the drafts are
    copied from the text."""
    if drafter is None or isinstance(drafter, Teacher):
        return drafter
    if isinstance(drafter, str) and drafter in COPYING:
        return None
    if getattr(drafter, "config", None) is not None or hasattr(drafter, "new_cache"):
        return Teacher(drafter)
    if callable(drafter):
        law: LawOf = drafter
        return law
    raise ValueError(
        "drafter must be a draft model, a head, a function from tokens to a law, the name of one that copies "
        f"({', '.join(COPYING)}), or None; got {drafter!r:.80}"
    )
