"""N-gram drafts: back-off, ties, early ends, fillers, trees and bounded cost."""

import pytest
import torch

from drafters.toy_rounds import Row, rng_of, row
from draftproof.drafters.interface import TargetOutputs, features_of
from draftproof.drafters.ngram import Grams, NGram


def guess(drafter: NGram, r: Row, k: int) -> list[int]:
    return drafter.propose([r], [k], rng_of([r])).tokens[0].tolist()


def test_the_longest_known_run_decides():
    # 9 follows 2 most often, but 3 follows 1 2
    assert guess(NGram(3), row(0, [1, 2, 3, 2, 9, 2, 9, 5, 1, 2]), 1) == [3]


def test_an_unknown_run_backs_off_to_a_shorter_one():
    assert guess(NGram(4), row(0, [1, 2, 3, 7, 8, 2]), 1) == [3]


def test_the_most_frequent_follower_is_taken_and_of_equals_the_latest():
    assert guess(NGram(2), row(0, [1, 5, 1, 5, 1, 6, 1]), 1) == [5]
    assert guess(NGram(2), row(0, [1, 5, 1, 6, 1]), 1) == [6]
    assert guess(NGram(2), row(0, [1, 5, 1, 6, 1, 6, 1, 5, 1]), 1) == [5]


def test_a_draft_ends_where_nothing_is_known():
    assert guess(NGram(3), row(0, [1, 2, 3]), 4) == []


def test_after_a_replaced_token_the_old_text_continues():
    text = [1, 2, 3, 4, 5, 6]
    assert guess(NGram(), row(0, [*text, 1, 2, 9]), 2) == [4, 5]  # 9 in place of 3
    assert guess(NGram(), row(0, [*text, 9]), 2) == []  # nothing was expected after 6
    assert guess(NGram(), row(0, [*text, 3, 8, 1, 2, 9]), 2) == [4, 5]
    assert guess(NGram(), row(0, [7]), 2) == []


def test_followers_of_the_last_token_come_before_those_of_the_token_it_replaced():
    assert guess(NGram(), row(0, [9, 7, 1, 2, 3, 4, 1, 2, 9]), 1) == [7]


def test_a_replaced_token_is_trusted_less():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(guess(NGram(), row(0, [*text, 0, 1, 2, 3]), 8)) > len(guess(NGram(), row(0, [*text, 1, 2, 0]), 8)) > 0


def test_never_stopping_goes_on_with_the_most_frequent_token():
    # 2 is the most frequent token, and 5 followed it last
    assert guess(NGram(3, stop_at_unknown=False), row(0, [2, 4, 2, 5]), 2) == [2, 5]


def test_a_path_that_seems_unlikely_ends():
    text = row(0, [1, 2, 3, 4, 5, 6, 7, 1])
    assert guess(NGram(2, least=0.2), text, 6) == [2, 3]  # 1/2 per step after runs of one token
    assert guess(NGram(5, least=0.2), text, 6) == [2, 3, 4, 5]  # 1/2 · 2/3 · 3/4 · 4/5: the run grows


def test_what_was_emitted_is_learnt():
    drafter, r = NGram(2), row(0, [1, 2])
    assert guess(drafter, r, 2) == []
    r.tokens += [3, 1]
    assert guess(drafter, r, 2) == [2, 3]


def test_likely_tokens_of_the_target_fill_in_what_never_occurred():
    drafter, r = NGram(3, fillers=2), row(0, [1, 2])
    assert features_of(drafter).top == 2
    r.tokens += [5, 7]  # 5 was kept, 7 is the round's last token; the pass scored 2 and 5
    r.target_outputs = TargetOutputs(stop=3, top=torch.tensor([[5, 8], [7, 6]]))
    guess(drafter, r, 1)
    r.tokens += [5]
    assert guess(drafter, r, 1) == [7]  # it occurred
    r.tokens = [1, 2, 5, 7, 5, 8]
    r.target_outputs = TargetOutputs(stop=5, top=torch.tensor([[4, 4]]))
    assert guess(drafter, r, 1) == [5]  # nothing is known after 8: 5 followed 7, which 8 replaces
    r.target_outputs = TargetOutputs(stop=6, top=torch.tensor([[4, 3]]))
    assert guess(drafter, r, 1) == [4]  # now the target has scored 8: 4 is its most likely token


def test_fillers_are_counted_once_and_weigh_less_than_tokens_that_occurred():
    drafter, r = NGram(2, fillers=1), row(0, [1, 2, 1])
    r.target_outputs = TargetOutputs(stop=3, top=torch.tensor([[9]]))
    assert all(guess(drafter, r, 1) == [2] for _ in range(9))


def test_a_tree_holds_the_best_paths_within_its_slots():
    draft = NGram(2, branches=2, least=0.0).propose(rows := [row(0, [1, 5, 1, 6, 7, 1, 5, 1])], [4], rng_of(rows))
    assert draft.parents is not None
    pairs = list(zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True))
    assert pairs[0] == (5, -1)  # followed 1 twice
    assert (6, -1) in pairs
    assert (1, 0) in pairs  # 1 followed 5


def test_the_table_forgets_its_older_half():
    grams = Grams(longest=2, limit=10)
    grams.read(list(range(50)), 0)
    assert len(grams) <= 10
    assert grams.followers((48,), 1)[0].token == 49
    assert grams.followers((3,), 1) == []


@pytest.mark.parametrize(
    "wrong", [{"longest": 1}, {"branches": 0}, {"fillers": -1}, {"least": 2.0}, {"branches": True}]
)
def test_wrong_settings_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NGram(**wrong)


def test_the_cost_of_a_round_does_not_grow_with_the_text():
    """Count the tokens accessed, without timing: only new ones are read."""
    drafter, r = NGram(), row(0, [i % 50 for i in range(2000)])
    guess(drafter, r, 4)
    r.tokens = Watched([*r.tokens, 1, 2])
    guess(drafter, r, 4)
    assert r.tokens.touched < 40


class Watched(list):
    touched = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.touched += len(found) if isinstance(key, slice) else 1
        return found
