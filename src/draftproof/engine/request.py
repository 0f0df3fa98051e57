"""A request on its way through the engine: what was asked, how far it is, what came of it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from jaxtyping import Bool
from torch import Tensor

from draftproof.core.sampling import SamplingParams
from draftproof.core.types import History, Round
from draftproof.drafters.interface import TargetOutputs
from draftproof.models.tokenizer import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]
STAGES: Final = ("prefill", "draft", "score", "warp", "verify", "commit")

Allowed = Callable[[Sequence[int]], Bool[Tensor, " V"]]
"""A grammar's word: which tokens may follow these output tokens."""


@dataclass(slots=True)
class Stats:
    """What a request cost and kept, counted as the field counts.

    `drafts` are the rounds that had a draft. `accepted` counts before stops cut. `accepted_at[i]` is how often the
    draft token at depth i was kept; `record` has every round. `seconds` are a request's share of each stage: a round's
    time is split evenly among the rows of its batch.
    """

    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    record: list[Round] = field(default_factory=list, repr=False)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens a draft: the closing token is counted."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over passes of the target."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def rates_by_position(self) -> list[float]:
        """How often the draft token at each depth was kept, over all drafts."""
        return [count / self.drafts for count in self.accepted_at]

    def note(self, drafted: int, accepted: int) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.record.append(Round(drafted, accepted))
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for i in range(accepted):
            self.accepted_at[i] += 1


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. `source` is an encoder's input; `sampling` has its seed."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    source: tuple[int, ...] | None = None
    allowed: Allowed | None = None
    logprobs: bool = False
    seeded: bool = False
    """Whether the caller chose the seed, and so wants the same text again."""


_ids = itertools.count()


@dataclass(slots=True)
class Session:
    """A request under way. It is the `Context` that drafters see."""

    request: Request
    tokens: list[int]
    id: int = field(default_factory=lambda: next(_ids))
    target_outputs: TargetOutputs | None = None
    stats: Stats = field(default_factory=Stats)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @classmethod
    def start(cls, request: Request) -> "Session":
        return cls(request, list(request.prompt))

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def history(self) -> History:
        return History(self.tokens[: self.prompt_length], self.output)

    @property
    def room(self) -> int:
        """Tokens it may still emit."""
        return self.request.max_tokens - (len(self.tokens) - self.prompt_length)


@dataclass(frozen=True, slots=True)
class Output:
    """What came of a request.

    `tokens` are the emitted ones, the end-of-text token or those of a stop string included; `text` ends before them.
    `logprobs` are the emitted tokens' under the distribution they were drawn from, if asked for. `error` says what went wrong
    where `finish_reason` is "error".
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[float] | None = None
    error: str | None = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """What each round drafted and kept; a stop may have cut the last one."""
        return tuple(self.stats.record)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a stream shows after a round: text that is safe to show, the tokens emitted, and at the end why."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stats: Stats


@dataclass(slots=True)
class Emission:
    """A request and the text that has come of it so far."""

    session: Session
    stream: TextStream | None
    text: str = ""

    def output(self) -> Output:
        session = self.session
        assert session.finish_reason is not None
        return Output(
            self.text,
            session.output,
            session.finish_reason,
            session.stats,
            session.logprobs if session.request.logprobs else None,
            session.error,
        )
