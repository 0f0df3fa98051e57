"""Read off a chat template which tokens surround a user's and an assistant's words."""

from dataclasses import dataclass
from typing import Any, Final

QUESTION: Final = "draftproof-question"

ANSWER: Final = "draftproof-answer"

FOLLOWING: Final = "draftproof-following"
"""Words that no template contains: what stands between them in a rendered chat is the template's own."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The tokens up to a user's first word, from a user's last word to the assistant's first, and back.

    The first token of a change of turns is how the speaker ends; the target draws it by itself. A target without a
    chat template has no turns: its texts begin with `opening` and go on.
    """

    opening: tuple[int, ...]
    to_assistant: tuple[int, ...] = ()
    to_user: tuple[int, ...] = ()

    @property
    def is_chat(self) -> bool:
        return bool(self.to_assistant and self.to_user)


def turns_of(tokenizer: Any) -> Turns:
    """Read off the tokenizer's chat template, or what its plain texts begin with."""
    if not tokenizer.chat_template:
        return Turns(tuple(tokenizer.encode("")))
    asked = _rendered(tokenizer, [("user", QUESTION)], features=True)
    opening, to_assistant = _between(asked, QUESTION)
    talk = _rendered(tokenizer, [("user", QUESTION), ("assistant", ANSWER), ("user", FOLLOWING)], features=False)
    _, behind_answer = _between(talk, ANSWER)
    to_user, _ = _between(behind_answer, FOLLOWING)
    parts = (opening, to_assistant, to_user)
    return Turns(*(tuple(tokenizer.encode(part, add_special_tokens=False)) for part in parts))


def _rendered(tokenizer: Any, said: list[tuple[str, str]], *, features: bool) -> str:
    messages = [{"role": role, "content": content} for role, content in said]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=features)
    return text


def _between(text: str, word: str) -> tuple[str, str]:
    before, found, after = text.partition(word)
    if not found:
        raise ValueError(
            f"the chat template leaves out what was said ({word!r} is not in {text!r}): its conversations cannot be "
            "made. Clear tokenizer.chat_template to train on plain texts"
        )
    return before, after
