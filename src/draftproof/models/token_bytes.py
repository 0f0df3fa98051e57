"""Spell tokens as bytes, and encode bytes as tokens, whatever a tokenizer's own alphabet is.

Byte-level BPE (GPT-2, Llama 3, Qwen) writes every byte as a printable character; SentencePiece (Llama 2, Gemma) writes
a space as "▁" and unknown bytes as "<0x0A>"; a word-level tokenizer puts a space before every word. In bytes they can
be compared. A token may end inside a character: its bytes are then not valid UTF-8 on their own.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

SPACE_SIGN: Final = "▁"
"""The character that SentencePiece vocabularies write for a space."""

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The spelling of a single byte in vocabularies with byte fallback."""

ROLES: Final = ("eos", "bos", "unk", "sep", "cls", "pad", "mask")
"""Roles that a tokenizer gives to special tokens. A token with several of them is matched by the first."""

ANCHOR: Final = "\n"
"""Text put before a piece so that a tokenizer does not add a space to the piece itself."""

Spelling = Callable[[str], bytes | None]


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET: Final[Mapping[str, int]] = _byte_alphabet()


def _byte_level(token: str) -> bytes | None:
    known = all(character in BYTE_ALPHABET for character in token)
    return bytes(BYTE_ALPHABET[character] for character in token) if known else None


def _sentence_piece(token: str) -> bytes | None:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_SIGN, " ").encode()


def _word(token: str) -> bytes | None:
    return b" " + token.encode()


class TokenBytes:
    """A tokenizer read as bytes.

    spelled   bytes of every ordinary token, by id
    special   name of every special token, by id; it adds no bytes to a text
    roles     ids of special tokens by role, such as "eos"
    opening   tokens that the tokenizer puts before every text: its beginning-of-text token, or none

    Ids from `vocab_size` on, the number of the model's logits, are left out: the model does not know them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        spell, added = _spelling(tokenizer), tokenizer.added_tokens_decoder
        self._backend, self._vocab_size = deepcopy(tokenizer.backend_tokenizer), vocab_size
        self._backend.encode_special_tokens = True  # as text: nothing that is written becomes a special token
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special = {i: str(token.content) for i, token in added.items() if token.special and i < vocab_size}
        ordinary = {i: spell(word) for word, i in tokenizer.get_vocab().items() if i not in added}
        literal = {i: str(token.content).encode() for i, token in added.items() if not token.special}
        self.spelled = {i: data for i, data in (ordinary | literal).items() if data and i < vocab_size}
        self.roles = {role: i for role, i in _roles(tokenizer).items() if i in self.special}
        self._byte_ids = {data[0]: i for i, data in sorted(self.spelled.items(), reverse=True) if len(data) == 1}
        self._adds_space = self._text_of(self._ids("a")) == b" a"
        opening = tokenizer("")["input_ids"]
        self.opening = opening if opening == [self.roles.get("bos")] else []

    def encode(self, data: bytes) -> list[int]:
        """Return tokens that spell these bytes, as a part of a longer text.

        Bytes that are not valid UTF-8, such as the beginning of a character, become byte tokens; they are left out if
        the vocabulary has none. Text is never read as a special token.
        """
        ids: list[int] = []
        for piece in _characters(data):
            if isinstance(piece, str):
                ids += self._encode_text(piece)
            else:
                ids += [self._byte_ids[byte] for byte in piece if byte in self._byte_ids]
        return ids

    def _encode_text(self, text: str) -> list[int]:
        if not self._adds_space:
            return self._ids(text)
        whole = self._ids(ANCHOR + text)
        start = self.split(whole, len(f" {ANCHOR}"))
        return self._ids(text) if start is None else whole[start:]

    def split(self, ids: list[int], length: int) -> int | None:
        """Return how many of these tokens spell the first `length` bytes; None if a token lies across that border."""
        for n, token in enumerate(ids):
            if length <= 0:
                return n if length == 0 else None
            length -= len(self.spelled.get(token, b""))
        return len(ids) if length == 0 else None

    def _ids(self, text: str) -> list[int]:
        return [token for token in self._backend.encode(text, add_special_tokens=False).ids if token < self._vocab_size]

    def _text_of(self, ids: list[int]) -> bytes:
        return b"".join(self.spelled.get(token, b"") for token in ids)


def _roles(tokenizer: Any) -> dict[str, int]:
    ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    return {role: int(i) for role, i in ids.items() if i is not None}


def _spelling(tokenizer: Any) -> Spelling:
    """Return the function from a vocabulary's spelling of a token to its bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, whose vocabulary says how tokens are spelled: load "
            "one with AutoTokenizer, or use a drafter with the target's vocabulary"
        )
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return _word  # tokenizers then joins tokens by spaces
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    signs = [step for step in steps if step.get("pattern") == {"String": SPACE_SIGN} and step.get("content") == " "]
    if signs or "Metaspace" in kinds:
        return _sentence_piece
    raise ValueError(
        f"{type(tokenizer).__name__} decodes with {' and '.join(sorted(kinds))}, where a token's text depends on its "
        "neighbours: use a drafter with the target's vocabulary"
    )


def _characters(data: bytes) -> Iterator[str | bytes]:
    """Yield the parts of these bytes that are text, as text, and those that are not valid UTF-8, as bytes."""
    while data:
        try:
            yield data.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode()
            yield data[error.start : error.end]
            data = data[error.end :]
