"""Answer `POST /v1/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from draftproof.engine.request import Chunk
from draftproof.serve.answer import Answer, Arrival
from draftproof.serve.logprobs import completion_logprobs
from draftproof.serve.prompts import decode, prompt_tokens
from draftproof.serve.protocol import CompletionBody
from draftproof.serve.state import State
from draftproof.serve.submit import check_model, response_grammar, submit_all
from draftproof.serve.texts import Text

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default of `max_tokens` for text completions."""


def prepare_completion(state: State, body: CompletionBody, arrival: Arrival) -> "CompletionAnswer":
    """Read the prompts and submit their texts."""
    body.refuse_unknown()
    check_model(body.model, state)
    prompts = prompt_tokens(state, body.prompt)
    options: dict[str, Any] = {"allowed": response_grammar(body, state)}
    if body.logprobs is not None:
        options["logprobs"] = min(body.logprobs, state.engine.model.vocab_size)
        if body.echo:
            options["prompt_logprobs"] = options["logprobs"]
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return CompletionAnswer(state, body, submit_all(state, body, prompts, limit, options, arrival.at), arrival)


class CompletionAnswer(Answer):
    """The choices of a text completion."""

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    body: CompletionBody

    def __init__(self, state: State, body: CompletionBody, texts: Sequence[Text], arrival: Arrival) -> None:
        super().__init__(state, body, texts, arrival)
        self._echoed = {text.index: self._prompt_text(text) if body.echo else "" for text in texts}
        self._opened: set[int] = set()
        self._offsets = {text.index: len(self._echoed[text.index]) for text in texts}

    def choice(self, text: Text) -> dict[str, Any]:
        choice = {
            "index": text.index,
            "text": self._echoed[text.index] + text.text,
            "logprobs": self._whole_logprobs(text),
            "finish_reason": text.finish_reason,
        }
        return choice | self._token_ids(text, text.tokens, is_first=True) | self.rounds(text)

    def deltas(self, text: Text, chunk: Chunk) -> Iterator[dict[str, Any]]:
        is_first = text.index not in self._opened
        self._opened.add(text.index)
        if is_first and self.body.echo:
            echoed = self._delta(text, self._echoed[text.index])
            if self.body.logprobs is not None:
                echoed["logprobs"] = self._prompt_logprobs(text)
            yield echoed
        choice = self._delta(text, chunk.text) | self._token_ids(text, chunk.tokens, is_first=is_first)
        if self.body.logprobs is not None and chunk.logprobs:
            offset = self._offsets[text.index]
            choice["logprobs"] = completion_logprobs(chunk.logprobs, self.state.token_texts, offset=offset)
            self._offsets[text.index] += sum(len(token) for token in choice["logprobs"]["tokens"])
        if chunk.text or choice["logprobs"] or self.body.return_token_ids:
            yield choice

    def closing(self, text: Text) -> dict[str, Any]:
        return self._delta(text, "") | {"finish_reason": text.finish_reason}

    def _prompt_text(self, text: Text) -> str:
        """Return the prompt as it was given: a text, or the text of token ids."""
        prompt: Any = self.body.prompt
        given = (
            prompt[text.prompt_index] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str) else prompt
        )
        return given if isinstance(given, str) else decode(self.state, text.stream.prompt)

    def _whole_logprobs(self, text: Text) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        if not self.body.echo:
            return completion_logprobs(text.logprobs, self.state.token_texts)
        entries = [*text.prompt_logprobs, *text.logprobs]
        return completion_logprobs(entries, self.state.token_texts, first=text.stream.prompt[0])

    def _prompt_logprobs(self, text: Text) -> dict[str, Any]:
        return completion_logprobs(text.prompt_logprobs, self.state.token_texts, first=text.stream.prompt[0])

    def _token_ids(self, text: Text, tokens: list[int], *, is_first: bool) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": tokens} | ({"prompt_token_ids": list(text.stream.prompt)} if is_first else {})

    def _delta(self, text: Text, added: str) -> dict[str, Any]:
        return {"index": text.index, "text": added, "logprobs": None, "finish_reason": None}
