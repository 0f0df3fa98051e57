"""Incremental decoding: no split character, no lost space, no missed stop string, wherever the token borders fall."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.engine.stop import TextStream
from draftproof.models.tokenizer import PENDING, REPLACEMENT, Detokenizer, each, encode
from models.tiny_tokenizers import byte_fallback, byte_level, word_pieces

EMOJI = "👍🏽"  # two code points, eight bytes


def decoded(tokenizer, tokens, skip_special=True):
    return tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer, tokens, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def streamed(text, stop, tokenizer=None):
    """Feed a text token by token; return (text shown, stop string found, tokens consumed, tokens in all)."""
    tokenizer = tokenizer or byte_level()
    tokens = tokenizer.encode(text)
    stream = TextStream(Detokenizer(tokenizer), stop)
    shown = [stream.feed([token]) for token in tokens]
    return "".join([*shown, stream.flush()]), stream.stopped, stream.consumed, len(tokens)


def text_before_stop(text, stops):
    """Find the text before the stop string by the definition, character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


# --- prompts


def test_a_string_becomes_a_turn_where_there_is_a_chat_template():
    tokenizer = byte_level()
    turn = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(tokenizer, encode("the fox", tokenizer), skip_special=False) == turn
    assert encode("the fox", tokenizer, chat=True) == encode("the fox", tokenizer)


def test_a_string_stays_raw_where_asked_or_without_a_template():
    assert encode("the fox", byte_level(), chat=False) == byte_level().encode("the fox")
    assert encode("the fox", byte_fallback()) == byte_fallback().encode("the fox")


def test_messages_go_through_the_template_and_an_assistants_last_one_is_continued():
    tokenizer = byte_level()
    question = {"role": "user", "content": "the?"}
    asked = decoded(tokenizer, encode([question], tokenizer), skip_special=False)
    begun = encode([question, {"role": "assistant", "content": "fox"}], tokenizer)
    assert asked.endswith("<|im_start|>assistant\n")
    assert decoded(tokenizer, begun, skip_special=False) == asked + "fox"


IDS = [
    *([5, 6], (5, 6), torch.tensor([5, 6]), torch.tensor([5, 6], dtype=torch.int32), [np.int64(5), 6], range(5, 7)),
    *(np.array([5, 6]), np.array([5, 6], dtype=np.uint16), [torch.tensor(5), torch.tensor(6)]),
]


@pytest.mark.parametrize("ids", IDS)
def test_token_ids_are_taken_as_they_are(ids):
    prompts, is_one = each(ids)
    assert is_one
    assert encode(prompts[0], byte_level()) == [5, 6]


@pytest.mark.parametrize(
    ("prompts", "count", "is_one"),
    [
        ("the", 1, True),
        ("", 1, True),
        (["the", "fox"], 2, False),
        ([], 0, False),
        ([[]], 1, False),
        ([[5, 6], [7]], 2, False),
        (torch.tensor([[5, 6], [7, 8]]), 2, False),
        (np.array([[5, 6], [7, 8]]), 2, False),
        ([np.array([5, 6]), np.array([7])], 2, False),
        ([torch.tensor([5, 6]), torch.tensor([7])], 2, False),
        (np.array(["the", "fox"]), 2, False),
        (np.array([]), 0, False),
        ([{"role": "user", "content": "the"}], 1, True),
        ([[{"role": "user", "content": "the"}]], 1, False),
    ],
)
def test_one_prompt_is_distinguished_from_a_list_of_prompts(prompts, count, is_one):
    found, alone = each(prompts)
    assert (len(found), alone) == (count, is_one)


def test_an_empty_prompt_of_tokens_is_no_tokens():
    assert encode([], byte_level()) == []


@pytest.mark.parametrize("wrong", [[5, -1], [5, 1.5], [True], [5, "fox"], [5, {"role": "user", "content": ""}]])
def test_an_invalid_prompt_is_refused_with_its_place(wrong):
    with pytest.raises(ValueError, match=r"prompt\[\d\] is .*; a prompt is a string"):
        encode(wrong, byte_level())


@pytest.mark.parametrize("prompts", [np.array([[5, 6], [7, 8]]), [torch.tensor([5, 6]), np.array([7, 8])]])
def test_rows_of_arrays_are_lists_of_token_ids(prompts):
    assert each(prompts) == ([[5, 6], [7, 8]], False)
    assert [encode(row, byte_level()) for row in prompts] == [[5, 6], [7, 8]]


