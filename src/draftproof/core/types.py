"""Data types that the layers exchange: a `Draft` goes into a verification rule, a `Verdict` comes out.

The letters and words used in all files:

Distributions: p is the target's, q is the drafter's. Never swapped. `Distribution` holds either; `SamplingParams` says
how logits become one. `Draft.q` is the distribution that draft tokens were drawn from.

Letters: B rows, K draft length (for a tree, its number of slots), J = K + 1 positions the target scores, V vocabulary,
R entries of a logit row (V, or fewer if the drafter's vocabulary is smaller), T tokens of context, H hidden size,
S samples in an audit.

Words: a drafter *proposes* a draft; the model *scores* it; sampling *warps* logits into a distribution; a rule returns
a *verdict*: `accepted` draft tokens and exactly one more token, the *residual* token after a rejection or the *bonus*
token after none. A draft token was *drawn* from q, or *chosen* by other means. `Philox` gives the random numbers; a
*coin* is a number that decides on one draft token. With `shared_rng` the drafter draws with the target's own numbers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from draftproof.core.distribution import Distribution

PAD: Final = -1
"""Token id that fills a row after its last emitted token, and a short draft after its last slot."""

ROOT: Final = -1
"""Parent of a slot that directly follows the last emitted token."""


class InexactError(Exception):
    """The request cannot be served with exactly the target's distribution; the message says why and what would be."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K proposed tokens for each of B rows.

    `q` is the distribution each token was *drawn from*, with the temperature and filters of that draw. A token that was
    chosen and not drawn (n-gram, argmax, the top of a tree) has no such distribution: its q is a point mass on it. All
    tokens are chosen if `q` is None; otherwise those with `drawn` False are.

    In a tree, `parents` holds each slot's parent slot, ROOT for slots that directly follow the last emitted token. A
    slot comes after its parent, and siblings are in the order in which they were drawn. None means a chain.

    `shared_rng` says that the tokens were drawn with the target's own random numbers, as `coupled` needs. Under any
    other rule that is a bias, and is refused.
    """

    tokens: Int[Tensor, "B K"]
    lengths: Int[Tensor, " B"]
    q: "Distribution | None" = None
    drawn: Bool[Tensor, "B K"] | None = None
    parents: Int[Tensor, "B K"] | None = None
    shared_rng: bool = False


@dataclass(frozen=True, slots=True)
class Deviation:
    """Distance of a lossy rule from the target's distribution at each draft position, if the round gets that far."""

    total_variation: Float[Tensor, "B K"]
    kl: Float[Tensor, "B K"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens that each row emits: `accepted` draft tokens, then one residual or bonus token, then PAD.

    `path` lists the accepted slots of a tree, in order, then PAD. It is None for a chain: the first `accepted` slots.
    `exact` is False if a lossy rule made the verdict; `deviation` then says how far off it is.
    """

    tokens: Int[Tensor, "B J"]
    accepted: Int[Tensor, " B"]
    path: Int[Tensor, "B K"] | None = None
    exact: bool = True
    deviation: Deviation | None = None


class Round(NamedTuple):
    """Outcome of one round of one request: how many tokens were drafted, and how many of them were accepted."""

    drafted: int
    accepted: int


class History(NamedTuple):
    """Tokens a row has seen, for the penalties: presence and frequency penalties count the output only."""

    prompt: "Tensor | list[int]"
    output: "Tensor | list[int]"
