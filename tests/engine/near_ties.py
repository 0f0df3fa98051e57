"""Compare a text with plain decoding, allowing differences only at near ties.

A pass over several tokens rounds differently from a pass over one, which may decide between two tokens that are nearly
level. No other difference is allowed, and every one is counted.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

EPSILON = 1e-4
"""Margin below which two tokens are level: between the best two logits, or between the first two of a race."""


def count_near_ties(
    text: Sequence[int],
    plain: Callable[[Sequence[int]], Sequence[int]],
    margin: Callable[[Sequence[int]], float],
) -> int:
    """Return how many tokens differ from plain decoding; fail at one that is not a near tie.

    `plain(prefix)` is what plain decoding emits after these output tokens; `margin(prefix)` is the margin between its
    best two tokens there. After a difference the comparison continues from the text's own token.
    """
    start, count = 0, 0
    while start < len(text):
        pairs = enumerate(zip_longest(text[start:], plain(text[:start])))
        at = next((start + i for i, (ours, theirs) in pairs if ours != theirs), None)
        if at is None:
            return count
        gap = margin(text[:at])
        assert gap < EPSILON, f"token {at} differs from plain decoding, and the best two are {gap:.1e} apart"
        start, count = at + 1, count + 1
    return count
