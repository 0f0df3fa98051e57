"""Turn messages and prompts into tokens: chat templates, text parts, token ids."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from draftproof.models.tokenizer import encode
from draftproof.serve.errors import ApiError
from draftproof.serve.protocol import Message, Tool
from draftproof.serve.state import State
from draftproof.serve.tools import as_dict, describe_in_messages

RESERVED: Final = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
})  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that `chat_template_kwargs` cannot set."""


def template_of(state: State) -> str:
    """Return the chat template's source; of several by name, all of them. Refuse where there is none."""
    template = state.settings.chat_template or state.tokenizer.chat_template
    if not template:
        message = "this model has no chat template: use /v1/completions, or start the server with --chat-template"
        raise ApiError(400, message, param="messages")
    return template if isinstance(template, str) else "\n".join(template.values())


def chat_tokens(
    state: State,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    continue_final: bool = False,
    open_answer: bool | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens of a chat, by the model's template.

    continue_final    the answer continues the last message
    open_answer       the template opens the assistant's turn; None: unless the last message is continued
    template_options  variables of the template
    """
    template, options = template_of(state), dict(template_options or {})
    opens = not continue_final if open_answer is None else open_answer
    if opens and continue_final:
        message = "continue_final_message and add_generation_prompt exclude each other: give one of them"
        raise ApiError(400, message, param="continue_final_message")
    reserved = sorted(RESERVED & set(options))
    if reserved:
        raise ApiError(400, f"chat_template_kwargs cannot set {reserved[0]}", param="chat_template_kwargs")
    chat = [_message(message, at) for at, message in enumerate(messages)]
    try:
        if tools and "tools" not in template:
            chat, tools = describe_in_messages(chat, tools), ()
        tokens = state.tokenizer.apply_chat_template(
            chat,
            tools=[as_dict(tool) for tool in tools] or None,
            chat_template=state.settings.chat_template,
            add_generation_prompt=opens,
            continue_final_message=continue_final,
            return_dict=False,
            **options,
        )
    except Exception as error:  # a template may raise anything, by design or because a message is not as it expects
        message = f"the chat template refuses these messages: {type(error).__name__}: {error}"
        raise ApiError(400, message, param="messages") from error
    return _begun(state, list(tokens), "messages")


def _message(message: Message, at: int) -> dict[str, Any]:
    """Return a message as templates expect it: content as one text, arguments of calls as objects."""
    given = message.model_dump(exclude_none=True)
    given["content"] = _content(message.content, at)
    if given["role"] == "developer":  # OpenAI's newer word, which templates do not know
        given["role"] = "system"
    if message.tool_calls:
        given["tool_calls"] = [
            _call(call, f"messages[{at}].tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return given


def _content(content: str | list[dict[str, Any]] | None, at: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.get("type") not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
            message = f"messages[{at}].content[{i}] is {part.get('type')!r}: only parts of text are supported"
            raise ApiError(400, message, param="messages")
        texts.append(part[part["type"]])
    return "\n".join(texts)


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{place} must have a function with a name", param="messages")
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{place}: the arguments are not JSON: {error}", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def prompt_tokens(state: State, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
    """Return the tokens of one prompt or several, each a text or token ids."""
    is_many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts: Sequence[Any] = prompt if isinstance(prompt, list) and is_many else [prompt]
    return [_begun(state, encode(each, state.tokenizer, chat=False), "prompt") for each in prompts]


def _begun(state: State, tokens: list[int], field: str) -> list[int]:
    """Return the tokens of a prompt; of an empty one, the token that begins texts."""
    begin = state.tokenizer.bos_token_id
    if not tokens and begin is None:
        raise ApiError(400, "the prompt is empty, and the model has no token to begin a text with", param=field)
    return tokens or [begin]


def decode(state: State, tokens: Sequence[int]) -> str:
    """Return the text of tokens, special ones included."""
    check_vocabulary(state, tokens, "tokens")
    text: str = state.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def check_vocabulary(state: State, tokens: Iterable[int], field: str) -> None:
    """Refuse tokens of a field that the model does not have."""
    size = state.engine.model.vocab_size
    outside = next((token for token in tokens if token >= size), None)
    if outside is not None:
        raise ApiError(400, f"{field}: token {outside} is outside the vocabulary [0, {size})", param=field)
