"""Suggest the name that a misspelt one was probably meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

SIMILARITY: Final = 0.7
"""Least similarity of a suggestion (difflib's ratio): "trian" has 0.8 with "train", "bench" 0.5 with "env"."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name nearest to the word, or "" if none is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=SIMILARITY)
    return f"; did you mean {near[0]}?" if near else ""
