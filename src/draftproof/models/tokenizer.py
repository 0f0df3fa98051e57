"""Encode prompts, decode tokens as they arrive, and find stop strings in the text.

`encode` turns a prompt into tokens. `Detokenizer` turns tokens into whole characters. `TextStream` on top of it finds
stop strings, wherever the borders between tokens and rounds fall. Nothing here depends on a model or an engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

OnePrompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Tensor | npt.NDArray[Any]
"""Text; or token ids; or a chat, messages with `role` and `content`. `encode` distinguishes them."""

Prompt = OnePrompt | Sequence[Any]
"""One prompt, or a list of prompts. `each` distinguishes them."""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""The character that tokenizers decode bytes to that are not, or not yet, valid UTF-8."""

FORMS: Final = "a prompt is a string, a list of messages or a list of token ids"

EXCERPT: Final = 40
"""Characters of a prompt that an error message shows."""

CONTEXT: Final = 8
"""Tokens of context that fix how the next one decodes: its leading space, and the state of UTF-8 (3 bytes at most)."""

PENDING: Final = 16
"""Tokens held back at most for an incomplete character; an unbounded window would make decoding quadratic."""


@runtime_checkable
class Tokenizer(Protocol):
    """The methods used of a tokenizer; those of transformers have them."""

    chat_template: Any
    added_tokens_decoder: Any

    def encode(self, text: str, /) -> list[int]: ...

    def decode(
        self, token_ids: list[int], /, skip_special_tokens: bool, *, clean_up_tokenization_spaces: bool
    ) -> Any: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        return_dict: bool,
    ) -> Any: ...


def encode(prompt: Any, tokenizer: Tokenizer, *, chat: bool | None = None) -> list[int]:
    """Return the tokens of one prompt, ready to be continued.

    Messages go through the tokenizer's chat template. If the last one is the assistant's, it is continued; otherwise
    the template opens the assistant's turn. Token ids are used unchanged.

    `chat` is for a plain string: True makes it a user's turn, False leaves it as raw text to be completed, after the
    tokenizer's own opening tokens. None, the default, makes it a turn if the tokenizer has a chat template: an
    instruct model given raw text rambles.
    """
    if isinstance(prompt, str):
        _check_text(prompt, "the prompt")
        if chat or (chat is None and tokenizer.chat_template):
            return _templated([{"role": "user", "content": prompt}], tokenizer)
        return tokenizer.encode(prompt)
    items = _items(prompt, "the prompt")
    if items and isinstance(items[0], Mapping):
        return _templated(items, tokenizer)
    return _checked(items)


def each(prompts: Any) -> tuple[list[Any], bool]:
    """Split the argument into single prompts, and return whether it was one prompt rather than a list of them.

    An empty list is a list of no prompts; an empty prompt is "", or [] in a list. A matrix of token ids (a 2-D tensor
    or numpy array) is split into whole rows: padding cannot be distinguished from tokens here.
    """
    if isinstance(prompts, str):
        return [prompts], True
    items = [item.tolist() if _is_scalar(item) else item for item in _items(prompts, "the prompt")]
    if items and isinstance(items[0], Integral | Mapping):
        return [items], True
    return [item if isinstance(item, str) else _items(item, f"prompts[{at}]") for at, item in enumerate(items)], False


