"""Find the tokens that a chat template puts around a user's and an assistant's messages."""

from dataclasses import dataclass
from typing import Any, Final

QUESTION: Final = "draftproof-question"
ANSWER: Final = "draftproof-answer"
FOLLOWING: Final = "draftproof-following"
"""Messages that no template contains: whatever surrounds them in a rendered chat belongs to the template."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The template's tokens: before the first user message, from user to assistant, and from assistant to user.

    The first token of a change of turns ends a message; the target generates it itself. A target without a chat
    template has no turns: its texts begin with `opening` and continue to their full length.
    """

    opening: tuple[int, ...]
    to_assistant: tuple[int, ...] = ()
    to_user: tuple[int, ...] = ()

    @property
    def is_chat(self) -> bool:
        return bool(self.to_assistant and self.to_user)


def turns_of(tokenizer: Any) -> Turns:
    """Return the turn tokens of the tokenizer's chat template, or the opening tokens of plain text."""
    if not tokenizer.chat_template:
        return Turns(tuple(tokenizer.encode("")))
    single_turn = _rendered(tokenizer, [("user", QUESTION)], generation_prompt=True)
    opening, to_assistant = _around(single_turn, QUESTION)
    conversation = [("user", QUESTION), ("assistant", ANSWER), ("user", FOLLOWING)]
    _, after_answer = _around(_rendered(tokenizer, conversation, generation_prompt=False), ANSWER)
    to_user, _ = _around(after_answer, FOLLOWING)
    parts = (opening, to_assistant, to_user)
    return Turns(*(tuple(tokenizer.encode(part, add_special_tokens=False)) for part in parts))


def _rendered(tokenizer: Any, turns: list[tuple[str, str]], *, generation_prompt: bool) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    return text


def _around(text: str, message: str) -> tuple[str, str]:
    """Return the text before and after a message."""
    before, found, after = text.partition(message)
    if not found:
        raise ValueError(
            f"the chat template leaves out a message ({message!r} is not in {text!r}): conversations cannot be "
            "generated with it. Clear tokenizer.chat_template to train on plain texts"
        )
    return before, after
