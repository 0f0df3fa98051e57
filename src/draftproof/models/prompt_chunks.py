"""Cut prompts into chunks that take about equally long to read on a CPU, at borders that are the same for all prompts.

The last bits of a token's keys and values depend on the width of the pass over its row, so a seeded text needs borders
that depend on positions alone. A token takes longer to read the more there are before it; rows that decode beside a
long prompt wait for its longest chunk.
"""

from bisect import bisect_right
from functools import cache
from typing import Final

from draftproof.models.extents import PAGE

ATTENTION_DOUBLES: Final = 830
"""Tokens before a token at which attending to them takes about as long as all else of reading it: fitted to rounds of
15 rows beside a prompt of 4000 tokens, in float32. Part of it is that each chunk reads all keys and values again."""

STEP: Final = 2
"""Tokens that the sizes of chunks are a multiple of. With steps of four, rounds beside the last 1000 of 4000 tokens
differed by a seventh."""

STEPS_AT_START: Final = 51
"""Size of a chunk where nothing is before it, in steps, if it had no limit. Beside 15 rows that decode, a round then
takes about three times as long. No chunk is longer than a page, so that short prompts are cut into pages."""


def chunk_around(position: int) -> tuple[int, int]:
    """Return where the chunk that holds a position begins, and where the next one does."""
    borders = _borders(ATTENTION_DOUBLES)
    while borders[-1] <= position:
        borders.append(borders[-1] + chunk_size(borders[-1]))
    after = bisect_right(borders, position)
    return borders[after - 1], borders[after]


def chunk_size(start: int) -> int:
    """Return how many tokens a chunk has that begins at this position."""
    steps = round(STEPS_AT_START / (1 + start / ATTENTION_DOUBLES))
    return min(PAGE, STEP * max(1, steps))


def reading_cost(start: int, end: int) -> float:
    """Return how long reading the tokens from start to end takes: as long as so many tokens with none before them."""
    return (end - start) * (1 + start / ATTENTION_DOUBLES)


@cache
def _borders(doubles: int) -> list[int]:
    """Return the borders that are known so far."""
    return [0]
