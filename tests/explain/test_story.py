"""The story of a token agrees with what happened to it."""

import pytest

from draftproof.explain.story import BY_BLOCK, BY_TOKEN, FROM_P, about_closing, about_slot, number
from explain.runs import drawing, recorded


@pytest.mark.parametrize(
    ("x", "shown"), [(0.0, "0"), (1.0, "1"), (0.5, "0.5"), (0.1234, "0.123"), (3e-8, "3e-08"), (12.0, "12")]
)
def test_numbers_are_short(x, shown):
    assert number(x) == shown


def test_by_token_every_story_names_the_decision():
    made = recorded("token", drawing(), tokens=120)
    words = {"kept": "kept", "rejected": "not below: rejected", "dropped": "dropped"}
    for round_ in made.rounds:
        for i, slot in enumerate(round_.slots):
            story = about_slot(round_, i, made.name)
            assert words[round_.fate(i)] in story.happened
            assert made.name(slot.token) in story.happened
            if round_.fate(i) == "rejected":
                assert number(slot.coin) in story.happened
                assert story.why == BY_TOKEN


def test_stories_of_last_tokens_name_the_distribution_they_were_drawn_from():
    made = recorded("token", drawing(), tokens=120)
    for round_ in made.rounds:
        story = about_closing(round_, made.name)
        assert story.why == (BY_TOKEN if round_.closing.after_rejection else FROM_P)
        assert ("max(0, p − q)" in story.happened) == round_.closing.after_rejection


def test_stories_of_a_block_explain_the_block_rule():
    made = recorded("block", drawing(), tokens=60)
    assert all(about_slot(r, i, made.name).why == BY_BLOCK for r in made.rounds for i in range(len(r.slots)))


def test_stories_of_a_chosen_guess_do_not_call_it_drawn():
    made = recorded("token", "ngram", temperature=0.5)
    stories = [
        about_slot(r, i, made.name).happened for r in made.rounds for i in range(len(r.slots)) if r.fate(i) == "kept"
    ]
    assert stories
    assert all("chose" in story and "drew" not in story for story in stories)
