"""A rule's word on a draft, before any coin is thrown: what a proof sums over."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Judgement:
    """The stations at which a row may stop, in the order in which they are tried.

    At station s the row stops with probability `chance[:, s]`, given that it got there; it then keeps the draft up
    to node `node[:, s]` and closes with a token from the law `closing[:, s]`. Node 0 is the root, before any draft
    token; node i + 1 stands behind slot i, so for a chain the node is the number of kept tokens.
    """

    node: Int[Tensor, "B S"]
    chance: Float[Tensor, "B S"]
    closing: Float[Tensor, "B S V"]
