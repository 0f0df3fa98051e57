"""Audit a server over HTTP: draftproof, vLLM, llama.cpp, or another that speaks OpenAI's completions API.

Every text is a request of its own. Its prompt is a list of token ids, and every sampling parameter is sent, so that no
default of the server counts. The answer must hold the ids that were emitted: text cannot be audited, because encoding
it again may give other tokens.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any, Final

from draftproof.auditor.decoders.vllm import refuse_other_order
from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

EXCERPT: Final = 400
"""Characters of a server's answer that an error message shows."""

BUSY: Final = (429, 503)
"""Statuses of a server that is full or still loading: the request is repeated."""

LONGEST_PAUSE: Final = 30.0
"""Seconds between two attempts, if the server does not say how long to wait."""

Fields = dict[str, Any]


def openai(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = 8,
    ends: Sequence[int] = (),
    timeout: float = 600.0,
) -> "Server":
    """Make a decoder of a server, such as "http://127.0.0.1:8000".

    model        the name under which the server has the model; needed if it serves several
    concurrency  requests at a time
    ends         the target's end-of-text tokens: a text that ended before `max_tokens` must end with one of them
    timeout      seconds for one text, waiting for a busy server included
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be a whole number ≥ 1; got {concurrency}")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url must begin with http:// or https://, as in http://127.0.0.1:8000; got {url!r}")
    base = url.rstrip("/").removesuffix("/v1")
    connection = _Connection(base, {"Authorization": f"Bearer {api_key}"} if api_key else {}, timeout)
    name, owner = _served_model(connection, model)
    return Server(connection, _api_of(owner, name), concurrency, tuple(ends), _description(base, name, owner))


@dataclass(frozen=True, slots=True)
class Server:
    """A decoder that sends one request for each text, `concurrency` of them at a time."""

    connection: "_Connection"
    api: "_Api"
    concurrency: int
    ends: tuple[int, ...]
    description: dict[str, str]
    name: str = "server"

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        """Continue each prompt; see `Decoder`."""
        self.api.check(sampling)
        with self.connection.client() as client, ThreadPoolExecutor(self.concurrency) as pool:

            def ask(prompt: Sequence[int], seed: int) -> Decoded:
                fields = {"prompt": list(prompt), "max_tokens": max_tokens, "seed": seed}
                answer = self.connection.call(client, self.api.path, fields | self.api.fields(sampling))
                return self._decoded(answer, max_tokens)

            return list(pool.map(ask, prompts, seeds))

    def _decoded(self, answer: Any, max_tokens: int) -> Decoded:
        try:
            tokens, rounds = self.api.tokens(answer)
        except (KeyError, TypeError, ValueError, IndexError):
            raise RuntimeError(
                f"{self.connection.base}{self.api.path} returned no token ids: {self.api.needed}. It returned "
                f"{str(answer)[:EXCERPT]}"
            ) from None
        if len(tokens) < max_tokens and self.ends and (not tokens or tokens[-1] not in self.ends):
            raise RuntimeError(
                f"{self.connection.base} ended a text after {len(tokens)} of {max_tokens} tokens, and the last is none "
                f"of the target's end-of-text tokens ({', '.join(map(str, self.ends))}): without the token that ended "
                "it, a text cannot be audited. If the server ends texts at other tokens on purpose, audit with ends=() "
                "(--ignore-eos)"
            )
        return Decoded(tokens, rounds)


@dataclass(frozen=True, slots=True)
class _Api:
    """How a server is asked: the endpoint, its names for sampling parameters, and where the answer has the tokens.

    check   refuses parameters that the server defines differently
    needed  what to say if there are no tokens in the answer
    """

    path: str
    fields: Callable[[SamplingParams], Fields]
    check: Callable[[SamplingParams], None]
    tokens: Callable[[Any], tuple[tuple[int, ...], tuple[Round, ...] | None]]
    needed: str


def _api_of(owner: str, model: str) -> _Api:
    """Choose by what the list of models says about its owner."""
    if owner == "llamacpp":
        return _Api("/completion", _llama_fields, _check_llama, _llama_tokens, 'it has no "tokens"')

    def fields(sampling: SamplingParams) -> Fields:
        trace = {"draftproof_trace": True} if owner == "draftproof" else {}
        return {"model": model, "return_token_ids": True} | trace | _fields(sampling)

    needed = (
        'it must answer "return_token_ids": true with choices[0].token_ids, as vLLM from 0.10.2 on and draftproof do'
    )
    check = refuse_other_order if owner == "vllm" else _accept
    return _Api("/v1/completions", fields, check, _choice_tokens, needed)


def _fields(sampling: SamplingParams) -> Fields:
    """Return all sampling parameters but the seed, under the names of OpenAI and vLLM."""
    fields: Fields = {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k or 0,
        "min_p": float(sampling.min_p),
        "repetition_penalty": float(sampling.repetition_penalty),
        "presence_penalty": float(sampling.presence_penalty),
        "frequency_penalty": float(sampling.frequency_penalty),
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): float(bias) for token, bias in sampling.logit_bias.items()}
    return fields


def _llama_fields(sampling: SamplingParams) -> Fields:
    """Return the fields of llama.cpp's own endpoint: OpenAI's does not return ids.

    By default llama.cpp divides by the temperature after all filters; `samplers` gives it the reference's order, and
    leaves out the samplers that have no counterpart.
    """
    fields = _fields(sampling)
    return fields | {
        "repeat_penalty": fields.pop("repetition_penalty"),
        "repeat_last_n": -1,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "mirostat": 0,
        "return_tokens": True,
    }


def _accept(sampling: SamplingParams) -> None:
    """Refuse nothing."""


def _check_llama(sampling: SamplingParams) -> None:
    """Refuse penalties that llama.cpp defines differently."""
    if sampling.presence_penalty or sampling.frequency_penalty:
        raise ValueError(
            f"presence_penalty={sampling.presence_penalty} and frequency_penalty={sampling.frequency_penalty} cannot "
            "be audited: llama.cpp counts the tokens of the prompt, too, the reference only those of the output"
        )


def _choice_tokens(answer: Any) -> tuple[tuple[int, ...], tuple[Round, ...] | None]:
    choice = answer["choices"][0]
    rounds = choice.get("draftproof", {}).get("rounds")
    known = None if rounds is None else tuple(Round(drafted, accepted) for drafted, accepted in rounds)
    return tuple(choice["token_ids"]), known


def _llama_tokens(answer: Any) -> tuple[tuple[int, ...], None]:
    return tuple(answer["tokens"]), None


def _served_model(connection: "_Connection", wanted: str | None) -> tuple[str, str]:
    """Return the name of the model and its owner ("vllm", "llamacpp", …), as the server lists them."""
    with connection.client() as client:
        listed = connection.call(client, "/v1/models")
    try:
        owners = {str(model["id"]): str(model.get("owned_by", "")) for model in listed["data"]}
    except (KeyError, TypeError, AttributeError):
        raise RuntimeError(f"{connection.base}/v1/models is no list of models: {str(listed)[:EXCERPT]}") from None
    if wanted is not None and wanted not in owners:
        raise ValueError(f"{connection.base} has no model {wanted!r}; it has {', '.join(owners) or 'none'}")
    if wanted is None and len(owners) != 1:
        raise ValueError(
            f"{connection.base} has {len(owners)} models ({', '.join(owners)}): name the one to audit with model= "
            "(--served-model-name)"
        )
    name = wanted or next(iter(owners))
    return name, owners[name]


def _description(base: str, name: str, owner: str) -> dict[str, str]:
    return {"url": base, "served model": name} | ({"served by": owner} if owner else {})


@dataclass(frozen=True, slots=True)
class _Connection:
    """Calls of one server, repeated while it is busy."""

    base: str
    headers: dict[str, str] = field(repr=False)
    timeout: float

    def client(self) -> Any:
        return _httpx().Client(base_url=self.base, headers=self.headers, timeout=self.timeout)

    def call(self, client: Any, path: str, body: Fields | None = None) -> Any:
        """Return the answer to a request, GET without a body; wait and repeat it while the server is busy."""
        deadline, pause = time.monotonic() + self.timeout, 1.0
        while True:
            answer = self._send(client, path, body)
            if answer.status_code not in BUSY:
                return self._parsed(path, answer)
            asked = _retry_after(answer)
            wait = pause if asked is None else asked
            if time.monotonic() + wait > deadline:
                raise RuntimeError(
                    f"{self.base}{path} was busy for {self.timeout:g} seconds ({answer.status_code}): "
                    f"{_message(answer)}. Ask for less at a time (--concurrency)"
                )
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _send(self, client: Any, path: str, body: Fields | None) -> Any:
        try:
            return client.get(path) if body is None else client.post(path, json=body)
        except _httpx().TimeoutException:
            raise RuntimeError(f"{self.base}{path} did not answer within {self.timeout:g} seconds") from None
        except _httpx().HTTPError as error:
            raise RuntimeError(
                f"{self.base} cannot be reached ({type(error).__name__}: {error}): is it running?"
            ) from None

    def _parsed(self, path: str, answer: Any) -> Any:
        if answer.status_code == 401:
            hint = "another API key is needed" if self.headers else "an API key is needed (--api-key)"
            raise ValueError(f"{self.base}{path} refused the request (401): {hint}")
        if answer.status_code != 200:
            raise RuntimeError(f"{self.base}{path} refused the request ({answer.status_code}): {_message(answer)}")
        try:
            return answer.json()
        except ValueError:
            raise RuntimeError(f"{self.base}{path} did not answer with JSON: {answer.text[:EXCERPT]!r}") from None


def _retry_after(answer: Any) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or as a date; None if it has none."""
    value = answer.headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    return None


def _message(answer: Any) -> str:
    """Return the message of OpenAI's error object, or the beginning of whatever it is."""
    with suppress(ValueError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])[:EXCERPT]
    return str(answer.text)[:EXCERPT]


def _httpx() -> Any:
    try:
        return import_module("httpx")
    except ImportError as error:
        raise ImportError('auditing a server needs httpx: pip install "draftproof[serve]"') from error
