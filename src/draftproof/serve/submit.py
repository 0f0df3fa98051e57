"""Submit the texts that a body asks for to the engine: sampling, limits, grammar, and a seed for each."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from draftproof.core.sampling import SamplingParams
from draftproof.engine.request import Allowed
from draftproof.integrations import llguidance
from draftproof.serve.errors import ApiError, as_api_error
from draftproof.serve.prompts import check_vocabulary
from draftproof.serve.protocol import MOST_CHOICES, MOST_STOPS, GenerationBody
from draftproof.serve.state import State
from draftproof.serve.texts import Text, cancel_all

SAMPLING: Final = tuple(f.name for f in fields(SamplingParams) if f.name != "logit_bias")
"""Fields of a body that are fields of `SamplingParams`, under the same names."""

UNLIMITED: Final = 4096
"""Tokens of an answer that has no limit, from a model without one."""


def sampling_of(body: GenerationBody, state: State) -> SamplingParams:
    """Return a request's sampling: the given fields, else the model's own."""
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if given.get("top_k") in (-1, 0):  # off, as in vLLM and transformers
        given["top_k"] = None
    if body.logit_bias:
        given["logit_bias"] = {_token_id(name): value for name, value in body.logit_bias.items()}
        check_vocabulary(state, given["logit_bias"], "logit_bias")
    return replace(state.default_sampling, **given)


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise ApiError(400, f"logit_bias maps token ids to numbers; got the key {name!r}", param="logit_bias")
    return int(name)


def common_options(body: GenerationBody, state: State) -> dict[str, Any]:
    """Return the keywords of `Service.submit` that do not depend on the endpoint."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop has {len(stops)} strings; at most {MOST_STOPS} are taken", param="stop")
    if "" in stops:
        raise ApiError(400, "stop has an empty string, which would end every text at once", param="stop")
    check_vocabulary(state, body.stop_token_ids or (), "stop_token_ids")
    return {
        "stop": stops,
        "stop_token_ids": body.stop_token_ids or (),
        "ignore_eos": bool(body.ignore_eos),
        "min_tokens": body.min_tokens or 0,
        "rule": body.rule,
        "drafter": body.drafter not in (False, "off"),
        "num_draft_tokens": body.num_draft_tokens,
    }


def response_grammar(body: GenerationBody, state: State) -> Allowed | None:
    """Return the grammar of a `response_format`; None for plain text."""
    wanted = body.response_format or {"type": "text"}
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        named = wanted.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if schema is not True and not isinstance(schema, Mapping):
            message = "response_format of type json_schema needs json_schema.schema, a JSON schema"
            raise ApiError(400, message, param="response_format")
    else:
        message = f"response_format.type must be text, json_object or json_schema; got {kind!r}"
        raise ApiError(400, message, param="response_format")
    try:
        return llguidance.json_schema({} if schema is True else schema, state.engine)
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"response_format: {error}", param="response_format") from error


def check_model(body_model: str | None, state: State) -> None:
    """Refuse a request for another model."""
    if body_model not in (None, "", state.settings.name):
        message = f"the model {body_model!r} is not served here; this server has {state.settings.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def submit_all(
    state: State,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    options: Mapping[str, Any],
    arrived: float,
) -> list[Text]:
    """Submit `n` texts for each prompt, or none of them: where one is refused, the others are cancelled.

    The i-th text of a prompt has the seed plus i, if there is one, as in vLLM.
    """
    n, texts = body.n or 1, list[Text]()
    most = min(MOST_CHOICES, state.settings.max_queue)
    if n * len(prompts) > most:
        message = f"the request asks for {n * len(prompts)} texts; this server takes at most {most} at once"
        raise ApiError(400, message, param="n" if n > 1 else body.prompt_field)
    sampling = sampling_of(body, state)
    all_options = {**common_options(body, state), **options}
    constrained = all_options.get("allowed") is not None or all_options["min_tokens"] > 0
    try:
        for at, prompt in enumerate(prompts):
            check_vocabulary(state, prompt, body.prompt_field)
            budget = _budget(state, len(prompt), max_tokens, body.prompt_field)
            for i in range(n):
                seed = None if sampling.seed is None else _wrapped(sampling.seed + i)
                stream = state.service.submit(
                    list(prompt), replace(sampling, seed=seed), max_tokens=budget, **all_options
                )
                texts.append(Text(len(texts), at, stream, arrived, constrained))
    except Exception as error:
        cancel_all(texts)
        raise as_api_error(error) from error
    return texts


def _budget(state: State, prompt: int, asked: int | None, prompt_field: str) -> int:
    """Return how many tokens a text may have, or refuse its prompt as too long."""
    limit = state.max_length
    limits = (state.settings.max_prompt, None if limit is None else limit - 1)
    longest = min((n for n in limits if n is not None), default=prompt)
    if prompt > longest:
        message = f"the prompt has {prompt} tokens; this server takes at most {longest}"
        raise ApiError(400, message, param=prompt_field, code="context_length_exceeded")
    if limit is None:
        return UNLIMITED if asked is None else asked
    return limit - prompt if asked is None else min(asked, limit - prompt)


def _wrapped(seed: int) -> int:
    """Return a seed of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
