"""Read text from stdin and files, and refuse what is not valid Unicode with the name of its source.

A tokenizer given such text raises an error that names neither the prompt nor the reason.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

BOM = "\ufeff"


def read_stdin() -> str:
    """Return all of stdin as text."""
    return decode(sys.stdin.buffer.read(), "stdin")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers; a byte order mark at its beginning is left out.

    Only line feeds end a line: JSON strings may contain the other separators that `str.splitlines` knows.
    """
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        text = decode(line.removesuffix(b"\r"), f"{path}, line {number}")
        yield number, text.removeprefix(BOM) if number == 1 else text


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8. Raises ValueError that names the source, the first wrong byte and its offset."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source}: not valid UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}); convert the text "
            "first, for example with iconv -f latin1 -t utf-8"
        ) from None


def check_text(text: str, source: str) -> str:
    """Return the text unchanged; refuse one with lone surrogates, which no encoding has and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Python decodes invalid bytes of an argument to U+DC80..U+DCFF; JSON may have any as an escape.
        raise ValueError(
            f"{source}: character {error.start} is U+{ord(text[error.start]):04X}, a lone surrogate and not valid "
            "Unicode; remove it, or give the text as UTF-8"
        ) from None
    return text
