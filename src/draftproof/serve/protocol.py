"""Define the bodies of requests: OpenAI's fields, those that vLLM adds, and our own.

A field that is not listed here is refused by its name, unless it cannot change the text (`IGNORED`).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from draftproof.serve.errors import ApiError

IGNORED: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "request_id", "priority",
})  # fmt: skip
"""Fields of other servers that do not change the text; they are accepted and have no effect."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (-1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Fields that are not supported, with the values that ask for nothing."""

MOST_CHOICES: Final = 128
"""Texts that one request may ask for, as OpenAI's `n`."""

MOST_DRAFT_TOKENS: Final = 64
"""Draft tokens that a request may ask for in a round: more cannot pay, and would take memory for all."""

MOST_ALTERNATIVES: Final = 20
"""Alternatives with each log-probability, as OpenAI's `top_logprobs`."""

LARGEST_WEIGHT: Final = 1e6
"""Largest amount that penalties and biases add to a logit: far more than logits differ by, and finite in any format."""

MOST_STOPS: Final = 32
"""Stop strings of a request: each is looked for after every token."""

MOST_BIASES: Final = 1024
"""Tokens that a request may bias: they are checked again for each of its texts."""


def described(form: str) -> WrapValidator:
    """Describe what a field of several types may be: pydantic would report each type as a field of its own."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("form", "Input should be {form}", {"form": form}) from error

    return WrapValidator(validate)


Weight = Annotated[float, Field(ge=-LARGEST_WEIGHT, le=LARGEST_WEIGHT)]
Count = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """A body whose unknown fields are kept, so that they can be refused by name."""

    model_config = ConfigDict(strict=True, extra="allow")

    def refuse_unknown(self) -> None:
        """Refuse fields that would change the text and that are not supported."""
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or value is None or value in NEUTRAL.get(name, ()):
                continue
            raise ApiError(400, f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and text completions have in common."""

    prompt_field: ClassVar[str]
    """The field that holds the prompt."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Annotated[str | list[str] | None, described("a string or a list of strings")] = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Weight | None = None
    frequency_penalty: Weight | None = None
    logit_bias: Annotated[dict[str, Weight], Field(max_length=MOST_BIASES)] | None = None
    response_format: dict[str, Any] | None = None
    # as vLLM names them
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1 / LARGEST_WEIGHT, le=LARGEST_WEIGHT)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    return_token_ids: bool | None = None
    # ours
    num_draft_tokens: Annotated[
        Annotated[int, Field(ge=0, le=MOST_DRAFT_TOKENS)] | Literal["auto"] | None,
        described(f'a whole number from 0 to {MOST_DRAFT_TOKENS}, or "auto"'),
    ] = None
    rule: Literal["block", "token", "coupled", "tree"] | None = None
    drafter: Annotated[bool | Literal["on", "off"] | None, described('true, false, "on" or "off"')] = None
    draftproof_trace: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Message(BaseModel):
    """A message of a chat. Fields that only a template knows are passed on to it."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[str | list[dict[str, Any]] | None, described("a string or a list of text parts")] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.\-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        described('"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    # as vLLM names them
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: Annotated[
        str | list[TokenId] | list[str] | list[list[TokenId]], described("a string, token ids ≥ 0, or a list of either")
    ]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    """The body of `POST /tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
