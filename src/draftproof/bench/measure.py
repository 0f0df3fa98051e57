"""Time decoders in alternation: every decoder answers a prompt before the next prompt, so all see the same load."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from draftproof.bench.prompts import Prompt
from draftproof.core.sampling import SamplingParams

PLAIN: Final = "plain"
"""Name of the baseline that speedups refer to: this library's engine without a drafter."""

WARM_UP_TOKENS: Final = 4
"""Tokens that each decoder generates before anything is timed: first passes allocate and compile."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of one prompt. Counts that a decoder does not report are None."""

    tokens: list[int]
    first_token: float | None
    passes: int | None = None
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None


@runtime_checkable
class Decoder(Protocol):
    """A named way to generate text: an engine with some drafter and rule, or transformers' generate."""

    @property
    def name(self) -> str: ...

    def __call__(self, tokens: list[int], max_tokens: int, sampling: SamplingParams) -> Decoded: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt by one decoder, once; saved in results files under these field names.

    contestant  the decoder's name
    seconds     the time for everything, the prompt included
    digest      equal for equal output tokens
    """

    contestant: str
    prompt: str
    kind: str
    repeat: int
    tokens: int
    seconds: float
    first_token: float | None
    passes: int | None
    drafts: int | None
    drafted: int | None
    accepted: int | None
    digest: str


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The runs to make. `encode` turns a prompt into the tokens that all decoders get."""

    decoders: Sequence[Decoder]
    prompts: Sequence[Prompt]
    encode: Callable[[str], list[int]]
    max_tokens: int
    repeats: int
    sampling: dict[str, Any]

    @property
    def total(self) -> int:
        return len(self.decoders) * len(self.prompts) * self.repeats


def measure(plan: BenchPlan) -> Iterator[Run]:
    """Yield the runs as they are made. The decoder that goes first changes from prompt to prompt."""
    tokens = plan.encode(plan.prompts[0].prompt)
    for decoder in plan.decoders:
        decoder(tokens, WARM_UP_TOKENS, SamplingParams(**plan.sampling, seed=0))
    for turn, prompt in enumerate(plan.prompts):
        tokens = plan.encode(prompt.prompt)
        for repeat in range(plan.repeats):
            first = (turn + repeat) % len(plan.decoders)
            for decoder in (*plan.decoders[first:], *plan.decoders[:first]):
                yield _run(decoder, prompt, tokens, repeat, plan)


def _run(decoder: Decoder, prompt: Prompt, tokens: list[int], repeat: int, plan: BenchPlan) -> Run:
    sampling = SamplingParams(**plan.sampling, seed=repeat)
    start = time.perf_counter()
    decoded = decoder(tokens, plan.max_tokens, sampling)
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(str(decoded.tokens).encode()).hexdigest()[:12]
    counts = (decoded.passes, decoded.drafts, decoded.drafted, decoded.accepted)
    identity = (decoder.name, prompt.id, prompt.kind, repeat)
    return Run(*identity, len(decoded.tokens), seconds, decoded.first_token, *counts, digest)
