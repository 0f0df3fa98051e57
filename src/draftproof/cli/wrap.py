"""Wrap streamed text at the terminal's width between words, although a word arrives in pieces.

Imports rich at the top, so commands import this module inside functions.
"""

import re
from collections.abc import Callable
from typing import Final

from rich.cells import cell_len

PARTS: Final = re.compile(r"\n|[^\S\n]+|\S+")
CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters apart from tab and line feed: they would move the cursor, and the columns would be wrong."""

TAB: Final = 8
"""Columns between tab stops."""


class WordWrapper:
    """Turns pieces of text into what to write to a terminal.

    A piece is written at once. If a word turns out not to fit, the part of it on the screen is erased and the word is
    written again on the next line. The last column stays free: terminals differ in what they do after filling it.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns  # a function, because the window may be resized
        self._column = 0
        self._word = ""  # the part of the unfinished word that is already on the screen

    def feed(self, piece: str) -> str:
        """Return what to write for this piece of text."""
        room = max(1, self._columns() - 1)
        return "".join(self._part(part, room) for part in PARTS.findall(CONTROL.sub("", piece)))

    def _part(self, part: str, room: int) -> str:
        if part == "\n":
            return self._new_line()
        return self._spaces(part, room) if part.isspace() else self._letters(part, room)

    def _new_line(self) -> str:
        self._column, self._word = 0, ""
        return "\n"

    def _spaces(self, spaces: str, room: int) -> str:
        """Return spaces, or a line break if they do not fit."""
        end = self._column
        for space in spaces:
            end += TAB - end % TAB if space == "\t" else cell_len(space)
        if end > room:
            return self._new_line()
        written = " " * (end - self._column)
        self._column, self._word = end, ""
        return written

    def _letters(self, letters: str, room: int) -> str:
        """Return letters that continue the word, moved to the next line together if the word does not fit here."""
        shown, width = cell_len(self._word), cell_len(letters)
        if self._column + width <= room:
            self._column, self._word = self._column + width, self._word + letters
            return letters
        if self._column > shown and shown + width <= room:
            erase = f"\x1b[{shown}D\x1b[K" if shown else ""
            word = self._word + letters
            self._column, self._word = shown + width, word
            return f"{erase}\n{word}"
        return self._broken(letters, room)

    def _broken(self, letters: str, room: int) -> str:
        """Return letters of a word that is longer than a line, with line breaks inside it."""
        written = ""
        for letter in letters:
            width = cell_len(letter)
            if self._column and self._column + width > room:
                written += self._new_line()
            written += letter
            self._column, self._word = self._column + width, self._word + letter
        return written
