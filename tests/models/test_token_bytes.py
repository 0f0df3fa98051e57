"""Tokens are spelled as bytes, and bytes become tokens that spell exactly them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from auditor.two_tokenizers import word_level
from draftproof.models.token_bytes import TokenBytes
from models.tiny_tokenizers import byte_fallback, byte_level, word_pieces

BYTE_LEVEL, BYTE_FALLBACK = (TokenBytes(make(), len(make())) for make in (byte_level, byte_fallback))
both = pytest.mark.parametrize("tokens", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte fallback"])


def spelled(tokens: TokenBytes, ids: list[int]) -> bytes:
    return b"".join(tokens.spelled[i] for i in ids)


@pytest.mark.parametrize(
    ("tokens", "tokenizer", "word", "data"),
    [
        (BYTE_LEVEL, byte_level(), "Ġthe", b" the"),
        (BYTE_LEVEL, byte_level(), "ĠðŁĳį", " 👍".encode()),
        (BYTE_LEVEL, byte_level(), "ðŁ", b"\xf0\x9f"),
        (BYTE_LEVEL, byte_level(), "Ċ", b"\n"),
        (BYTE_FALLBACK, byte_fallback(), "▁the", b" the"),
        (BYTE_FALLBACK, byte_fallback(), "<0xF0>", b"\xf0"),
    ],
)
def test_a_token_is_spelled_as_bytes_also_if_it_ends_inside_a_character(tokens, tokenizer, word, data):
    assert tokens.spelled[tokenizer.convert_tokens_to_ids(word)] == data


@both
@given(data=st.binary(max_size=20) | st.text(max_size=12).map(str.encode))
def test_any_bytes_become_tokens_that_spell_them(tokens, data):
    assert spelled(tokens, tokens.encode(data)) == data


@both
def test_text_is_encoded_as_part_of_a_longer_text(tokens):
    """A SentencePiece tokenizer puts a space before a text; a part of a text must not get one."""
    [the] = tokens.encode(b" the")
    assert tokens.spelled[the] == b" the"
    assert spelled(tokens, tokens.encode(b"the fox")) == b"the fox"


def test_text_that_looks_like_a_special_token_stays_text():
    ids = BYTE_LEVEL.encode(b"<|im_end|>")
    assert not set(ids) & set(BYTE_LEVEL.special)
    assert spelled(BYTE_LEVEL, ids) == b"<|im_end|>"
    assert byte_level()("<|im_end|>")["input_ids"] == [byte_level().eos_token_id]  # the user's tokenizer is not changed


def test_special_tokens_have_roles_and_no_bytes():
    assert BYTE_LEVEL.special == {320: "<|im_start|>", 321: "<|im_end|>", 322: "<unlisted>"}
    assert BYTE_LEVEL.roles == {"bos": 320, "eos": 321}
    assert not set(BYTE_LEVEL.special) & set(BYTE_LEVEL.spelled)


def test_added_tokens_that_are_text_are_spelled_literally():
    tokenizer = byte_level.__wrapped__()
    tokenizer.add_tokens([AddedToken("  né", normalized=False)])
    assert TokenBytes(tokenizer, len(tokenizer)).spelled[len(tokenizer) - 1] == "  né".encode()


def test_tokens_that_the_model_does_not_score_are_left_out():
    tokens = TokenBytes(byte_level(), 300)
    assert max(tokens.spelled) < 300
    assert not tokens.special
    assert all(i < 300 for i in tokens.encode("the quick größe 👍".encode()))


def test_words_have_a_space_before_them():
    tokens = TokenBytes(word_level("one", "two"), 3)
    assert tokens.spelled == {1: b" one", 2: b" two"}
    assert tokens.encode(b" two one") == [2, 1]


def test_a_tokenizer_whose_tokens_depend_on_their_neighbours_is_refused():
    with pytest.raises(ValueError, match="decodes with WordPiece, where a token's text depends on its neighbours: use"):
        TokenBytes(word_pieces(), 8)


def test_a_tokenizer_without_a_backend_is_refused():
    with pytest.raises(ValueError, match="object is not a fast tokenizer"):
        TokenBytes(object(), 8)
