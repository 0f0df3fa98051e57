"""What travels between the layers: a `Draft` goes in to a verifier, a `Verdict` comes out.

Distributions, everywhere: p is the target's, q is the drafter's. Never swapped.

Letters, everywhere: B rows, K draft length (for a tree, its number of slots), J = K + 1 positions the target
scores, V vocabulary, T tokens of context, H hidden size, S samples in an audit.

Words, everywhere: a drafter *proposes* a draft; the model *scores* it; sampling *warps* logits into a distribution; a
verifier returns a *verdict*: `accepted` draft tokens and always exactly one closing token.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from draftproof.core.distribution import Distribution

PAD: Final = -1
"""Stands after the last emitted token of a row, and after the last slot of a short draft."""

ROOT: Final = -1
"""The parent of a slot that follows the last emitted token directly."""


class InexactError(Exception):
    """The request cannot be served with exactly the target's distribution; the message says why and what would be."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K proposed tokens for each of B rows.

    `q` is the distribution each token was *drawn from*, nothing else: the same temperature, the same filters. A token
    that was chosen and not drawn (n-gram, argmax, the top of a tree) has none: q is a point mass on it. That
    holds for every token where `q` is None, and for those with `drawn` False where it is not.

    A tree names for every slot its parent slot, ROOT for those that follow the last emitted token directly; a
    slot comes after its parent, and siblings stand in the order in which they were drawn. None is a chain.

    `shared_noise` says that the tokens were drawn with the target's own noise, as `coupled` wants it; under
    any other rule that would be a bias, and is refused.
    """

    tokens: Int[Tensor, "B K"]
    lengths: Int[Tensor, " B"]
    q: "Distribution | None" = None
    drawn: Bool[Tensor, "B K"] | None = None
    parents: Int[Tensor, "B K"] | None = None
    shared_rng: bool = False


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a lossy rule's distribution is from the target's at each draft position, given that the round gets there."""

    total_variation: Float[Tensor, "B K"]
    kl: Float[Tensor, "B K"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What each row emits: `accepted` draft tokens, then exactly one closing token, then PAD.

    `path` names the kept slots of a tree, in order, then PAD. None for a chain: the first `accepted` ones.
    `exact` is False when a lossy rule made it; `deviation` then says how far off.
    """

    tokens: Int[Tensor, "B J"]
    accepted: Int[Tensor, " B"]
    path: Int[Tensor, "B K"] | None = None
    exact: bool = True
    deviation: Deviation | None = None


class Round(NamedTuple):
    """What became of one round of one request: how many tokens were drafted, and how many of them kept."""

    drafted: int
    accepted: int


class History(NamedTuple):
    """What a row has seen, for the penalties: presence and frequency count the output only."""

    prompt: "Tensor | list[int]"
    output: "Tensor | list[int]"
