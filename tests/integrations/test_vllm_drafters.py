"""Our drafters as vLLM proposers: a request is recognised by its tokens, whichever row it is in."""

from types import SimpleNamespace

import numpy as np
import pytest

from draftproof.integrations.vllm import NGram, Suffix, drafters, startup
from draftproof.integrations.vllm.drafters import Proposer
from draftproof.integrations.vllm.hooks import RefusedError


@pytest.fixture(autouse=True)
def logged(monkeypatch) -> list[str]:
    """Lines of vLLM's log."""
    lines: list[str] = []
    monkeypatch.setattr(drafters, "logger", lambda: SimpleNamespace(warning=lines.append))
    return lines


def config(k: int = 4, max_model_len: int = 64):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )


def table(*texts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return vLLM's token table and the lengths of its rows; what is after a row's end is left over from others."""
    tokens = np.full((len(texts), 64), 99, dtype=np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return np.array([len(text) for text in texts], dtype=np.int32), tokens


@pytest.mark.parametrize("proposer", [NGram, Suffix])
def test_it_copies_what_followed_before(proposer):
    text = [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]
    assert proposer(config()).propose([[7]], *table(text))[0][:2] == [8, 9]


@pytest.mark.parametrize("proposer", [NGram, Suffix])
def test_rows_that_sampled_nothing_get_no_draft(proposer):
    text = [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]
    assert proposer(config()).propose([[], [7]], *table(text, text))[0] == []


@pytest.mark.parametrize("proposer", [NGram, Suffix])
def test_a_draft_leaves_room_for_the_token_after_it(proposer):
    text = [5, 6, 7, 8, 9, 1, 2, 5, 6, 7]
    assert proposer(config(max_model_len=12)).propose([[7]], *table(text))[0] == [8]
    assert proposer(config(max_model_len=11)).propose([[7]], *table(text))[0] == []


class Recorded:
    """A drafter that records which request ids it saw."""

    def __init__(self):
        self.seen = []

    def propose(self, contexts, k, rng):
        from draftproof.drafters.build import Guess, chosen

        self.seen.append({tuple(context.tokens): context.id for context in contexts})
        return chosen([Guess([1], [-1])] * len(contexts), rng.seeds.device)


def test_requests_keep_their_id_when_they_move_between_rows():
    drafter = Recorded()
    proposer = Proposer(config(), drafter)
    a, b = [1, 2, 3], [4, 5, 6, 7]
    proposer.propose([[3], [7]], *table(a, b))
    proposer.propose([[8], [9, 9], [0]], *table([*b, 8], [*a, 9, 9], [3, 0]))  # swapped, and a third one came
    first, second = drafter.seen
    assert second[(*b, 8)] == first[tuple(b)]
    assert second[(*a, 9, 9)] == first[tuple(a)]
    assert second[(3, 0)] not in first.values()


def test_a_new_request_in_an_old_row_gets_a_new_id():
    drafter = Recorded()
    proposer = Proposer(config(), drafter)
    proposer.propose([[3]], *table([1, 2, 3]))
    proposer.propose([[3]], *table([1, 2, 4, 3]))
    first, second = drafter.seen
    assert set(first.values()).isdisjoint(second.values())


def test_it_is_not_made_where_the_plug_in_was_asked_for_and_not_loaded(monkeypatch):
    asked = config()
    asked.additional_config = {"draftproof": {}}
    monkeypatch.setattr(startup.CONFIG, "installed", True)
    Suffix(asked)
    monkeypatch.setattr(startup.CONFIG, "installed", False)
    with pytest.raises(RefusedError, match="VLLM_PLUGINS"):
        Suffix(asked)


def test_the_log_says_who_verifies_its_drafts_if_the_plug_in_does_not(monkeypatch, logged):
    monkeypatch.setattr(startup.CONFIG, "installed", True)
    asked = config()
    asked.additional_config = {"draftproof": {}}
    Suffix(asked)
    assert logged == []
    Suffix(config())
    [line] = logged
    assert "verification is vLLM's own" in line
