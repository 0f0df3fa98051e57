"""A tokenizer read without transformers gives the tokens and texts of transformers' tokenizer of the same folder."""

import copy

import pytest
from transformers import AutoTokenizer

from draftproof.models import bundled
from draftproof.models.tokenizer import Tokenizer, encode
from draftproof.models.tokenizer_file import FileTokenizer
from models.tiny_tokenizers import CORPUS, byte_level

TEXTS = [
    "", " ", "a", "  two  spaces 12  345", "größe naïve 日本語 👍🏽 \N{ZERO WIDTH JOINER}", "\n\t x\r\n", "<|im_end|>",
    "a<|im_start|>user\nb<|im_end|>", *CORPUS[:2],
]  # fmt: skip
CHATS = [
    [{"role": "user", "content": "Why?"}],
    [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": "{{ x }} <|im_end|>"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}, {"role": "user", "content": ""}],
]


@pytest.fixture(scope="module", params=["tiny", "bundled"])
def pair(request, tmp_path_factory):
    """Return our tokenizer and transformers' of the same folder."""
    if request.param == "bundled":
        try:
            folder = bundled.fetch(weights="int4")
        except bundled.UnavailableError as error:
            pytest.skip(str(error))
    else:
        folder = tmp_path_factory.mktemp("tokenizer")
        byte_level().save_pretrained(folder)
    return FileTokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_tokens_and_texts_are_the_same(pair):
    ours, theirs = pair
    assert isinstance(ours, Tokenizer)
    for text in TEXTS:
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens
        for skipped in (True, False):
            options = {"skip_special_tokens": skipped, "clean_up_tokenization_spaces": False}
            assert ours.decode(tokens, **options) == theirs.decode(tokens, **options)
    half = theirs.encode("日本語 👍🏽")[:-1]  # ends inside a character
    assert ours.decode(half) == theirs.decode(half)


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chats_are_the_same(pair, generation_prompt):
    ours, theirs = pair
    for chat in CHATS:
        options = {"add_generation_prompt": generation_prompt, "return_dict": False}
        assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)
        as_text = ours.apply_chat_template(chat, tokenize=False, **options)
        assert as_text == theirs.apply_chat_template(chat, tokenize=False, **options)
    continued = CHATS[2][:2]
    assert encode(continued, ours) == encode(continued, theirs)


def test_what_detokenising_and_matching_vocabularies_read_is_the_same(pair):
    ours, theirs = pair
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    special = {token: added.special for token, added in ours.added_tokens_decoder.items()}
    assert special == {token: added.special for token, added in theirs.added_tokens_decoder.items()}


def test_everything_else_is_transformers(pair):
    ours, theirs = pair
    assert ours("a b")["input_ids"] == theirs("a b")["input_ids"]
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.convert_ids_to_tokens([5, 6]) == theirs.convert_ids_to_tokens([5, 6])
    with pytest.raises(AttributeError):
        _ = ours.no_such_name


def test_another_chat_template_is_used(pair):
    ours, theirs = pair
    changed = copy.copy(ours)
    changed.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    options = {"add_generation_prompt": True, "return_dict": False}
    assert changed.apply_chat_template(CHATS[0], **options) == theirs.encode("WHY?")
    assert encode("Why?", changed) == theirs.encode("WHY?")
