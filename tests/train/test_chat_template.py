"""The tokens around user and assistant messages are found from the chat template."""

import copy

import pytest

from draftproof.train.chat_template import turns_of
from models.tiny_tokenizers import byte_fallback, byte_level


def test_a_chat_is_put_together_as_the_template_would():
    tokenizer = byte_level()
    turns = turns_of(tokenizer)
    encoded = {name: tokenizer.encode(name, add_special_tokens=False) for name in ("why", "so", "oh")}
    messages = [("user", "why"), ("assistant", "so"), ("user", "oh")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    made = [
        *turns.opening,
        *encoded["why"],
        *turns.to_assistant,
        *encoded["so"],
        *turns.to_user,
        *encoded["oh"],
    ]
    assert turns.is_chat
    assert [*made, *turns.to_assistant] == whole


def test_a_change_of_turns_begins_with_what_ends_one():
    tokenizer = byte_level()
    turns = turns_of(tokenizer)
    assert turns.to_assistant[0] == turns.to_user[0] == tokenizer.eos_token_id


def test_without_a_template_texts_begin_as_the_tokenizer_says():
    tokenizer = byte_fallback()
    assert not turns_of(tokenizer).is_chat
    assert turns_of(tokenizer).opening == tuple(tokenizer.encode(""))


def test_a_template_that_drops_a_message_is_refused():
    tokenizer = copy.copy(byte_level())
    tokenizer.chat_template = "hello"
    with pytest.raises(ValueError, match="leaves out a message"):
        turns_of(tokenizer)
