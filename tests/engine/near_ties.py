"""When two texts may differ: a pass over several tokens and one over a single token round differently, and where two
tokens are as good as level that decides. Nothing else is an excuse, and each one is counted."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

EPSILON = 1e-4
"""The margin below which two tokens are level: of logits between the best two, of a race between its first two."""


def excused(
    said: Sequence[int],
    plain: Callable[[Sequence[int]], Sequence[int]],
    margin: Callable[[Sequence[int]], float],
) -> int:
    """How many differences from plain decoding had to be excused; one that cannot be is a failure.

    `plain(prefix)` is what plain decoding says behind these output tokens, `margin(prefix)` how far its best two are
    apart there. Behind a difference the comparison starts again, from what was said.
    """
    start, count = 0, 0
    while start < len(said):
        pairs = enumerate(zip_longest(said[start:], plain(said[:start])))
        at = next((start + i for i, (ours, theirs) in pairs if ours != theirs), None)
        if at is None:
            return count
        gap = margin(said[:at])
        assert gap < EPSILON, f"token {at} differs from plain decoding, and the best two are {gap:.1e} apart"
        start, count = at + 1, count + 1
    return count
