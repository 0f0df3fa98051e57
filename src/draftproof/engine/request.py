"""A request through its life in the engine: `Request` (the input), `Session` (its state), `Output` (the result)."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from jaxtyping import Bool
from torch import Tensor

from draftproof.core.sampling import SamplingParams, is_whole
from draftproof.core.types import History, Round
from draftproof.drafters.interface import TargetOutputs
from draftproof.engine.stop import FinishReason, TextStream

STAGES: Final = ("prefill", "draft", "score", "warp", "verify", "commit")
"""Keys of `Stats.seconds`, in the order of a round."""

Allowed = Callable[[Sequence[int]], Bool[Tensor, " V"]]
"""A grammar: a function of the output tokens that returns the mask of tokens that may follow."""


@dataclass(slots=True)
class Stats:
    """Counters of one request, defined as in the literature.

    `drafts` counts rounds with a draft. `accepted` is counted before a stop cuts the text. `accepted_at[i]` counts the
    accepted draft tokens at depth i; `record` holds every round. `seconds` is the request's share of each stage: a
    round's time is split evenly among the rows of its batch.
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
        """Return accepted draft tokens over drafted ones."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Return accepted tokens per draft plus 1: the round's last token is counted."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def tokens_per_pass(self) -> float:
        """Return emitted tokens over passes of the target."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def rates_by_position(self) -> list[float]:
        """Return how often the draft token at each depth was accepted, over all drafts."""
        return [count / self.drafts for count in self.accepted_at]

    def snapshot(self) -> "Stats":
        """Return a copy that later rounds do not change."""
        return replace(self, accepted_at=list(self.accepted_at), record=list(self.record), seconds=dict(self.seconds))

    def record_round(self, drafted: int, accepted: int) -> None:
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
    """The input of one request. `source` is the encoder's input, if there is one; `sampling.seed` is always set."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    source: tuple[int, ...] | None = None
    allowed: Allowed | None = None
    logprobs: bool = False
    seeded: bool = False
    """Whether the caller chose the seed, so that the text must be reproducible."""


_ids = itertools.count()


@dataclass(slots=True)
class Session:
    """The state of a running request. Drafters see it as their `Context`."""

    request: Request
    tokens: list[int]
    sampling: SamplingParams
    prompt_length: int
    id: int = field(default_factory=lambda: next(_ids))
    target_outputs: TargetOutputs | None = None
    stats: Stats = field(default_factory=Stats)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    exact: bool = True
    deviation: float | None = None

    @classmethod
    def start(cls, request: Request) -> "Session":
        return cls(request, list(request.prompt), request.sampling, len(request.prompt))

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def history(self) -> History:
        return History(self.tokens[: self.prompt_length], self.output)

    @property
    def room(self) -> int:
        """Return how many tokens it may still emit."""
        return self.request.max_tokens - (len(self.tokens) - self.prompt_length)


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a request.

    `tokens` are the emitted tokens, including the end-of-text token or those of a stop string; `text` ends before them.
    `logprobs`, if requested, are the tokens' log-probabilities under the distributions they were drawn from: at
    temperature 0 that is a point mass, and they are all 0. `error` says what went wrong if `finish_reason` is "error".
    `exact` is False if a lossy rule was used; `deviation` is then the largest total variation from the target's
    distribution over all draft positions that were verified.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[float] | None = None
    error: str | None = None
    exact: bool = True
    deviation: float | None = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Return what each round drafted and accepted; a stop may have cut the last one."""
        return tuple(self.stats.record)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """One round's part of a stream: text that is safe to show, emitted tokens, and at the end the finish reason.

    `stats` are the counters after this round; `exact` and `deviation` as in `Output`.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stats: Stats
    exact: bool = True
    deviation: float | None = None


@dataclass(slots=True)
class TextSession:
    """A session and its text so far. `stream` decodes the tokens; None without a tokenizer."""

    session: Session
    stream: TextStream | None
    text: str = ""

    def output(self) -> Output:
        """Return the result of a finished session."""
        session = self.session
        assert session.finish_reason is not None
        return Output(
            self.text,
            session.output,
            session.finish_reason,
            session.stats,
            session.logprobs if session.request.logprobs else None,
            session.error,
            session.exact,
            session.deviation,
        )


def budgets_of(max_tokens: Any, n: int) -> list[int]:
    """Return one budget for each of n prompts, or refuse what is not a whole number ≥ 0."""
    each = isinstance(max_tokens, Sequence) and not isinstance(max_tokens, str)
    budgets = list(max_tokens) if each else [max_tokens] * n
    if len(budgets) != n or not all(is_whole(budget) and budget >= 0 for budget in budgets):
        raise ValueError(
            f"max_tokens must be a whole number ≥ 0, one for all or one for each of {n} prompts; got {max_tokens!r}"
        )
    return [int(budget) for budget in budgets]


def refused_session(index: int, error: Exception, sampling: SamplingParams) -> TextSession:
    """Return the session of a prompt in a list that cannot be served: it ends at once with the reason."""
    session = Session.start(Request((), sampling, 0))
    session.finish_reason, session.error = "error", f"prompt {index}: {error}"
    return TextSession(session, None)