MESSAGE = {"role": "user", "content": "x"}
MISTAKES = {
    "a message": (MESSAGE, r"the prompt is one message; a chat is a list of messages: \[\{'role': 'user'"),
    "a dictionary": ({"text": "x"}, r"the prompt is a dict, \{'text': 'x'\}; a prompt is a string"),
    "a tokenizer's output": ({"input_ids": [[5]], "attention_mask": [[1]]}, r'pass its entry \["input_ids"\]'),
    "bytes": (b"the fox", r"the prompt is bytes, b'the fox': decode it .* prompt.decode\('utf-8'\)"),
    "a number": (5, "the prompt is 5; a prompt is a string, a list of messages or a list of token ids"),
    "nothing": (None, "the prompt is None; a prompt is a string"),
    "numbers that are no ids": (np.array([1.5, 2.0]), r"an array of float64 with shape \(2,\); token ids are a 1-D"),
    "a mask": (torch.tensor([True]), r"an array of torch.bool with shape \(1,\)"),
    "an array of one number": (np.array(5), r"an array of int64 with shape \(\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_no_prompt_is_refused_with_the_right_form(mistake):
    prompt, message = MISTAKES[mistake]
    for read in (each, lambda prompt: encode(prompt, byte_level())):
        with pytest.raises(ValueError, match=message):
            read(prompt)


@pytest.mark.parametrize("wrong", [b"the", MESSAGE, 1.5, None, np.array([0.5])])
def test_what_is_no_prompt_in_a_list_is_named_by_its_place(wrong):
    with pytest.raises(ValueError, match=r"prompts\[1\] is "):
        each(["the fox", wrong])


@pytest.mark.parametrize("chat", [True, False])
def test_a_lone_surrogate_is_named_with_its_place(chat):
    with pytest.raises(
        ValueError, match=r"the prompt has a lone surrogate, '\\udce9', at character 5 \(near 'caf. \\udce9"
    ):
        encode("café \udce9 the fox", byte_level(), chat=chat)
    with pytest.raises(ValueError, match=r"the content of prompt\[0\] has a lone surrogate"):
        encode([{"role": "user", "content": "the \ud83d"}], byte_level())
    assert encode("café 👍🏽", byte_level(), chat=chat)


def test_a_message_without_content_is_refused():
    with pytest.raises(ValueError, match=r"prompt\[1\] is .*'content'"):
        encode([{"role": "user", "content": "the"}, {"role": "user"}], byte_level())


def test_a_chat_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        encode([{"role": "user", "content": "the"}], byte_fallback())


# --- characters


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_the_pieces_of_any_tokens_are_the_text_of_all_of_them(data):
    tokenizer = byte_level()
    skip_special = data.draw(st.booleans())
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80))
    whole = decoded(tokenizer, tokens, skip_special)
    pieces = pieces_of(tokenizer, tokens, skip_special=skip_special)
    assert "".join(pieces) == whole
    assert REPLACEMENT in whole or not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([0x80, 0x9F, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF]), max_size=90))
def test_bytes_that_never_become_characters_are_neither_lost_nor_doubled(stream):
    tokenizer = byte_level()
    letters = dict(zip(range(256), byte_alphabet(), strict=True))
    tokens = [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in stream]
    assert "".join(pieces_of(tokenizer, tokens)) == bytes(stream).decode(errors="replace")


