"""Spell single tokens for answers: as text, and as bytes, of which a token may hold a part of a character."""

from functools import cached_property, lru_cache
from typing import Any

from draftproof.models.token_bytes import TokenBytes


class TokenTexts:
    """The texts and bytes of a vocabulary's tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.text = lru_cache(2**16)(self._text)

    def load(self) -> None:
        """Read the vocabulary's bytes now, on a thread where it may take its time."""
        self._spelled  # noqa: B018  (computed at its first use)

    def byte_values(self, token: int) -> list[int]:
        """Return a token's bytes, as OpenAI lists them."""
        spelled = self._spelled.get(token)
        return list(self.text(token).encode() if spelled is None else spelled)

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _spelled(self) -> dict[int, bytes]:
        try:
            return TokenBytes(self._tokenizer, self._vocab_size).spelled
        except ValueError:  # a tokenizer whose tokens have no bytes of their own
            return {}