def _items(prompt: Any, name: str) -> list[Any]:
    """Return the elements of a list or an array; refuse anything else, and arrays of other than integers or text."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise ValueError(
            f"{name} is bytes, {_excerpt(bytes(prompt))}: decode it to text first, as in prompt.decode('utf-8'), or "
            "pass a list of token ids"
        )
    if isinstance(prompt, Mapping):
        raise ValueError(_mapping_message(prompt, name))
    if isinstance(prompt, Tensor | np.ndarray):
        numeric = isinstance(prompt, Tensor) or prompt.dtype.kind not in "UO"
        whole = str(prompt.dtype).removeprefix("torch.").startswith(("int", "uint"))
        if prompt.ndim == 0 or (numeric and not whole and 0 not in prompt.shape):
            shape = tuple(prompt.shape)
            raise ValueError(
                f"{name} is an array of {prompt.dtype} with shape {shape}; token ids are a 1-D array of integers, or a "
                "2-D array with one prompt in each row"
            )
        return list(prompt.tolist())
    if not isinstance(prompt, Iterable):
        raise ValueError(f"{name} is {_excerpt(prompt)}; {FORMS}")
    return list(prompt)


def _mapping_message(prompt: Mapping[Any, Any], name: str) -> str:
    if "input_ids" in prompt:
        return f'{name} is the output of a tokenizer, a {type(prompt).__name__}: pass its entry ["input_ids"]'
    if {"role", "content"} <= set(prompt):
        return f"{name} is one message; a chat is a list of messages: [{_excerpt(dict(prompt))}]"
    return f"{name} is a {type(prompt).__name__}, {_excerpt(prompt)}; {FORMS}"


def _is_scalar(item: Any) -> bool:
    return isinstance(item, Tensor | np.ndarray) and item.ndim == 0


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"


def _check_text(text: str, name: str) -> None:
    """Refuse text that is not Unicode: half of a surrogate pair, as a decoder with surrogateescape leaves it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - EXCERPT // 2) : error.start + EXCERPT // 2]
        raise ValueError(
            f"{name} has a lone surrogate, {text[error.start]!r}, at character {error.start} (near {near!r}), which is "
            'half of a character and cannot be encoded: decode the text with errors="replace", or remove it'
        ) from error


def _templated(messages: list[Any], tokenizer: Tokenizer) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            "the prompt is a chat, but this tokenizer has no chat template; set tokenizer.chat_template, or "
            "give the prompt as a string with chat=False"
        )
    for at, message in enumerate(messages):
        if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
            raise ValueError(f"prompt[{at}] is {message!r}; a message of a chat has a 'role' and a 'content'")
        if isinstance(message["content"], str):
            _check_text(message["content"], f"the content of prompt[{at}]")
    unfinished = messages[-1]["role"] == "assistant"
    tokens = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        return_dict=False,
    )
    return list(tokens)


def _checked(items: list[Any]) -> list[int]:
    for at, token in enumerate(items):
        if not isinstance(token, Integral) or isinstance(token, bool) or int(token) < 0:
            raise ValueError(f"prompt[{at}] is {token!r}; {FORMS}")
    return [int(token) for token in items]


class Detokenizer:
    """An incremental decoder that returns whole characters; all pieces together equal `tokenizer.decode` of all tokens.

    Only a window is decoded, never the whole text: the tokens of the last piece, which fix how the following ones
    decode, and those held back because their bytes end inside a character. `flush` returns the rest; bytes that never
    became a character come out as U+FFFD there, as in `decode`.

    With `after`, the text continues these tokens instead of standing alone: the space that a SentencePiece tokenizer
    drops before the first word of a text is kept.

    One exception: if a tokenizer retracts a character that was complete (byte fallback, when invalid bytes follow in
    the same run), the character that was already returned stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items() if skip_special else ()
        self._skipped = frozenset(token for token, content in added if content.special)
        self._window = [token for token in after if token not in self._skipped][-CONTEXT:]
        self._context = len(self._window)  # tokens of the window whose text is returned already
        self._returned = len(self._decode().rstrip(REPLACEMENT))  # characters of the window's text returned already

    def push(self, token: int) -> str:
        """Return the characters that this token completes."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode()
        if len(text) > self._returned and not text.endswith(REPLACEMENT):
            return self._release(text)
        if len(self._window) - self._context > PENDING:
            return self._release_incomplete(text)
        return ""

    def flush(self) -> str:
        """Return the text held back, and reset for a new text."""
        piece = self._decode()[self._returned :]
        self._window, self._context, self._returned = [], 0, 0
        return piece

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _release(self, text: str) -> str:
        piece = text[self._returned :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._returned = len(self._decode())
        return piece

    def _release_incomplete(self, text: str) -> str:
        """Return all but the last 3 bytes, which may still become a character."""
        end = max(self._returned, len(text) - (3 if text.endswith(REPLACEMENT) else 0))
        piece, held = text[self._returned : end], len(text) - end
        self._window, self._context = self._window[-CONTEXT:], 0
        self._returned = max(0, len(self._decode()) - held)
        return piece
