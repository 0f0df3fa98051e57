"""vLLM's offline `LLM` class as a decoder: n-gram speculation, a draft model, or none."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

NGRAM: Final = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OPTIONS: Final[Mapping[str, Any]] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
"""What an audit wants: the judge's precision, and no time spent on compiling."""


def vllm(model: Any, drafter: str | None = "ngram", *, draft_length: int = 3, **options: Any) -> "Offline":
    """A decoder of this folder or hub id; or of an `LLM` that is there already, which has its own drafter.

    drafter   "ngram", a draft model's folder or hub id, or None
    options   the `LLM` class's own; the defaults are `OPTIONS`

    vLLM is run inside this process: only there can its rounds be counted.
    """
    if not isinstance(model, (str, os.PathLike)):
        return Offline(model, "vllm", _versions())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm_class: Any = _host().LLM

    told = None if drafter is None else {**_speculation(drafter), "num_speculative_tokens": draft_length}
    llm = llm_class(model=str(model), speculative_config=told, **{**OPTIONS, **options})
    return Offline(llm, "vllm" if told is None else f"vllm, {told['method']}", _versions() | {"speculation": str(told)})


def _speculation(drafter: str) -> dict[str, Any]:
    return dict(NGRAM) if drafter == "ngram" else {"method": "draft_model", "model": drafter}


@dataclass(frozen=True, slots=True)
class Offline:
    """`LLM.generate` over token ids, all prompts of a call together."""

    llm: Any
    name: str
    description: dict[str, str] = field(default_factory=dict)

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        """Continue each prompt; see `Decoder`."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        parameters = [_parameters(sampling, max_tokens, seed) for seed in seeds]
        with _watched(self.llm) as rounds:
            outputs = self.llm.generate(asked, parameters, use_tqdm=False)
        return [Decoded(tuple(made.outputs[0].token_ids), _of(rounds, made.request_id)) for made in outputs]


def _parameters(sampling: SamplingParams, max_tokens: int, seed: int) -> Any:
    """This sampling by vLLM's names: it has them all."""
    return _host().SamplingParams(
        temperature=float(sampling.temperature),
        top_k=sampling.top_k or 0,
        top_p=float(sampling.top_p),
        min_p=float(sampling.min_p),
        repetition_penalty=float(sampling.repetition_penalty),
        presence_penalty=float(sampling.presence_penalty),
        frequency_penalty=float(sampling.frequency_penalty),
        logit_bias={token: float(bias) for token, bias in sampling.logit_bias.items()} or None,
        seed=seed,
        max_tokens=max_tokens,
        detokenize=False,
    )


def _host() -> Any:
    try:
        return import_module("vllm")
    except ImportError as error:
        raise ImportError("auditing vLLM needs vLLM: install it, or run `make test-vllm` to see it done") from error


def _versions() -> dict[str, str]:
    return {"vllm": str(_host().__version__)}


@contextmanager
def _watched(llm: Any) -> Iterator[dict[str, list[Round]] | None]:
    """What each round of each request drafts and keeps, read off its scheduler; None where that is out of reach."""
    core = getattr(getattr(llm.llm_engine, "engine_core", None), "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None:
        yield None
        return
    rounds: dict[str, list[Round]] = {}
    update = scheduler.update_from_output

    def watched(planned: Any, came: Any) -> Any:
        for request, row in came.req_id_to_index.items():
            emitted = len(came.sampled_token_ids[row]) if came.sampled_token_ids else 0
            if emitted:  # a prompt that is read in pieces emits nothing at first
                drafted = len(planned.scheduled_spec_decode_tokens.get(request) or ())
                rounds.setdefault(request, []).append(Round(drafted, min(drafted, emitted - 1)))
        return update(planned, came)

    scheduler.update_from_output = watched
    try:
        yield rounds
    finally:
        del scheduler.update_from_output


def _of(rounds: dict[str, list[Round]] | None, request: str) -> tuple[Round, ...] | None:
    """A request's rounds. Inside the engine its name may have a tail."""
    if rounds is None:
        return None
    found = [made for name, made in rounds.items() if name == request or name.startswith(f"{request}-")]
    return tuple(found[0]) if len(found) == 1 else None