def byte_alphabet():
    """Return the letter for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="the fox.日本語é👍🏽😀 ", max_size=40))
def test_no_piece_of_real_text_ends_inside_a_character(text):
    for tokenizer in (byte_level(), byte_fallback()):
        tokens = tokenizer.encode(text)
        pieces = pieces_of(tokenizer, tokens)
        assert "".join(pieces) == decoded(tokenizer, tokens)
        assert not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_spaces_survive_where_they_depend_on_the_neighbour(data):
    whole_tokens = [i for token, i in byte_fallback().get_vocab().items() if not token.startswith("<")]
    for tokenizer, vocabulary in ((byte_fallback(), whole_tokens), (word_pieces(), range(8))):
        tokens = data.draw(st.lists(st.sampled_from(vocabulary), max_size=30))
        assert "".join(pieces_of(tokenizer, tokens)) == decoded(tokenizer, tokens)


def test_a_text_may_continue_its_prompt():
    tokenizer = byte_fallback()
    prompt, output = tokenizer.encode("the fox"), tokenizer.encode("the")
    assert "".join(pieces_of(tokenizer, output)) == "the"
    assert "".join(pieces_of(tokenizer, output, after=prompt)) == " the"


def test_a_prompt_that_ends_inside_a_character_is_completed():
    tokenizer = byte_level()
    tokens = tokenizer.encode("日本é€")
    assert "".join(pieces_of(tokenizer, tokens[-1:], after=tokens[:-1])) == "€"


def test_a_token_is_shown_as_soon_as_it_is_whole():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer.encode(f"the{EMOJI}.")
    assert "".join(detokenizer.push(token) for token in tokens) == f"the{EMOJI}."


def test_special_tokens_are_skipped_even_inside_a_character():
    tokenizer = byte_level()
    tokens = tokenizer.encode("€")
    assert len(tokens) > 1
    end, unlisted = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<unlisted>"])
    assert pieces_of(tokenizer, [tokens[0], end, unlisted, *tokens[1:]])[-2:] == ["€", ""]
    assert "".join(pieces_of(tokenizer, [end, *tokens], skip_special=False)) == "<|im_end|>€"


def test_an_unfinished_character_comes_out_at_the_end_as_decode_has_it():
    tokenizer = byte_level()
    tokens = tokenizer.encode("the €")[:-1]
    *pieces, last = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == "the "
    assert last == REPLACEMENT


@pytest.mark.parametrize("text", ["the fox ", "\udcff"])
def test_the_window_does_not_grow_with_the_text(text):
    tokenizer = byte_level()
    one = [tokenizer.convert_tokens_to_ids("ÿ")] if text == "\udcff" else tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    for token in one * 200:
        detokenizer.push(token)
        assert len(detokenizer._window) <= 2 * PENDING + 1


# --- stop strings


@settings(deadline=None, max_examples=300)
@given(
    st.text(alphabet="abé👍🏽", max_size=24),
    st.lists(st.text(alphabet="abé👍🏽", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_where_the_definition_says(text, stops):
    for tokenizer in (byte_level(), byte_fallback()):
        shown, stopped, consumed, total = streamed(text, stops, tokenizer)
        assert shown == text_before_stop(text, stops)
        assert (stopped is not None) == (shown != text)
        assert consumed <= total


@pytest.mark.parametrize(
    ("text", "stop", "shown", "found"),
    [
        ("the quick fox", "ick f", "the qu", "ick f"),  # across token borders
        ("the fox", "the", "", "the"),  # at the very start
        ("the fox", "fox", "the ", "fox"),  # at the very end
        ("ababac", "abac", "ab", "abac"),  # a false start inside the match
        ("the fox", ["fox", "e f"], "th", "e f"),  # the first to be complete, not the first in the list
        ("the fox", ["ox", "fox"], "the ", "fox"),  # both at once: the longer
        (f"the {EMOJI} fox", EMOJI, "the ", EMOJI),  # several tokens, two code points
        ("the 👍 fox", EMOJI, "the 👍 fox", None),  # only its beginning
        ("the dog", "fox", "the dog", None),
        ("the do", "dog", "the do", None),  # held back, and returned at the end
        ("", "fox", "", None),
    ],
)
def test_stop_strings(text, stop, shown, found):
    assert streamed(text, stop)[:2] == (shown, found)


def test_only_what_may_be_a_stop_string_is_held_back():
    tokenizer = byte_level()
    stream = TextStream(Detokenizer(tokenizer), "fox!")
    assert stream.feed(tokenizer.encode("the fox")) == "the "
    assert stream.feed(tokenizer.encode("y")) == "foxy"


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string():
    tokenizer = byte_level()
    before, stop, rest = (tokenizer.encode(text) for text in ("the ", "xyz", "qqq"))
    stream = TextStream(Detokenizer(tokenizer), "xyz")
    assert stream.feed([*before, *stop, *rest]) == "the "
    assert stream.consumed == len(before) + len(stop)
    assert (stream.feed(rest), stream.flush(), stream.consumed) == ("", "", len(before) + len(stop))


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="abé👍🏽", max_size=24), st.lists(st.integers(1, 4), min_size=24, max_size=24))
def test_rounds_do_not_change_what_is_shown_or_consumed(text, rounds):
    tokens = byte_level().encode(text)
    stream, shown = TextStream(Detokenizer(byte_level()), ["ab", "é👍"]), ""
    while tokens and stream.stopped is None:
        size = rounds.pop()
        shown, tokens = shown + stream.feed(tokens[:size]), tokens[size:]
    assert (shown + stream.flush(), stream.stopped, stream.consumed) == streamed(text, ["ab", "é👍"])[:3]


def test_a_stop_string_before_an_unfinished_character_is_found_at_the_end():
    tokenizer = byte_level()
    stream = TextStream(Detokenizer(tokenizer), "fox")
    unfinished = tokenizer.convert_tokens_to_ids("â")  # the byte E2
    assert stream.feed([*tokenizer.encode("the fo"), *tokenizer.encode("x"), unfinished]) + stream.flush() == "the "


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match=r"stop=\['a', ''\] contains an empty string"):
        TextStream(Detokenizer(byte_level()), ["a", ""])


# --- the bundled tokenizer


def test_the_bundled_tokenizer_streams_random_tokens_as_it_decodes_them(smollm2):
    _, tokenizer = smollm2
    tokens = torch.randint(len(tokenizer), (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    start = time.perf_counter()
    pieces = pieces_of(tokenizer, tokens)
    assert time.perf_counter() - start < 3  # 1 ms a token; about 0.1 ms when the machine is idle
    assert "".join(pieces) == decoded(tokenizer, tokens)


def test_the_bundled_tokenizer_streams_emoji_whole(smollm2):
    text = f"Zwölf Größen: {EMOJI}, 👩‍👩‍👧 and 日本語."
    _, tokenizer = smollm2
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert streamed(text, EMOJI, tokenizer)[0] == "Zwölf Größen: "
