"""From what may follow to a draft: a tree grown best first, of which a chain is the case of one follower a node."""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

import torch

from draftproof.core.host import sent
from draftproof.core.types import PAD, ROOT, Draft

N = TypeVar("N")


class Guess(NamedTuple):
    """Chosen tokens for one row, each with its parent slot."""

    tokens: list[int]
    parents: list[int]


class Follower(NamedTuple):
    """A token that may come next, and how likely that seems."""

    token: int
    share: float


BACK_OFF = 0.4
"""What a shorter context's word is worth beside a longer one's (Brants et al. 2007, "stupid back-off")."""


def grow(root: N, expand: Callable[[N], Iterable[tuple[Follower, N]]], slots: int, *, least: float = 0.0) -> Guess:
    """Up to `slots` tokens behind `root`, the likeliest paths first; `expand` gives the followers of a node.

    A path is as likely as the product of its shares; those below `least` are left out. Children leave the heap after
    their parent and in falling order, which is the order in which a draft wants them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    ticket = count()  # of two equal paths the older one: nodes are never compared
    heap = [(-f.share, next(ticket), f.token, ROOT, node) for f, node in expand(root) if slots and f.share >= least]
    heapify(heap)
    while heap and len(tokens) < slots:
        score, _, token, parent, node = heappop(heap)
        slot = len(tokens)
        tokens.append(token)
        parents.append(parent)
        if slot + 1 == slots:
            break
        for follower, child in expand(node):
            if -score * follower.share >= least:
                heappush(heap, (score * follower.share, next(ticket), follower.token, slot, child))
    return Guess(tokens, parents)


def chosen(guesses: Sequence[Guess], device: torch.device, *, tree: bool = False) -> Draft:
    """The draft that these guesses make: nothing in it was drawn, so it carries no law."""
    lengths = [len(guess.tokens) for guess in guesses]
    K = max(lengths, default=0)
    shape = (len(guesses), K)
    tokens = [guess.tokens + [PAD] * (K - len(guess.tokens)) for guess in guesses]
    parents = [guess.parents + [ROOT] * (K - len(guess.parents)) for guess in guesses] if tree else None
    return Draft(
        sent(tokens, device).view(shape),
        sent(lengths, device),
        parents=None if parents is None else sent(parents, device).view(shape),
    )


def check_count(name: str, value: int, least: int) -> None:
    """Refuse a setting that is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number ≥ {least}; got {value!r}")


def check_share(name: str, value: float) -> None:
    """Refuse a setting that is no probability."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a probability in [0, 1]; got {value!r}")
