"""The decoders of a benchmark: this library's engine with drafters and rules, and transformers' own generation."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from draftproof.bench.measure import PLAIN, Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.models.tokenizer import Tokenizer

PROMPT_LOOKUP_TOKENS: Final = 10
"""Tokens that transformers' prompt lookup copies by default: the number in its documentation."""


def engine_decoders(
    plain: Engine,
    drafters: Sequence[tuple[str, Any]],
    rules: Sequence[str],
    draft_length: int | str,
    draft_tokenizer: Tokenizer | None = None,
) -> list["EngineDecoder"]:
    """Return plain decoding, then every drafter (its name, and what `load` takes) under every rule, on one target.

    `draft_tokenizer` is that of a draft model among them.
    """
    shared: dict[str, Any] = {"num_draft_tokens": draft_length, "tokenizer": plain.tokenizer}
    decoders = [EngineDecoder(PLAIN, plain)]
    for name, drafter in drafters:
        for rule in rules:
            engine = load(plain.loaded, drafter, rule=rule, draft_tokenizer=draft_tokenizer, **shared)
            decoders.append(EngineDecoder(name if len(rules) == 1 else f"{name}/{rule}", engine))
    return decoders


def transformers_decoders(
    model: Any, eos: Collection[int], draft_model: Any | None, draft_length: int | str
) -> list["TransformersDecoder"]:
    """Return transformers' plain, prompt-lookup and (with a draft model) assisted generation.

    `model` must be as transformers loads it: weights that this library has packed would change its speed.
    """
    if model.config.is_encoder_decoder:
        raise ValueError("--against transformers compares causal models; this target has an encoder")
    lookup = draft_length if isinstance(draft_length, int) else PROMPT_LOOKUP_TOKENS
    decoders = [
        TransformersDecoder("transformers plain", model, eos),
        TransformersDecoder("transformers prompt-lookup", model, eos, {"prompt_lookup_num_tokens": lookup}),
    ]
    if draft_model is not None:
        if isinstance(draft_length, int):
            draft_model.generation_config.num_assistant_tokens = draft_length
        decoders.append(TransformersDecoder("transformers assisted", model, eos, {"assistant_model": draft_model}))
    return decoders


@dataclass(frozen=True, slots=True)
class EngineDecoder:
    """This library's engine. The time to the first token is that of the prompt and the first round."""

    name: str
    engine: Engine

    def __call__(self, tokens: list[int], max_tokens: int, sampling: SamplingParams) -> Decoded:
        start, first, output = time.perf_counter(), None, list[int]()
        if sampling.temperature == 0:
            sampling = replace(sampling, seed=None)  # with a seed, draft lengths would not follow measured costs
        stats = None
        for chunk in self.engine.stream(tokens, sampling, max_tokens=max_tokens):
            first = time.perf_counter() - start if first is None else first
            output += chunk.tokens
            stats = chunk.stats
        if stats is None:
            return Decoded(output, first)
        return Decoded(output, first, stats.rounds, stats.drafts, stats.drafted, stats.accepted)


@dataclass(frozen=True, slots=True)
class TransformersDecoder:
    """transformers' `model.generate`. Passes are counted by a hook; draft statistics are not available."""

    name: str
    model: Any
    eos: Collection[int]
    extra: dict[str, Any] = field(default_factory=dict)

    def __call__(self, tokens: list[int], max_tokens: int, sampling: SamplingParams) -> Decoded:
        ids = torch.tensor([tokens], device=self.model.device)
        streamer = FirstTokenTimer(time.perf_counter())
        with torch.random.fork_rng(), _counted_passes(self.model) as passes:
            torch.manual_seed(sampling.seed or 0)
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=sorted(self.eos) or None,
                pad_token_id=min(self.eos, default=0),
                streamer=streamer,
                **_sampling_options(sampling),
                **self.extra,
            )
        return Decoded(output[0, len(tokens) :].tolist(), streamer.seconds, passes[0])


@dataclass(slots=True)
class FirstTokenTimer:
    """A streamer that measures the seconds until the first token. transformers sends it the prompt first."""

    start: float
    calls: int = 0
    seconds: float | None = None

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.seconds = time.perf_counter() - self.start

    def end(self) -> None:
        pass


def _sampling_options(sampling: SamplingParams) -> dict[str, Any]:
    """Return transformers' options for the same distribution; unused filters are switched off, as models set some."""
    if sampling.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }


@contextmanager
def _counted_passes(model: Any) -> Iterator[list[int]]:
    count = [0]

    def add_one(*_: Any) -> None:
        count[0] += 1

    hook = model.register_forward_pre_hook(add_one)
    try:
        yield count
    finally:
        hook.remove()
