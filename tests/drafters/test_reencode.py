"""A text is encoded again in the draft model's tokens: byte for byte, and only the last word changes as it grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from drafters.toy_rounds import row
from drafters.two_vocabularies import SHARES, bpe, large_pair, overlap_of, prompts
from draftproof.drafters.reencode import LONGEST_WORD, Reencoder
from draftproof.models.vocabulary_overlap import VocabularyOverlap
from models.tiny_tokenizers import byte_fallback, byte_level

OVERLAPS = {share: overlap_of(*large_pair(share)) for share in SHARES} | {
    "byte fallback": overlap_of(byte_level(), byte_fallback())
}
every = pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=map(str, OVERLAPS))


class Reader:
    """Follows the calls of a reencoder as a cache would."""

    def __init__(self, overlap: VocabularyOverlap) -> None:
        self.reencode = Reencoder(overlap)
        self.read: list[int] = []

    def truncate(self, request: int, length: int) -> None:
        del self.read[length:]

    def follow(self, tokens: list[int]) -> list[int]:
        [context] = self.reencode([row(0, tokens)], self.truncate)
        assert list(context.tokens[: len(self.read)]) == self.read, "a change was not announced"
        self.read = list(context.tokens)
        assert context.target_tokens == tokens
        return self.read


def spelled(vocabulary, tokens):
    return b"".join(vocabulary.spelled[token] for token in tokens)


@every
@given(data=st.data())
def test_any_tokens_are_encoded_byte_for_byte_after_every_round(overlap, data):
    """Random tokens of a byte-level vocabulary are often not valid UTF-8, and never what its tokenizer would make."""
    reader, tokens = Reader(overlap), []
    for new in data.draw(st.lists(st.lists(st.sampled_from(sorted(overlap.target.spelled)), min_size=1, max_size=5))):
        tokens += new
        assert spelled(overlap.draft, reader.follow(tokens)) == spelled(overlap.target, tokens)


@every
def test_characters_that_tokens_split_are_encoded_whole_once_they_are(overlap):
    text = " 日本語 👍🏽 größe"
    tokens = overlap.target.encode(text.encode())
    reader = Reader(overlap)
    for n in range(1, len(tokens) + 1):
        assert spelled(overlap.draft, reader.follow(tokens[:n])) == spelled(overlap.target, tokens[:n])


def test_a_text_becomes_what_the_draft_models_tokenizer_makes_of_it():
    """Few words are shared token by token here, so that nearly all are encoded again."""
    tokenizer, draft = large_pair(0.2)
    for text in prompts()[:8]:
        assert Reader(OVERLAPS[0.2]).follow(tokenizer(text)["input_ids"]) == draft(text)["input_ids"]


@pytest.mark.parametrize("share", SHARES)
def test_only_the_last_word_changes_when_a_text_grows(share):
    tokenizer, _ = large_pair(share)
    tokens = tokenizer(prompts()[3])["input_ids"]
    reader, before = Reader(OVERLAPS[share]), []
    for n in range(1, len(tokens) + 1):
        now = list(reader.follow(tokens[:n]))
        kept = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
        changed = spelled(OVERLAPS[share].draft, before[kept:])
        assert not any(byte in changed[1:] for byte in b" ")  # less than a word
        before = now


def test_a_text_without_spaces_is_settled_after_a_while():
    overlap = OVERLAPS[0.2]
    not_shared = next(t for t, data in overlap.target.spelled.items() if t not in overlap.partner and data.isalpha())
    reencode, changed = Reencoder(overlap), []
    for n in range(1, 4 * LONGEST_WORD):
        [context] = reencode([row(0, [not_shared] * n)], lambda request, length: changed.append(length))
        per_word = LONGEST_WORD * len(overlap.target.spelled[not_shared])
        assert all(length >= len(context.tokens) - 2 * per_word for length in changed)
        changed.clear()


def test_shared_tokens_are_taken_over_as_they_are():
    overlap = overlap_of(byte_level(), byte_level())
    tokens = [68, 70, 5, 300, 301, 302, 68, 200, 250]  # no tokenizer would make these of their text
    assert Reader(overlap).follow(tokens) == tokens


def test_requests_are_followed_apart():
    overlap = OVERLAPS[0.7]
    reencode, ignored = Reencoder(overlap), lambda request, length: None
    one, other = overlap.target.encode(b"the fox"), overlap.target.encode(b"quick")
    both = reencode([row(0, one), row(1, other)], ignored)
    swapped = reencode([row(1, other), row(0, one)], ignored)
    assert [context.tokens for context in both] == [context.tokens for context in swapped[::-1]]


def with_special(*names: str, opening: str | None = None, **roles: str):
    """Train a tokenizer with special tokens, one of which may open every text."""
    tokenizer = bpe(["the fox"] * 3, 12)
    tokenizer.add_special_tokens(roles)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    if opening is not None:
        pieces = {"single": f"{opening} $A", "special_tokens": [(opening, tokenizer.convert_tokens_to_ids(opening))]}
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**pieces)
    return tokenizer


def test_special_tokens_become_those_of_the_same_role_or_their_names():
    one, other = with_special("<user>", eos_token="<end>"), with_special(eos_token="</s>")
    tokens = [*one("the")["input_ids"], one.eos_token_id, one.convert_tokens_to_ids("<user>")]
    made = Reader(overlap_of(one, other)).follow(tokens)
    the = other("the")["input_ids"]
    assert made[: len(the) + 1] == [*the, other.eos_token_id]
    assert other.eos_token_id not in made[len(the) + 1 :]


def test_a_draft_model_gets_the_token_that_its_texts_begin_with_once():
    one, other = with_special(bos_token="<s>"), with_special(bos_token="<bos>", opening="<bos>")
    the = one("the")["input_ids"]
    for tokens in (the, [one.bos_token_id, *the]):
        made = Reader(overlap_of(one, other)).follow(tokens)
        assert made[0] == other.bos_token_id
        assert made.count(other.bos_token_id) == 1
