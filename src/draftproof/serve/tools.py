"""Let a model call tools: a grammar of their schemas, which every call fits, and a parser of the calls in a stream.

The form of a call is the model's own, as far as its chat template shows it: Hermes' (also Qwen's and many others') or
Llama 3's. A model whose template does not know tools is told of them in a system message, in Hermes' form.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from draftproof.engine.engine import Engine
from draftproof.engine.request import Allowed
from draftproof.engine.stop import overlap
from draftproof.integrations import llguidance
from draftproof.serve.errors import ApiError
from draftproof.serve.protocol import ChatBody, NamedTool, Tool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call: `trigger`, the rest of `begin`, the name, `middle`, the arguments as JSON, `end`."""

    trigger: str
    begin: str
    middle: str
    end: str


HERMES: Final = CallFormat("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
LLAMA: Final = CallFormat('{"name": "', '{"name": "', '", "parameters": ', "}")


def format_of(template: str) -> CallFormat:
    """Return the form of calls that a chat template shows."""
    return LLAMA if "<|python_tag|>" in template and HERMES.trigger not in template else HERMES


# --------------------------------------------------------------------------------------------------------- the request


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request may call.

    required  whether the answer consists of calls; otherwise the model chooses between text and calls
    several   whether there may be more than one call
    """

    tools: tuple[Tool, ...]
    required: bool
    several: bool
    format: CallFormat

    def parser(self) -> "CallParser":
        return CallParser(self.format, only_calls=self.required)

    def grammar(self, engine: Engine) -> Allowed:
        """Return the grammar of answers: calls that fit the tools' schemas, and text if they are not required."""
        try:
            return llguidance.lark(self._lark(), engine)
        except ValueError as error:
            raise ApiError(400, f"tools: {error}", param="tools") from error

    def _lark(self) -> str:
        form, names = self.format, [f"call_{i}" for i in range(len(self.tools))]
        lines = ["%llguidance {}"]
        if self.required:
            more = '("\\n" call)*' if self.several else ""
            lines += [f"start: call {more}", f"call: {json.dumps(form.trigger)} body"]
        else:
            lines += [
                "start: (triggered body)* TEXT" if self.several else "start: TEXT | triggered body",
                f"triggered[lazy]: TEXT {json.dumps(form.trigger)}",
                r"TEXT: /(.|\n)*/",
            ]
        lines.append(f"body: {' | '.join(names)}")
        for name, tool in zip(names, self.tools, strict=True):
            head = form.begin.removeprefix(form.trigger) + tool.function.name + form.middle
            schema = {"type": "object", **(tool.function.parameters or {})}
            if schema["type"] != "object":
                message = f"tools: the parameters of {tool.function.name} must be an object; got {schema['type']!r}"
                raise ApiError(400, message, param="tools")
            lines += [
                f"{name}: {json.dumps(head)} {name}_arguments {json.dumps(form.end)}",
                f"{name}_arguments: %json {json.dumps(llguidance.with_limited_whitespace(schema))}",
            ]
        return "\n".join(lines) + "\n"


def tool_use(body: ChatBody, template: str) -> ToolUse | None:
    """Return which tools a chat may call; None: none of them."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            message = f"tool_choice names {choice.function.name!r}, which is not among the tools"
            raise ApiError(400, message, param="tool_choice")
        return ToolUse(tuple(chosen[:1]), True, False, format_of(template))
    if not tools:
        if choice == "required":
            raise ApiError(400, 'tool_choice is "required", but there are no tools', param="tool_choice")
        return None
    if choice == "none":
        return None
    several = body.parallel_tool_calls is not False
    return ToolUse(tuple(tools), choice == "required", several, format_of(template))


# ----------------------------------------------------------------------------------------------------------- the prompt

PREAMBLE: Final = """You can call functions. These are their signatures, one JSON object per line:
<tools>
{signatures}
</tools>

To call a function, answer with its name and its arguments as JSON between <tool_call> tags:
<tool_call>
{{"name": "function-name", "arguments": {{…}}}}
</tool_call>"""
"""Says how tools are called, for templates that do not."""


def describe_in_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return a chat that describes tools, earlier calls and their results in plain messages."""
    signatures = "\n".join(json.dumps(as_dict(tool)["function"], ensure_ascii=False) for tool in tools)
    preamble = PREAMBLE.format(signatures=signatures)
    told = [_plain(message) for message in messages]
    if told and told[0]["role"] == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{preamble}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": preamble}, *told]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls") or []
    texts = [message.get("content") or ""] if message.get("content") else []
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        texts.append(f"{HERMES.begin}{function['name']}{HERMES.middle}{arguments}{HERMES.end}")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}


def as_dict(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)


# ----------------------------------------------------------------------------------------------------------- the answer


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: text of the message, or a call's name or arguments, where `call` numbers the calls."""

    kind: Literal["content", "name", "arguments"]
    text: str
    call: int = 0


@dataclass(slots=True)
class CallParser:
    """An incremental parser of an answer's text. White space between calls is dropped.

    only_calls  whether there can be no text: what looks like it is the beginning of a call that was cut
    """

    format: CallFormat
    only_calls: bool = False
    calls: int = 0
    _buffer: str = ""
    _reads: Callable[[], list[Piece] | None] | None = None
    _arguments: "JsonEnd" = field(default_factory=lambda: JsonEnd())

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that this text completes."""
        self._buffer += text
        pieces: list[Piece] = []
        while (found := (self._reads or self._read_text)()) is not None:
            pieces += found
        return [piece for piece in pieces if piece.text]

    def flush(self) -> list[Piece]:
        """Return the rest after the end of the text."""
        rest, self._buffer = self._buffer, ""
        is_text = (self._reads or self._read_text) == self._read_text and not self.only_calls
        if not is_text or (self.calls and not rest.strip()):
            return []
        return [Piece("content", rest)] if rest else []

    def _read_text(self) -> list[Piece] | None:
        before, begin, after = self._buffer.partition(self.format.begin)
        if begin:
            self._buffer, self._reads = after, self._read_name
            self.calls += 1
            is_gap = self.calls > 1 and not before.strip()
            return [] if is_gap else [Piece("content", before)]
        held = overlap(self._buffer, self.format.begin)
        space = len(self._buffer) - held
        safe = self._buffer[:space]
        if not safe or (self.calls and not safe.strip()):
            return None
        self._buffer = self._buffer[space:]
        return [Piece("content", safe)]

    def _read_name(self) -> list[Piece] | None:
        name, middle, after = self._buffer.partition(self.format.middle)
        if not middle:
            return None
        self._buffer, self._reads, self._arguments = after, self._read_arguments, JsonEnd()
        return [Piece("name", name, self.calls - 1)]

    def _read_arguments(self) -> list[Piece] | None:
        if not self._buffer:
            return None
        end = self._arguments.feed(self._buffer)
        if end is None:
            text, self._buffer = self._buffer, ""
        else:
            text, self._buffer, self._reads = self._buffer[:end], self._buffer[end:], self._read_end
        return [Piece("arguments", text, self.calls - 1)]

    def _read_end(self) -> list[Piece] | None:
        if len(self._buffer) < len(self.format.end):
            return None
        self._buffer, self._reads = self._buffer.removeprefix(self.format.end), self._read_text
        return []


class JsonEnd:
    """Finds where a JSON object ends, fed piece by piece."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> int | None:
        """Return how many characters of this piece belong to the object; None if it goes on after them."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
