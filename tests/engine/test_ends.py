"""Which tokens end a text, and when: `stop_token_ids`, `ignore_eos` and `min_tokens`, with and without drafts."""

import pytest

import draftproof as dp
from draftproof.core.sampling import SamplingParams
from draftproof.engine.stop import TextStream
from draftproof.models.tokenizer import Detokenizer
from engine.many_texts import unchecked
from engine.tiny import PROMPT, V, llama
from models.tiny_tokenizers import byte_level

S = SamplingParams
SEEDS = range(8)
END = 3


@pytest.fixture(autouse=True)
def _unchecked():
    with unchecked():
        yield


def texts(drafter="ngram", rule="block", **options):
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=3)
    prompts = [list(PROMPT)] * len(SEEDS)
    return [o.tokens for o in engine.generate(prompts, [S(seed=seed) for seed in SEEDS], max_tokens=20, **options)]


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "tree"])
def test_a_text_ends_at_a_stop_token(rule):
    free, cut = texts(rule=rule), texts(rule=rule, stop_token_ids=[END])
    assert cut == [text[: text.index(END) + 1] if END in text else text for text in free]
    assert any(len(text) < 20 for text in cut)


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "tree"])
@pytest.mark.parametrize("least", [1, 6, 50])
def test_no_text_ends_before_its_least_number_of_tokens(rule, least):
    for text in texts(rule=rule, stop_token_ids=[END], min_tokens=least):
        assert END not in text[:least]
        assert len(text) == 20 or text.index(END) == len(text) - 1 >= least


def test_drafting_does_not_change_a_seeded_text_that_must_not_end_yet():
    options = {"stop_token_ids": [END], "min_tokens": 6}
    assert texts(None, **options) == texts(rule="coupled", **options)
    assert texts(None, **options) != texts(None, stop_token_ids=[END])


def test_the_models_own_end_can_be_ignored():
    engine = dp.load(llama(), None)
    engine.eos = frozenset({END})
    ended = engine.generate(list(PROMPT), S(seed=1), max_tokens=20)
    assert ended.tokens[-1] == END
    ignored = engine.generate(list(PROMPT), S(seed=1), max_tokens=20, ignore_eos=True)
    assert ignored.tokens[: len(ended.tokens)] == ended.tokens
    assert len(ignored.tokens) == 20
    streamed = [t for c in engine.stream(list(PROMPT), S(seed=1), max_tokens=20, ignore_eos=True) for t in c.tokens]
    assert streamed == ignored.tokens


def test_a_grammar_and_a_least_number_of_tokens_hold_together():
    import torch

    even = torch.arange(V) % 2 == 0
    for text in texts(stop_token_ids=[4], min_tokens=5, allowed=lambda output: even):
        assert all(token % 2 == 0 for token in text)
        assert 4 not in text[:5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [V]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
    ],
)
def test_what_is_no_token_and_no_number_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        texts(**options)


def test_a_stop_string_that_begins_too_early_is_none():
    tokenizer = byte_level()
    tokens = tokenizer.encode("fox fox fox")
    first = len(tokenizer.encode("fox"))
    stream = TextStream(Detokenizer(tokenizer), "fox", min_tokens=first)
    text = stream.feed(tokens) + stream.flush()
    assert text == "fox "
    assert stream.stopped == "fox"
    assert TextStream(Detokenizer(tokenizer), "fox").feed(tokens) == ""
