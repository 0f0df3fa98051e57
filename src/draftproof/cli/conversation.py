"""A conversation and its settings: what was said, how the next answer is made, and both kept in a file."""

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftproof.cli.engines import Engines
from draftproof.cli.generate import Answer, streamed
from draftproof.cli.options import Choice
from draftproof.explain.recorder import Recorder

Message = dict[str, str]


@dataclass(slots=True)
class Settings:
    """How answers are made and shown."""

    choice: Choice
    sampling: dict[str, Any]
    max_tokens: int
    compare: bool = False
    rounds: bool = False


@dataclass(slots=True)
class Conversation:
    settings: Settings
    messages: list[Message] = field(default_factory=list)
    engines: Engines = field(default_factory=Engines)

    @property
    def options(self) -> dict[str, Any]:
        return {**self.settings.sampling, "max_tokens": self.settings.max_tokens}

    def prompt(self, text: str) -> Any:
        """The text behind what was said so far. A model without a chat template continues it, alone."""
        tokenizer = self.engines.of(self.settings.choice).tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            return text
        return [*self.messages, {"role": "user", "content": text}]

    def say(self, text: str, into: Answer, recorder: Recorder | None = None) -> Generator[str, None, None]:
        """The answer as it comes. What was said until then stays in the conversation, also after an interrupt."""
        engine = self.engines.of(self.settings.choice, recorder)
        try:
            yield from streamed(engine, self.prompt(text), self.options, into)
        finally:
            self.note(text, into.text)

    def note(self, text: str, answer: str) -> None:
        """Remember a turn. An answer of nothing is none: most templates want turns to alternate."""
        if answer:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    @property
    def last_prompt(self) -> str | None:
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), None)

    def save(self, path: Path) -> None:
        kept = {"settings": asdict(self.settings), "messages": self.messages}
        path.write_text(json.dumps(kept, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def restored(path: Path) -> Conversation:
    """A conversation as `save` wrote it."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        settings = dict(kept["settings"])
        choice = Choice(**settings.pop("choice"))
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in kept["messages"]]
        return Conversation(Settings(choice, **settings), messages)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a conversation that /save wrote ({type(error).__name__}: {error})") from None
