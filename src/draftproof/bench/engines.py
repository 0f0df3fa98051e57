"""transformers' own generation as contestants: plain, assisted by a draft model, and by prompt lookup."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from draftproof.bench.measure import PLAIN, Said
from draftproof.core.sampling import SamplingParams
from draftproof.engine.engine import Engine
from draftproof.engine.load import load


@dataclass(frozen=True, slots=True)
class Ours:
    """An engine. The time to its first token is that of the first round, the prompt counted."""

    name: str
    engine: Engine

    def __call__(self, tokens: list[int], max_tokens: int, sampling: SamplingParams) -> Said:
        start, first, said = time.perf_counter(), None, list[int]()
        if sampling.temperature == 0:
            sampling = replace(sampling, seed=None)  # a seed would keep the pace from following measured costs
        stats = None
        for chunk in self.engine.stream(tokens, sampling, max_tokens=max_tokens):
            first = time.perf_counter() - start if first is None else first
            said += chunk.tokens
            stats = chunk.stats
        if stats is None:
            return Said(said, first)
        return Said(said, first, stats.rounds, stats.drafts, stats.drafted, stats.accepted)


def ours(
    plain: Engine, drafters: Sequence[tuple[str, Any]], rules: Sequence[str], draft_length: int | str
) -> list[Ours]:
    """Plain decoding, then every drafter (its name, and what `load` takes) under every rule, around one target."""
    made = [Ours(PLAIN, plain)]
    for name, drafter in drafters:
        for rule in rules:
            engine = load(plain.hf, drafter, rule=rule, num_draft_tokens=draft_length, tokenizer=plain.tokenizer)
            made.append(Ours(name if len(rules) == 1 else f"{name}/{rule}", engine))
    return made


LOOKUP: Final = 10
"""Tokens that prompt lookup copies: the number of transformers' own documentation."""


@dataclass(slots=True)
class FirstToken:
    """A streamer that looks at the clock. transformers shows it the prompt first."""

    start: float
    calls: int = 0
    after: float | None = None

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.after = time.perf_counter() - self.start

    def end(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Transformers:
    """`model.generate`. Its passes are counted from outside; what its drafts fared it does not tell."""

    name: str
    model: Any
    eos: Collection[int]
    extra: dict[str, Any] = field(default_factory=dict)

    def __call__(self, tokens: list[int], max_tokens: int, sampling: SamplingParams) -> Said:
        ids = torch.tensor([tokens], device=self.model.device)
        streamer = FirstToken(time.perf_counter())
        with torch.random.fork_rng(), _passes(self.model) as passes:
            torch.manual_seed(sampling.seed or 0)
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=sorted(self.eos) or None,
                pad_token_id=min(self.eos, default=0),
                streamer=streamer,
                **_sampling(sampling),
                **self.extra,
            )
        return Said(made[0, len(tokens) :].tolist(), streamer.after, passes[0])


def hosts(model: Any, eos: Collection[int], draft_model: Any | None, draft_length: int | str) -> list[Transformers]:
    """Those that can run. `model` is as transformers loads it: a model packed by us would not be its own speed."""
    if model.config.is_encoder_decoder:
        raise ValueError("--against transformers compares causal models; this target has an encoder")
    lookup = draft_length if isinstance(draft_length, int) else LOOKUP
    made = [
        Transformers("transformers plain", model, eos),
        Transformers("transformers prompt-lookup", model, eos, {"prompt_lookup_num_tokens": lookup}),
    ]
    if draft_model is not None:
        if isinstance(draft_length, int):
            draft_model.generation_config.num_assistant_tokens = draft_length
        made.append(Transformers("transformers assisted", model, eos, {"assistant_model": draft_model}))
    return made


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """The same distribution by transformers' names; what is off there must be said, for models bring settings of their own."""
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
def _passes(model: Any) -> Iterator[list[int]]:
    count = [0]

    def note(*_: Any) -> None:
        count[0] += 1

    hook = model.register_forward_pre_hook(note)
    try:
        yield count
    finally:
        hook.remove()
