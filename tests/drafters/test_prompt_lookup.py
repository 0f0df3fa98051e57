"""Prompt lookup copies what a search through the whole text would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.toy_rounds import rng_of, row
from draftproof.drafters.prompt_lookup import PromptLookup

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def guess(drafter: PromptLookup, tokens: list[int], k: int) -> list[int]:
    rows = [row(0, tokens)]
    return drafter.propose(rows, [k], rng_of(rows)).tokens[0].tolist()


def by_hand(tokens: list[int], longest: int, k: int) -> list[int]:
    """Search from the end, longest match first; a copy that reaches the end of the text repeats itself."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for at in range(len(tokens) - size - 1, -1, -1):
            if tokens[at : at + size] == tokens[-size:]:
                start, period = at + size, len(tokens) - at - size
                return [tokens[start + i % period] for i in range(k)]
    return []


@settings(deadline=None)
@given(texts, st.integers(1, 4), st.integers(0, 6))
def test_the_copy_is_that_of_a_search_through_the_text(tokens, longest, k):
    assert guess(PromptLookup(longest), tokens, k) == by_hand(tokens, longest, k)


@settings(deadline=None)
@given(texts, st.lists(texts, max_size=4))
def test_reading_in_pieces_is_reading_at_once(first, more):
    drafter, tokens = PromptLookup(3), list(first)
    guess(drafter, tokens, 4)
    for piece in more:
        tokens = tokens + piece
        assert guess(drafter, tokens, 4) == by_hand(tokens, 3, 4)


def test_the_most_recent_of_equal_matches_is_copied():
    assert guess(PromptLookup(2), [1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]


def test_a_match_below_the_shortest_length_is_ignored():
    assert guess(PromptLookup(3, 2), [1, 5, 6, 1], 2) == []


def test_a_repetition_goes_on():
    assert guess(PromptLookup(), [7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="longest must be a whole number ≥ 3; got 2"):
        PromptLookup(2, 3)
