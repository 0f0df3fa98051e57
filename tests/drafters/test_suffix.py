"""Suffix drafts: the automaton against a search by definition, then what the drafter does with it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.toy_rounds import rng_of, row
from draftproof.drafters.suffix import MAX_COUNTED_LINKS, Automaton, Suffix, read_corpus

texts = st.lists(st.integers(0, 2), min_size=1, max_size=16)


def guess(drafter: Suffix, tokens: list[int], k: int) -> list[int]:
    rows = [row(0, tokens)]
    return drafter.propose(rows, [k], rng_of(rows)).tokens[0].tolist()


def places(text: list[int], run: list[int]) -> list[int]:
    """Return the position after every occurrence of `run`."""
    return [i + len(run) for i in range(len(text) - len(run) + 1) if text[i : i + len(run)] == run]


@settings(deadline=None)
@given(texts)
def test_the_longest_repeated_end_is_found(text):
    automaton = Automaton()
    automaton.read(text)
    assert automaton.repeated().length == max(
        (n for n in range(len(text)) if len(places(text, text[len(text) - n :])) > 1), default=0
    )


@settings(deadline=None)
@given(texts, texts)
def test_the_longest_known_end_of_another_text_is_found(text, other):
    automaton = Automaton.of([text])
    assert automaton.match(other).length == max(
        n for n in range(len(other) + 1) if places(text, other[len(other) - n :])
    )


@settings(deadline=None)
@given(texts)
def test_every_run_is_known_with_its_count(text):
    automaton = Automaton.of([text])
    for start in range(len(text)):
        for stop in range(start + 1, len(text) + 1):
            match = automaton.match(text[start:stop])
            assert match.length == stop - start
            assert automaton._count[match.state] == len(places(text, text[start:stop]))


@settings(deadline=None)
@given(texts, texts)
def test_followers_are_all_there_are_by_count_then_the_latest(text, other):
    automaton = Automaton.of([text])
    match = automaton.match(other)
    run = other[len(other) - match.length :]
    after = [i for i in places(text, run) if i < len(text)]
    rank = {text[i]: (sum(text[j] == text[i] for j in after), i) for i in after}  # the last i wins
    expected = sorted(rank, key=rank.__getitem__, reverse=True) if match.length else []
    found = [follower.token for follower, _ in automaton.followers(match, len(expected) or 1)]
    if expected:
        assert found == expected


def test_reading_a_text_of_one_token_takes_linear_time():
    """Count the steps, without timing: an occurrence is counted along a bounded number of links."""
    automaton = Automaton()
    automaton.read([1] * 500)
    assert automaton.repeated().length == 499
    assert max(automaton._count) <= 500
    assert sum(automaton._count) <= 500 * MAX_COUNTED_LINKS


def test_a_longer_match_gives_a_longer_draft():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert guess(Suffix(), [*text, 0, 1], 9) == [2, 3, 4, 5]  # 1/2, 1/3, 1/4, 1/5
    assert guess(Suffix(), [*text, 0, 1, 2, 3], 9) == [4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_after_a_replaced_token_the_old_text_continues():
    text = [1, 2, 3, 4, 5, 6]
    assert guess(Suffix(), [*text, 1, 2, 9], 2) == [4, 5]  # 9 in place of 3
    assert guess(Suffix(), [*text, 9], 2) == []  # nothing was expected after 6
    assert guess(Suffix(), [9, 7, *text, 1, 2, 9], 1) == [7]  # 9 occurred before
    assert len(guess(Suffix(), [*text, 0, 1, 2, 3], 6)) == 6
    assert len(guess(Suffix(), [*text, 1, 2, 9], 6)) == 3  # 2/5 of the trust that a match of 3 would have


@settings(deadline=None)
@given(texts, st.integers(0, 3))
def test_the_expected_token_followed_the_longest_suffix_that_another_token_followed(text, last):
    automaton = Automaton()
    automaton.read([*text, last])

    def others(n: int) -> set[int]:
        return {text[i] for i in places(text, text[len(text) - n :]) if i < len(text)} - {last}

    longest = max((n for n in range(1, len(text)) if others(n)), default=0)
    assert automaton.replaced().length == (longest + 1 if longest else 0)


def test_nothing_is_guessed_without_a_match():
    assert guess(Suffix(), [1, 2, 3], 4) == []


def test_a_repetition_goes_on():
    assert guess(Suffix(), [7, 8] * 4, 6) == [7, 8, 7, 8, 7, 8]


def test_a_corpus_is_used_where_it_matches_longer(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("1 2 3 4 5\n\n6 7 8\n", encoding="utf-8")
    drafter = Suffix(corpus=read_corpus(file))
    assert guess(drafter, [2, 9, 1, 2], 2) == [3, 4]
    assert guess(Suffix(), [2, 9, 1, 2], 2) == [9, 1]


def test_no_match_spans_two_texts_of_a_corpus():
    assert guess(Suffix(corpus=[[1, 2], [3, 4]]), [1, 2], 3) == []


def test_a_file_that_holds_no_token_ids_is_refused(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("1 two 3", encoding="utf-8")
    with pytest.raises(ValueError, match=r"corpus\.txt must hold token ids"):
        read_corpus(file)


def test_earlier_outputs_are_kept_in_two_generations(monkeypatch):
    monkeypatch.setattr("draftproof.drafters.suffix.KEPT_TOKENS", 20)
    drafter = Suffix(keep=True)
    for name in range(8):
        r = row(name, [50])
        drafter.propose([r], [0], rng_of([r]))
        r.tokens += [10 * name + i for i in range(10)]
        drafter.propose([r], [0], rng_of([r]))
    late, early = row(90, [60, 61]), row(91, [0, 1])
    assert drafter.propose([late], [3], rng_of([late])).tokens.tolist() == [[62, 63, 64]]
    assert int(drafter.propose([early], [3], rng_of([early])).lengths[0]) == 0


def test_wrong_settings_are_refused_by_name():
    with pytest.raises(ValueError, match="least must be a probability"):
        Suffix(least=-0.1)
