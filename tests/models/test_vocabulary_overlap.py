"""Two vocabularies share the tokens with equal bytes, one to one, and special tokens with equal roles."""

import pytest
from tokenizers import AddedToken

from drafters.two_vocabularies import SHARES, bpe, large_pair, overlap_of, small_pair
from models.tiny_tokenizers import byte_fallback, byte_level


@pytest.mark.parametrize("pair", [small_pair, large_pair])
@pytest.mark.parametrize("share", SHARES)
def test_trained_vocabularies_share_about_20_70_and_95_percent(share, pair):
    assert overlap_of(*pair(share)).share == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("share", SHARES)
def test_partners_have_the_same_bytes_and_each_has_one_partner(share):
    overlap = overlap_of(*large_pair(share))
    assert len(set(overlap.partner.values())) == len(overlap.partner)
    assert all(overlap.target.spelled[own] == overlap.draft.spelled[its] for own, its in overlap.partner.items())
    missing = [data for own, data in overlap.target.spelled.items() if own not in overlap.partner]
    assert not set(missing) & set(overlap.draft.spelled.values())


def test_a_vocabulary_shares_all_of_itself():
    overlap = overlap_of(byte_level(), byte_level())
    assert overlap.share == 1
    assert all(own == its for own, its in overlap.partner.items())


def test_byte_level_and_byte_fallback_vocabularies_share_words_and_bytes():
    overlap = overlap_of(byte_fallback(), byte_level())
    names = {
        byte_fallback().convert_ids_to_tokens(own): byte_level().convert_ids_to_tokens(its)
        for own, its in overlap.partner.items()
    }
    assert names["▁the"] == "Ġthe"
    assert names["<0x80>"] == "Ģ"


def test_of_two_tokens_with_the_same_bytes_the_one_that_is_used_is_shared():
    overlap = overlap_of(byte_fallback(), byte_level())
    ids = byte_fallback().get_vocab()
    assert ids["a"] in overlap.partner
    assert ids["<0x61>"] not in overlap.partner


def special(**roles: str):
    tokenizer = bpe(["ab abé"], 8)
    tokenizer.add_special_tokens(roles)
    return tokenizer


def test_special_tokens_are_matched_by_role_and_not_by_name():
    one, other = (
        special(eos_token="</s>", bos_token="<x>"),
        special(eos_token="<|end|>", pad_token="</s>", unk_token="<x>"),
    )
    overlap = overlap_of(one, other)
    assert overlap.partner[one.eos_token_id] == other.eos_token_id
    assert one.bos_token_id not in overlap.partner  # the other's token of this name has another role


def test_special_tokens_without_a_role_are_matched_by_name():
    one, other = special(), special()
    for tokenizer, names in ((one, ("<a>", "<b>")), (other, ("<c>", "<b>"))):
        tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    shared = {
        one.convert_ids_to_tokens(a): other.convert_ids_to_tokens(b) for a, b in overlap_of(one, other).partner.items()
    }
    assert shared["<b>"] == "<b>"
    assert not {"<a>", "<c>"} & {*shared, *shared.values()}
