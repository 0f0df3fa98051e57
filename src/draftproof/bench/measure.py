"""Measuring in alternation: each prompt by every contestant before the next, so that all see the same machine."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from draftproof.bench.prompts import Prompt
from draftproof.core.sampling import SamplingParams

PLAIN: Final = "plain"
"""The name of the contestant that all are measured against: this library's engine without a drafter."""

WARM_UP: Final = 4
"""Tokens that each contestant says before anything counts: first passes allocate and tune."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a contestant did with a prompt. What it cannot tell is None."""

    tokens: list[int]
    first_token: float | None
    passes: int | None = None
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None


@runtime_checkable
class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    def __call__(self, tokens: list[int], max_tokens: int, sampling: SamplingParams) -> Said: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt by one contestant, once. `digest` tells equal texts from different ones. Seconds count the prompt."""

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
class Plan:
    """What to measure: `encode` turns a prompt into the tokens that all contestants get."""

    contestants: Sequence[Contestant]
    prompts: Sequence[Prompt]
    encode: Callable[[str], list[int]]
    max_tokens: int
    repeats: int
    sampling: dict[str, Any]

    @property
    def total(self) -> int:
        return len(self.contestants) * len(self.prompts) * self.repeats


def measured(plan: Plan) -> Iterator[Run]:
    """The runs as they are made. Who begins changes from prompt to prompt."""
    tokens = plan.encode(plan.prompts[0].prompt)
    for contestant in plan.contestants:
        contestant(tokens, WARM_UP, SamplingParams(**plan.sampling, seed=0))
    for turn, prompt in enumerate(plan.prompts):
        tokens = plan.encode(prompt.prompt)
        for repeat in range(plan.repeats):
            first = (turn + repeat) % len(plan.contestants)
            for contestant in (*plan.contestants[first:], *plan.contestants[:first]):
                yield _run(contestant, prompt, tokens, repeat, plan)


def _run(contestant: Contestant, prompt: Prompt, tokens: list[int], repeat: int, plan: Plan) -> Run:
    sampling = SamplingParams(**plan.sampling, seed=repeat)
    start = time.perf_counter()
    said = contestant(tokens, plan.max_tokens, sampling)
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(str(said.tokens).encode()).hexdigest()[:12]
    counts = (said.passes, said.drafts, said.drafted, said.accepted)
    place = (contestant.name, prompt.id, prompt.kind, repeat)
    return Run(*place, len(said.tokens), seconds, said.first_token, *counts, digest)
