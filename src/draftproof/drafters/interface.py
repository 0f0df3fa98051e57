"""Drafters guess. Nothing they do can change what is emitted, only how fast: provided a draft's distribution is the true one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What a drafter wants to be shown of the target's passes. Computing it costs, so nothing is shown unasked."""

    layers: tuple[int, ...] = ()
    """Hidden states after these layers (1 is the first; the last is after the norm)."""
    top: int = 0
    """How many of the target's most likely tokens at every scored position."""


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """What the target's last pass showed of the positions that were kept, and nothing of those that were not.

    It scored T tokens of the context, the last of them at index `stop - 1`; row i speaks of tokens[stop - T + i], and
    `top[i]` holds the target's most likely tokens to *follow* it, the likeliest first; it lies on the host.
    """

    stop: int
    top: Int[Tensor, "T N"] | None = None
    hidden: tuple[Float[Tensor, "T H"], ...] = ()


@runtime_checkable
class Context(Protocol):
    """All a drafter may know of a row. The context is the truth; what a drafter remembers is only memory."""

    @property
    def id(self) -> int:
        """Names the request; never used again for another."""

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output so far. Only ever appended to."""

    @property
    def prompt_length(self) -> int: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def shown(self) -> TargetOutputs | None:
        """What the target showed since this drafter's last proposal for the row, if it asked."""


@runtime_checkable
class Drafter(Protocol):
    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Guess up to k[b] tokens to follow contexts[b]. Shorter is fine, also 0; K is the longest.

        Tokens that are drawn are drawn with `core.draw.propose(distribution, noise, j)`, j the slot, and the draft carries that
        distribution and `shared_noise=noise.shared`. Whether to go on after a token may depend on that token, but what was
        drawn must be submitted: dropping a token because it looks weak is a bias.
        """


NOTHING = TargetFeatures()


def features_of(drafter: Drafter) -> TargetFeatures:
    """What this drafter wants to be shown: its `features` attribute, or nothing."""
    wanted = getattr(drafter, "features", NOTHING)
    if not isinstance(wanted, TargetFeatures):
        raise ValueError(f"{type(drafter).__name__}.features must be a TargetFeatures; got {wanted!r}")
    return wanted
