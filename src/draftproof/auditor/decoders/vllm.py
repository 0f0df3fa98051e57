"""Audit vLLM's offline `LLM` class: with n-gram speculation, with a draft model, or plain."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round

COPYING: Final[Mapping[str, Mapping[str, Any]]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "custom_class", "model": "draftproof.integrations.vllm.Suffix"},
}
"""vLLM's speculative configs for drafters that copy from the text: its own n-grams, and our suffix drafter."""
OPTIONS: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "enable_chunked_prefill": False,
}
"""Defaults of the `LLM` class for an audit: the reference's precision, no compilation time, and prompts that are read
in one step, because vLLM on a CPU ends with an error where a request with a seed is read in several."""


def vllm(
    model: Any,
    drafter: str | None = "ngram",
    *,
    draft_length: int = 3,
    speculative_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> "Offline":
    """Make a decoder of a model folder or hub id, or of an existing `LLM` with the drafter it was loaded with.

    drafter             "ngram", "suffix", "eagle3:FOLDER", a draft model's folder or hub id, or None
    speculative_config  vLLM's own, for any other way of drafting; replaces drafter and draft_length
    options             options of the `LLM` class, such as additional_config; the defaults are `OPTIONS`

    vLLM runs inside this process, because its rounds can only be counted there.
    """
    if not isinstance(model, (str, os.PathLike)):
        return Offline(model, "vllm", _versions() | {"verification": _verification(model)})
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm_class: Any = _vllm().LLM

    speculation = None if drafter is None else {**_speculation(drafter), "num_speculative_tokens": draft_length}
    speculation = speculation if speculative_config is None else dict(speculative_config)
    try:
        llm = llm_class(model=str(model), speculative_config=speculation, **{**OPTIONS, **options})
    except ValueError as error:
        raise ValueError(f"vLLM refuses this configuration: {in_one_line(error)}") from error
    asked = "draftproof" in {**(options.get("additional_config") or {}), **(speculation or {})}
    if asked and speculation:
        refuse_unseen(_verification(llm))
    name = "vllm" if speculation is None else f"vllm, {_method(llm, speculation)}, verified by {_verification(llm)}"
    return Offline(llm, name, _versions() | {"speculation": str(speculation), "verification": _verification(llm)})


def in_one_line(error: ValueError) -> str:
    """Return what an error says; of pydantic's, whose first line holds no reason, each field with its reason."""
    reports = getattr(error, "errors", None)
    if reports is None:
        return str(error)
    reasons = [": ".join([*map(str, report["loc"]), report["msg"]]) for report in reports()]
    if any(report["loc"] == ("draftproof",) for report in reports()):  # a field that only the plug-in knows
        reasons.append(NOT_LOADED)
    return "; ".join(reasons)


STOCK: Final = "vLLM"
UNSEEN: Final = "unknown, in another process"
NOT_LOADED: Final = "is draftproof installed beside vLLM, and not left out of VLLM_PLUGINS?"


def refuse_unseen(verification: str) -> None:
    """Refuse to audit as draftproof's what is, or may be, vLLM's own verification."""
    if verification == STOCK:
        raise ValueError(f"draftproof was asked for, and vLLM verifies by itself: {NOT_LOADED}")
    if verification == UNSEEN:
        raise ValueError(
            "draftproof was asked for, and who verifies cannot be seen in vLLM's other process: set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 and one tensor parallel rank"
        )


def _verification(llm: Any) -> str:
    """Say who verifies drafts, as the running sampler has it: vLLM itself, or draftproof's plug-in and its rule."""
    core = getattr(getattr(llm.llm_engine, "engine_core", None), "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    runner = getattr(worker, "model_runner", None)
    if runner is None:
        return UNSEEN
    settings = getattr(getattr(runner, "rejection_sampler", None), "draftproof", None)
    return STOCK if settings is None else f"draftproof, rule {settings.rule}"


def _speculation(drafter: str) -> dict[str, Any]:
    """Return vLLM's speculative config for a drafter's name, or for the folder or hub id of a draft model."""
    kind, _, folder = drafter.partition(":")
    if drafter in COPYING:
        return dict(COPYING[drafter])
    if kind == "eagle3":
        return {"method": "eagle3", "model": folder}
    return {"method": "draft_model", "model": drafter}


def _method(llm: Any, speculation: Mapping[str, Any]) -> str:
    """Return the method of drafting: as it was given, or as vLLM inferred it from the draft model."""
    config = getattr(getattr(llm.llm_engine, "vllm_config", None), "speculative_config", None)
    return str(speculation.get("method") or getattr(config, "method", None) or "speculation")


@dataclass(frozen=True, slots=True)
class Offline:
    """A decoder that calls `LLM.generate` on token ids, all prompts of a call in one batch."""

    llm: Any
    name: str
    description: dict[str, str] = field(default_factory=dict)

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> list[Decoded]:
        """Continue each prompt; see `Decoder`."""
        refuse_other_order(sampling)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        parameters = [vllm_parameters(sampling, max_tokens, seed) for seed in seeds]
        with _counted_rounds(self.llm) as rounds:
            outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return [Decoded(tuple(each.outputs[0].token_ids), _rounds_of(rounds, each.request_id)) for each in outputs]


def refuse_other_order(sampling: SamplingParams) -> None:
    """Refuse filters that vLLM applies in another order than the reference: a difference that is not a bias."""
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise ValueError(
            f"min_p={sampling.min_p} and top_p={sampling.top_p} cannot be audited together: vLLM cuts by min_p before "
            "top_p, the reference after it, as transformers does. Audit them one at a time"
        )


def vllm_parameters(sampling: SamplingParams, max_tokens: int, seed: int | None) -> Any:
    """Translate sampling parameters to vLLM's, which has all of them."""
    return _vllm().SamplingParams(
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


def _vllm() -> Any:
    try:
        return import_module("vllm")
    except ImportError as error:
        raise ImportError("auditing vLLM needs vLLM: install it, or run `make test-vllm` to see it done") from error


def _versions() -> dict[str, str]:
    return {"vllm": str(_vllm().__version__)}


@contextmanager
def _counted_rounds(llm: Any) -> Iterator[dict[str, list[Round]] | None]:
    """Wrap the scheduler, and yield a dict that fills with each request's rounds; None if there is no access to it."""
    core = getattr(getattr(llm.llm_engine, "engine_core", None), "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None:
        yield None
        return
    rounds: dict[str, list[Round]] = {}
    update = scheduler.update_from_output

    def wrapped(scheduled: Any, output: Any) -> Any:
        for request, row in output.req_id_to_index.items():
            emitted = len(output.sampled_token_ids[row]) if output.sampled_token_ids else 0
            if emitted:  # chunked prefill emits nothing at first
                drafted = len(scheduled.scheduled_spec_decode_tokens.get(request) or ())
                rounds.setdefault(request, []).append(Round(drafted, min(drafted, emitted - 1)))
        return update(scheduled, output)

    scheduler.update_from_output = wrapped
    try:
        yield rounds
    finally:
        del scheduler.update_from_output


def _rounds_of(rounds: dict[str, list[Round]] | None, request: str) -> tuple[Round, ...] | None:
    """Return a request's rounds; the engine may have appended a suffix to its id."""
    if rounds is None:
        return None
    found = [counted for name, counted in rounds.items() if name == request or name.startswith(f"{request}-")]
    return tuple(found[0]) if len(found) == 1 else None
