"""A request through its life in the engine: `Request` (the input), `Session` (its state), `Output` (the result)."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from draftproof.core.sampling import SamplingParams, is_whole
from draftproof.core.types import History, Round
from draftproof.drafters.interface import TargetOutputs
from draftproof.engine.stop import FinishReason, TextStream
from draftproof.rules import Verifier

STAGES: Final = ("prefill", "draft", "score", "warp", "verify", "commit")
"""Keys of `Stats.seconds`, in the order of a round."""

Allowed = Callable[[Sequence[int]], Bool[Tensor, " V"]]
"""A grammar: a function of the output tokens that returns the mask of tokens that may follow."""


@dataclass(slots=True)
class Stats:
    """Counters of one request, defined as in the literature.

    `drafts` counts rounds with a draft. `accepted` is counted before a stop cuts the text. `accepted_at[i]` counts the
    accepted draft tokens at depth i. `seconds` is the request's share of each stage: a round's time is split evenly
    among the rows of its batch.
    """

    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    cached_tokens: int = 0
    """Tokens of the prompt that were not read again, because an earlier request had read them."""
    preemptions: int = 0
    """Times the request gave up its place in the pool for older ones."""
    queue_seconds: float = 0.0
    """Time from the request's submission to its place in the pool."""
    _rounds: list[Round] = field(default_factory=list, repr=False)
    """Every round, and in a copy those that came later."""

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
        """Return a copy that later rounds do not change.

        Rounds that are over stay as they are, so the list of them is shared: a copy of it for every chunk would take
        longer with every chunk.
        """
        return Stats(
            self.rounds, self.drafts, self.drafted, self.accepted, self.emitted, self.accepted_at.copy(),
            self.seconds.copy(), self.cached_tokens, self.preemptions, self.queue_seconds, self._rounds,
        )  # fmt: skip

    @property
    def record(self) -> list[Round]:
        """Return every round."""
        return self._rounds[: self.rounds]

    @property
    def last_round(self) -> Round | None:
        """Return the last of `record`; None before the first round, and where rounds are not recorded."""
        return self._rounds[self.rounds - 1] if 0 < self.rounds <= len(self._rounds) else None

    def record_round(self, drafted: int, accepted: int) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self._rounds.append(Round(drafted, accepted))
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for i in range(accepted):
            self.accepted_at[i] += 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token.

    logprob  under the raw distribution, the softmax of the model's logits
    drawn    under the distribution it was drawn from, with temperature, filters, penalties and grammar; 0 at
             temperature 0. None for a token of the prompt
    top      the likeliest tokens of the raw distribution, as many as were asked for
    """

    token: int
    logprob: float
    drawn: float | None
    top: list[tuple[int, float]] = field(default_factory=list)


@runtime_checkable
class Encoder(Protocol):
    """A target with an encoder: a request's prompt is the encoder's input, and the decoder starts from `start`."""

    @property
    def start(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Request:
    """The input of one request. `source` is the encoder's input, if there is one; `sampling.seed` is always set.

    logprobs          alternatives to return with each token's log-probability; None: no log-probabilities
    prompt_logprobs   likewise for the tokens of the prompt
    drafter           False: plain decoding
    rule              None: the engine's
    num_draft_tokens  a number, or "auto"; None: the engine's
    ends              tokens that end the text
    min_tokens        tokens before which no stop string is looked for; `allowed` keeps `ends` out of them
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    source: tuple[int, ...] | None = None
    allowed: Allowed | None = None
    logprobs: int | None = None
    seeded: bool = False
    """Whether the caller chose the seed, so that the text must be reproducible."""
    prompt_logprobs: int | None = None
    drafter: bool = True
    rule: str | Verifier | None = None
    num_draft_tokens: int | str | None = None
    ends: frozenset[int] = frozenset()
    min_tokens: int = 0


_ids = itertools.count()


