"""A chat's state: its messages and settings, and how both are saved to a file and loaded again."""

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.cli.engines import Engines, sampling_for
from draftproof.cli.generate import Answer, stream_answer
from draftproof.cli.options import Choice

if TYPE_CHECKING:
    from draftproof.core.sampling import SamplingParams
    from draftproof.explain.recorder import Recorder

Message = dict[str, str]
"""A chat message with "role" and "content"."""


@dataclass(slots=True)
class Settings:
    """How answers are generated and shown.

    `sampling` holds the fields that were set; the others are the model's own. `compare` runs several drafters; `rounds`
    lists each answer's rounds.
    """

    choice: Choice
    sampling: dict[str, Any]
    max_tokens: int
    compare: bool = False
    rounds: bool = False


@dataclass(slots=True)
class Conversation:
    """A chat in progress: its settings, its messages and the engines that are loaded."""

    settings: Settings
    messages: list[Message] = field(default_factory=list)
    engines: Engines = field(default_factory=Engines)

    @property
    def sampling(self) -> "SamplingParams":
        """Return the sampling parameters in use: what was set, else the model's own."""
        return sampling_for(self.engines.get(self.settings.choice), self.settings.sampling)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `Engine.stream` for an answer."""
        return {"sampling": self.sampling, "max_tokens": self.settings.max_tokens}

    def prompt(self, text: str) -> Any:
        """Return the messages so far and this text; only the text if the model has no chat template."""
        tokenizer = self.engines.get(self.settings.choice).tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            return text
        return [*self.messages, {"role": "user", "content": text}]

    def say(self, text: str, into: Answer, recorder: "Recorder | None" = None) -> Generator[str, None, None]:
        """Stream the answer to a text and add both to the messages, also when it is interrupted."""
        engine = self.engines.get(self.settings.choice, recorder)
        try:
            yield from stream_answer(engine, self.prompt(text), self.arguments, into)
        finally:
            self.note(text, into.text)

    def note(self, text: str, answer: str) -> None:
        """Add a turn to the messages unless the answer is empty: most chat templates want roles to alternate."""
        if answer:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        """Write settings and messages as JSON."""
        saved = {"settings": asdict(self.settings), "messages": self.messages}
        path.write_text(json.dumps(saved, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def load_conversation(path: Path) -> Conversation:
    """Read a conversation that `Conversation.save` wrote."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        settings = dict(saved["settings"])
        choice = Choice(**settings.pop("choice"))
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in saved["messages"]]
        return Conversation(Settings(choice, **settings), messages)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a conversation that /save wrote ({type(error).__name__}: {error})") from None
