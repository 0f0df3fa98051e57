"""A batch of requests that advance together: admission, prefill, one round per step, removal."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from draftproof.core.device import current_device, to_device
from draftproof.drafters.interface import TargetOutputs
from draftproof.engine.draft_length import DraftLengthPolicy
from draftproof.engine.request import Session
from draftproof.engine.round import Clock, Emitted, Parts, advance
from draftproof.models.interface import Cache, Model


@runtime_checkable
class Encoder(Protocol):
    """A target with an encoder: a request's prompt is the encoder's input, and the decoder starts from `start`."""

    @property
    def start(self) -> int: ...

    def encode(self, sources: Sequence[Sequence[int]]) -> Cache: ...


@dataclass(slots=True)
class Batch:
    """At most `size` rows and their KV cache. A row's tokens do not depend on the other rows.

    `max_length` is the number of tokens that the model has positions for; None: no limit.
    """

    parts: Parts
    draft_length: DraftLengthPolicy
    size: int
    max_length: int | None
    waiting: deque[Session] = field(default_factory=deque)
    rows: list[Session] = field(default_factory=list)
    cache: Cache | None = None

    def step(self) -> list[tuple[Session, Emitted]]:
        """Admit waiting requests, run one round, and return what it emitted for each row."""
        with current_device(self.parts.model.device):
            self._admit()
            return [] if self.cache is None else self._round(self.cache)

    def leave(self, finished: Collection[int]) -> None:
        """Remove the rows with these ids, running or waiting."""
        self.waiting = deque(s for s in self.waiting if s.id not in finished)
        staying = [i for i, s in enumerate(self.rows) if s.id not in finished]
        if len(staying) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in staying]
        self.cache = self.cache.take(staying) if self.cache is not None and staying else None

    def _admit(self) -> None:
        new = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.size - len(self.rows)))]
        if not new:
            return
        clock = Clock()
        with clock("prefill"):
            cache = prefill(new, self.parts)
        for session in new:
            session.stats.seconds["prefill"] += clock.total / len(new)
        self.cache = cache if self.cache is None else self.cache.join(cache)
        self.rows += new

    def _round(self, cache: Cache) -> list[tuple[Session, Emitted]]:
        clock = Clock()
        wanted = self.draft_length.lengths(self.rows)
        lengths = [self._limited(s, k) for s, k in zip(self.rows, wanted, strict=True)]
        emitted = advance(self.rows, lengths, cache, self.parts, clock)
        drafted = max(row.drafted for row in emitted)
        self.draft_length.record_time(clock.seconds, drafted + 1, drafted)
        self._record(emitted, clock)
        return list(zip(list(self.rows), emitted, strict=True))

    def _limited(self, session: Session, k: int) -> int:
        """Limit a draft to the tokens that may still be emitted less one, and to the model's positions.

        The one is the round's last token, which follows the draft.
        """
        room = session.room - 1
        return max(0, min(k, room if self.max_length is None else min(room, self.max_length - len(session.tokens))))

    def _record(self, emitted: list[Emitted], clock: Clock) -> None:
        for session, row in zip(self.rows, emitted, strict=True):
            session.stats.record_round(row.drafted, row.accepted)
            session.target_outputs = row.target_outputs
            self.draft_length.record_draft(session, row.drafted, row.accepted)
            for stage, seconds in clock.seconds.items():
                session.stats.seconds[stage] += seconds / len(self.rows)


def prefill(sessions: Sequence[Session], parts: Parts) -> Cache:
    """Run one pass over the prompts and return a cache that holds all tokens of each row but the last."""
    model = parts.model
    cache = _new_cache(sessions, model)
    counts = [len(s.tokens) - 1 for s in sessions]
    width = max(counts)
    if width:
        tokens = to_device([(s.tokens[:-1] + [0] * width)[:width] for s in sessions], model.device)
        forward = model(tokens, cache, scored=1, layers=parts.features.layers)
        cache.keep(torch.tensor(counts))
        for b, session in enumerate(sessions):
            if forward.hidden:
                n = len(session.tokens) - 1
                session.target_outputs = TargetOutputs(n, None, tuple(states[b, :n] for states in forward.hidden))
    return cache


def _new_cache(sessions: Sequence[Session], model: Model) -> Cache:
    if isinstance(model, Encoder):
        return model.encode([s.request.source or () for s in sessions])
    return model.new_cache(len(sessions), max(len(s.tokens) for s in sessions))