@dataclass(slots=True, eq=False)
class Session:
    """The state of a running request. Drafters see it as their `Context`."""

    request: Request
    tokens: list[int]
    sampling: SamplingParams
    prompt_length: int
    id: int = field(default_factory=lambda: next(_ids))
    target_outputs: TargetOutputs | None = None
    stats: Stats = field(default_factory=Stats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: Exception | None = None
    """What a caller's own code raised, if that is why the request failed."""
    text: str = ""
    stream: TextStream | None = None
    """Decodes the tokens; None without a tokenizer."""
    read: int = 0
    """Tokens of the prompt that the target has read."""
    whole_chunks: int = 0
    """Tokens that the target read in whole chunks of a prompt: their keys and values depend on nothing else."""
    hidden: list[tuple[Tensor, ...]] = field(default_factory=list)
    """The target's states at the prompt's tokens, chunk by chunk, until a drafter takes them."""
    saved: Any = None
    """Its row, while it is out of the pool."""
    listener: Callable[["Chunk"], None] | None = None
    """Called with what every round adds."""
    _sent: int = 0
    """Characters of the text that the listener has."""
    exact: bool = True
    deviation: float | None = None
    created: float = field(default_factory=time.perf_counter)

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

    def notify(self, tokens: list[int]) -> None:
        """Hand the listener what was added since its last call: these tokens, and the text that is safe to show."""
        if self.listener is None:
            return
        piece, self._sent = self.text[self._sent :], len(self.text)
        logprobs = None if self.request.logprobs is None else self.logprobs[len(self.logprobs) - len(tokens) :]
        stats = self.stats.snapshot()
        self.listener(Chunk(piece, tokens, self.finish_reason, stats, self.exact, self.deviation, logprobs))

    def result(self) -> "Output":
        """Return the result of a finished session."""
        assert self.finish_reason is not None
        return Output(
            self.text,
            self.output,
            self.finish_reason,
            self.stats,
            None if self.request.logprobs is None else self.logprobs,
            self.error,
            self.exact,
            self.deviation,
            None if self.request.prompt_logprobs is None else self.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a request.

    `tokens` are the emitted tokens, including the end-of-text token or those of a stop string; `text` ends before them.
    `logprobs` and `prompt_logprobs`, if requested, hold a `TokenLogprobs` for each token (the prompt's from its second
    token on: nothing comes before the first). `error` says what went wrong if `finish_reason` is "error".
    `exact` is False if a lossy rule was used; `deviation` is then the largest total variation from the target's
    distribution over all draft positions that were verified.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    exact: bool = True
    deviation: float | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Return what each round drafted and accepted; a stop may have cut the last one."""
        return tuple(self.stats.record)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """One round's part of a stream: text that is safe to show, emitted tokens, and at the end the finish reason.

    `stats` are the counters after this round; `exact`, `deviation` and `logprobs` as in `Output`. `made` is when the
    round ended, by `time.perf_counter`.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stats: Stats
    exact: bool = True
    deviation: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    made: float = field(default_factory=time.perf_counter)


def budgets_of(max_tokens: Any, n: int) -> list[int]:
    """Return one budget for each of n prompts, or refuse what is not a whole number ≥ 0."""
    each = isinstance(max_tokens, Sequence) and not isinstance(max_tokens, str)
    budgets = list(max_tokens) if each else [max_tokens] * n
    if len(budgets) != n or not all(is_whole(budget) and budget >= 0 for budget in budgets):
        raise ValueError(
            f"max_tokens must be a whole number ≥ 0, one for all or one for each of {n} prompts; got {max_tokens!r}"
        )
    return [int(budget) for budget in budgets]


def refused_session(index: int, error: Exception, sampling: SamplingParams) -> Session:
    """Return the session of a prompt in a list that cannot be served: it ends at once with the reason."""
    session = Session.start(Request((), sampling, 0))
    session.finish_reason, session.error = "error", f"prompt {index}: {error}"
    return session


def raise_error(session: Session) -> None:
    """Raise what ended a request that failed: what a caller's own code raised, else a RuntimeError."""
    if session.finish_reason == "error":
        if session.cause is not None:
            raise session.cause
        raise RuntimeError(session.error)
