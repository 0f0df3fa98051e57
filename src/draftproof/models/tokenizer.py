"""Prompts become tokens, and tokens become text as they arrive. Knows tokenizers, no models and no engines.

Three floors: `encode` for what goes in; `Detokenizer` turns tokens into whole characters; `TextStream` on top
of it finds stop strings, wherever the borders between tokens and rounds fall.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, Protocol, runtime_checkable

from torch import Tensor

OnePrompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Tensor
"""Text; or token ids; or a chat, messages with `role` and `content`. `encode` tells them apart."""

Prompt = OnePrompt | Sequence[Any]
"""One prompt, or a list of prompts. `each` tells them apart."""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are not, or not yet, a character."""

CONTEXT: Final = 8
"""Tokens that settle how the next one reads: its leading space, and the state of UTF-8 (3 bytes at most)."""

PENDING: Final = 16
"""Tokens held back at most for a character that does not come: a growing window would cost n² in the end."""


@runtime_checkable
class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers have it."""

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


def encode(prompt: Prompt, tokenizer: Tokenizer, *, chat: bool | None = None) -> list[int]:
    """The tokens of one prompt, ready to be continued.

    Messages go through the tokenizer's chat template. If the last one is the assistant's, it is continued;
    otherwise the template opens the assistant's turn. Token ids are taken as they are.

    `chat` is for a plain string: True makes it a user's turn, False leaves it as raw text to be completed,
    behind the tokenizer's own opening tokens. None, the default, makes it a turn if the tokenizer has a chat
    template: an instruct model given raw text rambles.
    """
    if isinstance(prompt, str):
        if chat or (chat is None and tokenizer.chat_template):
            return _templated([{"role": "user", "content": prompt}], tokenizer)
        return tokenizer.encode(prompt)
    items = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if items and isinstance(items[0], Mapping):
        return _templated(items, tokenizer)
    return _checked(items)


def each(prompts: Prompt) -> tuple[list[Any], bool]:
    """The prompts one by one, and whether there was just one and not a list of them.

    An empty list is a list of no prompts; an empty prompt is "", or [] in a list. A matrix of token ids is
    taken by its rows, whole: padding is not told apart from tokens here.
    """
    if isinstance(prompts, str):
        return [prompts], True
    items = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts)
    is_one = bool(items) and isinstance(items[0], Integral | Mapping)
    return ([items] if is_one else items), is_one


def _templated(messages: list[Any], tokenizer: Tokenizer) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(
            "the prompt is a chat, but this tokenizer has no chat template; set tokenizer.chat_template, or "
            "give the prompt as a string with chat=False"
        )
    for at, message in enumerate(messages):
        if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
            raise ValueError(f"prompt[{at}] is {message!r}; a message of a chat has a 'role' and a 'content'")
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
            raise ValueError(
                f"prompt[{at}] is {token!r}; a prompt is a string, a list of messages or a list of token ids"
            )
    return [int(token) for token in items]


class Detokenizer:
    """Tokens in, whole characters out; all pieces together are `tokenizer.decode` of all tokens.

    Only a window is decoded, never the whole text: the tokens of the last piece, which settle how the
    following ones read, and those held back since because their bytes end inside a character. `flush` gives
    what is left; bytes that never became a character come out as U+FFFD there, as `decode` has them.

    With `after`, the text continues these tokens instead of standing alone: where a SentencePiece tokenizer
    would drop the space in front of the first word, it is kept.

    The one exception to the first sentence: where a tokenizer takes back a character that was complete (byte
    fallback, when invalid bytes follow in the same run), what was given out stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items() if skip_special else ()
        self._skipped = frozenset(token for token, what in added if what.special)
        self._window = [token for token in after if token not in self._skipped][-CONTEXT:]
        self._read = len(self._window)  # tokens of the window that are out already, here only as context
        self._given = len(self._decode().rstrip(REPLACEMENT))  # characters of the window's text that are out

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode()
        if len(text) > self._given and not text.endswith(REPLACEMENT):
            return self._give(text)
        if len(self._window) - self._read > PENDING:
            return self._give_up_on(text)
        return ""

    def flush(self) -> str:
        """What was held back; after it, a new text may begin."""
        piece = self._decode()[self._given :]
        self._window, self._read, self._given = [], 0, 0
        return piece

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._given = len(self._decode())
        return piece

    def _give_up_on(self, text: str) -> str:
        """Let go of all but the last 3 bytes' worth, which may still become a character."""
        sure = max(self._given, len(text) - (3 if text.endswith(REPLACEMENT) else 0))
        piece, held = text[self._given : sure], len(text) - sure
        self._window, self._read = self._window[-CONTEXT:], 0
        self._given = max(0, len(self._decode()) - held)
        return piece


class TextStream:
    """Tokens in, text out that is safe to show: what may be the beginning of a stop string is held back.

    The text ends before the first stop string to be complete (of two that end together, before the longer).
    That is a property of the characters: it does not depend on how they fall into tokens, or tokens into
    rounds. `consumed` counts the tokens up to and including the one that completed it; what was fed after it
    is ignored.
    """

    def __init__(self, detokenizer: Detokenizer, stop: str | Sequence[str] | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = [stop] if isinstance(stop, str) else list(stop or ())
        if "" in self._stops:
            raise ValueError(f"stop={stop!r} contains an empty string, which would end every text at once; remove it")
        self._held = ""
        self.consumed = 0
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that these tokens make safe to show."""
        pieces = []
        for token in tokens:
            if self.stopped is not None:
                break
            self.consumed += 1
            pieces.append(self._show(self._detokenizer.push(token)))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, when no more tokens come. A stop string may be found in it."""
        if self.stopped is not None:
            return ""
        piece = self._show(self._detokenizer.flush())
        held, self._held = self._held, ""
        return piece + held

    def _show(self, piece: str) -> str:
        text = self._held + piece
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.stopped = min(found)
            self._held = ""
            return text[: end - len(self.stopped)]
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
