"""Protocols of a drafter and of the context it sees.

A drafter cannot change the distribution of the output, only the speed, as long as each draft's `q` is the distribution
its tokens were really drawn from.
"""

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
    """Outputs of the target's passes that a drafter needs. They cost time, so the default is none."""

    layers: tuple[int, ...] = ()
    """Layers whose hidden states are needed, counted from 1; those of the last layer are taken after the final norm."""
    top: int = 0
    """Number of the target's most likely tokens needed at every scored position."""


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """Outputs of the target's last pass at the positions that were kept; rejected positions are left out.

    The pass scored T tokens of the context, the last of them at index `stop - 1`. Row i belongs to
    tokens[stop - T + i]; `top[i]` holds the target's most likely tokens to *follow* it, most likely first, on the CPU.
    """

    stop: int
    top: Int[Tensor, "T N"] | None = None
    hidden: tuple[Float[Tensor, "T H"], ...] = ()


@runtime_checkable
class Context(Protocol):
    """One row of the batch as a drafter sees it.

    A drafter may cache what it derives from a context, but must always follow `tokens`: it is not told which of its
    draft tokens were accepted.
    """

    @property
    def id(self) -> int:
        """Identify the request. An id is never used again."""

    @property
    def tokens(self) -> Sequence[int]:
        """Return prompt and output so far. Tokens are only ever appended."""

    @property
    def prompt_length(self) -> int: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def target_outputs(self) -> TargetOutputs | None:
        """Return the target's outputs since this drafter's last proposal for the row; None if none were requested."""


@runtime_checkable
class Drafter(Protocol):
    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens to follow contexts[b]; fewer, or none, are allowed. K is the longest row's length.

        Draw the token of slot j with `core.distribution.propose(q, rng, j)`, and return that `q` in the draft together
        with `shared_rng=rng.shared`. Whether to continue after a token may depend on that token. A drawn token must be
        submitted: dropping it because it is unlikely is a bias.
        """


NOTHING = TargetFeatures()


def features_of(drafter: Drafter) -> TargetFeatures:
    """Return the drafter's `features` attribute, or `NOTHING` if it has none."""
    wanted = getattr(drafter, "features", NOTHING)
    if not isinstance(wanted, TargetFeatures):
        raise ValueError(f"{type(drafter).__name__}.features must be a TargetFeatures; got {wanted!r}")
    return wanted


def check_sampling(drafter: Drafter | None, sampling: SamplingParams) -> None:
    """Raise if the drafter refuses requests with these parameters, by its optional method `check_sampling`."""
    check = getattr(drafter, "check_sampling", None)
    if check is not None:
        check(sampling)
