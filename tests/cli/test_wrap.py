"""Streamed text is wrapped between words, however it is cut into pieces."""

import random
import re
import textwrap

import pytest
from rich.cells import cell_len

from draftproof.cli.wrap import WordWrapper

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "never,", "running"]


def shown(pieces, width):
    """Return the lines on a terminal of this width after the wrapped pieces are written to it."""
    wrapper, lines, column = WordWrapper(lambda: width), [""], 0
    for piece in pieces:
        for back, erase, character in re.findall(r"\x1b\[(\d+)D|(\x1b\[K)|(.|\n)", wrapper.feed(piece), re.S):
            if back:
                column -= int(back)
                assert column >= 0
            elif erase:
                lines[-1] = lines[-1][:column]
            elif character == "\n" or column + cell_len(character) > width:
                lines.append("" if character == "\n" else character)
                column = cell_len(lines[-1])
            else:
                lines[-1] = lines[-1][:column] + character
                column += cell_len(character)
    return [line.rstrip() for line in lines]


def cut(text, rng):
    """Cut a text into pieces of 0 to 5 characters."""
    pieces, at = [], 0
    while at < len(text):
        size = rng.randrange(6)
        pieces.append(text[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("width", [12, 20, 80])
def test_the_lines_are_those_of_the_whole_text_wrapped_at_once(width):
    rng = random.Random(width)
    for _ in range(50):
        text = " ".join(rng.choice(WORDS) for _ in range(30))
        assert shown(cut(text, rng), width) == textwrap.wrap(text, width - 1)


def test_a_terminal_alone_breaks_words():
    """The control: without the wrapper the same screen has lines that end in the middle of a word."""
    lines, text = [], " ".join(WORDS)
    for start in range(0, len(text), 12):
        lines.append(text[start : start + 12])
    assert any(line.split()[-1] not in WORDS for line in lines)


def test_line_breaks_and_indentation_stay():
    code = "def f(x):\n    return x\n\n\tdone"
    assert shown(list(code), 40) == ["def f(x):", "    return x", "", "        done"]


def test_a_word_longer_than_the_line_is_broken_and_loses_nothing():
    lines = shown(["see ", "x" * 25, "yz end"], 10)
    assert "".join(lines).replace(" ", "") == "see" + "x" * 25 + "yzend"
    assert max(map(len, lines)) < 10


def test_wide_characters_take_two_columns():
    lines = shown(list("狐は速い 狐は速い 狐は速い"), 11)
    assert lines == ["狐は速い", "狐は速い", "狐は速い"]


def test_control_characters_cannot_move_the_cursor():
    assert WordWrapper(lambda: 40).feed("a\x1b[2Jb\r\x07c") == "a[2Jbc"
