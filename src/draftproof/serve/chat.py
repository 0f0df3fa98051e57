"""Answer `POST /v1/chat/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from draftproof.engine.request import Chunk
from draftproof.serve.answer import Answer, Arrival
from draftproof.serve.errors import ApiError
from draftproof.serve.logprobs import chat_logprobs
from draftproof.serve.prompts import chat_tokens, template_of
from draftproof.serve.protocol import ChatBody
from draftproof.serve.state import State
from draftproof.serve.submit import check_model, response_grammar, submit_all
from draftproof.serve.texts import Text
from draftproof.serve.tools import CallParser, Piece, ToolUse, new_call_id, tool_use


def prepare_chat(state: State, body: ChatBody, arrival: Arrival) -> "ChatAnswer":
    """Read a chat and submit its texts."""
    body.refuse_unknown()
    check_model(body.model, state)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    use = tool_use(body, template_of(state))
    allowed = response_grammar(body, state)
    if use is not None:
        if allowed is not None:
            message = 'tools and a response_format exclude each other: set tool_choice to "none" for JSON'
            raise ApiError(400, message, param="response_format")
        allowed = use.grammar(state.engine)
    tokens = chat_tokens(
        state,
        body.messages,
        body.tools or () if body.tool_choice != "none" else (),
        continue_final=bool(body.continue_final_message),
        open_answer=body.add_generation_prompt,
        template_options=body.chat_template_kwargs,
    )
    options: dict[str, Any] = {"allowed": allowed}
    if body.logprobs:
        state.token_texts.load()
        options["logprobs"] = min(body.top_logprobs or 0, state.engine.model.vocab_size)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return ChatAnswer(state, body, submit_all(state, body, [tokens], limit, options, arrival.at), arrival, use)


class ChatAnswer(Answer):
    """The choices of a chat: messages, with calls of tools."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    body: ChatBody

    def __init__(
        self, state: State, body: ChatBody, texts: Sequence[Text], arrival: Arrival, use: ToolUse | None
    ) -> None:
        super().__init__(state, body, texts, arrival)
        self._use = use
        self._parsers: dict[int, CallParser] = {} if use is None else {text.index: use.parser() for text in texts}
        self._opened: set[int] = set()

    def extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.texts[0].stream.prompt)} if self.body.return_token_ids else {}

    def choice(self, text: Text) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text.text, "refusal": None}
        if self._use is not None:
            parser = self._parsers[text.index]
            content, calls = _message([*parser.feed(text.text), *parser.flush()])
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = calls
        choice = {
            "index": text.index,
            "message": message,
            "logprobs": chat_logprobs(text.logprobs, self.state.token_texts) if self.body.logprobs else None,
            "finish_reason": self._reason(text),
        }
        return choice | ({"token_ids": text.tokens} if self.body.return_token_ids else {}) | self.rounds(text)

    def deltas(self, text: Text, chunk: Chunk) -> Iterator[dict[str, Any]]:
        if text.index not in self._opened:
            self._opened.add(text.index)
            yield self._delta(text, {"role": "assistant", "content": ""})
        more: dict[str, Any] = {}
        if self.body.logprobs and chunk.logprobs:
            more["logprobs"] = chat_logprobs(chunk.logprobs, self.state.token_texts)
        if self.body.return_token_ids and chunk.tokens:
            more["token_ids"] = chunk.tokens
        for delta in self._parts(text, chunk):
            yield self._delta(text, delta) | more
            more = {}
        if more:
            yield self._delta(text, {"content": ""}) | more

    def closing(self, text: Text) -> dict[str, Any]:
        return self._delta(text, {}) | {"finish_reason": self._reason(text)}

    def _parts(self, text: Text, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the deltas of a chunk's text: content, or parts of calls."""
        if self._use is None:
            return [{"content": chunk.text}] if chunk.text else []
        parser = self._parsers[text.index]
        pieces = parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            pieces += parser.flush()
        return [_piece_delta(piece) for piece in pieces]

    def _reason(self, text: Text) -> str | None:
        has_calls = self._use is not None and self._parsers[text.index].calls > 0
        return "tool_calls" if has_calls and text.finish_reason == "stop" else text.finish_reason

    def _delta(self, text: Text, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": text.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _piece_delta(piece: Piece) -> dict[str, Any]:
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "name":
        function = {"name": piece.text, "arguments": ""}
        return {"tool_calls": [{"index": piece.call, "id": new_call_id(), "type": "function", "function": function}]}
    return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}


def _message(pieces: Sequence[Piece]) -> tuple[str, list[dict[str, Any]]]:
    """Return the content of a message and its calls."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == "name":
            function = {"name": piece.text, "arguments": ""}
            calls.append({"id": new_call_id(), "type": "function", "function": function})
        elif piece.kind == "arguments":
            calls[piece.call]["function"]["arguments"] += piece.text
    return "".join(piece.text for piece in pieces if piece.kind == "content"), calls
