"""The rows under way and what the model remembers of them: they come, advance together, and leave."""

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
    """A model that answers a source."""

    @property
    def start(self) -> int: ...

    def encode(self, sources: Sequence[Sequence[int]]) -> Cache: ...


@dataclass(slots=True)
class Batch:
    """At most `size` rows. A row's tokens do not depend on which others are there."""

    parts: Parts
    pace: DraftLengthPolicy
    size: int
    longest: int | None
    waiting: deque[Session] = field(default_factory=deque)
    rows: list[Session] = field(default_factory=list)
    cache: Cache | None = None

    def step(self) -> list[tuple[Session, Emitted]]:
        """Let waiting requests in, run one round, and say what it gave."""
        with current_device(self.parts.model.device):
            self._admit()
            return [] if self.cache is None else self._round(self.cache)

    def _round(self, cache: Cache) -> list[tuple[Session, Emitted]]:
        clock = Clock()
        lengths = [self._limited(s, k) for s, k in zip(self.rows, self.pace.lengths(self.rows), strict=True)]
        emitted = advance(self.rows, lengths, cache, self.parts, clock)
        drafted = max(row.drafted for row in emitted)
        self.pace.timed(clock.seconds, drafted + 1, drafted)
        self._account(emitted, clock)
        return list(zip(list(self.rows), emitted, strict=True))

    def leave(self, finished: Collection[int]) -> None:
        """Take these rows out, by id."""
        self.waiting = deque(s for s in self.waiting if s.id not in finished)
        staying = [i for i, s in enumerate(self.rows) if s.id not in finished]
        if len(staying) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in staying]
        self.cache = self.cache.take(staying) if self.cache is not None and staying else None

    def _limited(self, session: Session, k: int) -> int:
        """No draft longer than what may be emitted before the closing token, or than the model has positions for."""
        room = session.room - 1
        return max(0, min(k, room if self.longest is None else min(room, self.longest - len(session.tokens))))

    def _account(self, emitted: list[Emitted], clock: Clock) -> None:
        for session, row in zip(self.rows, emitted, strict=True):
            session.stats.note(row.drafted, row.accepted)
            session.target_outputs = row.target_outputs
            self.pace.observe(session, row.drafted, row.accepted)
            for stage, seconds in clock.seconds.items():
                session.stats.seconds[stage] += seconds / len(self.rows)

    def _admit(self) -> None:
        new = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.size - len(self.rows)))]
        if not new:
            return
        clock = Clock()
        with clock("prefill"):
            cache = read(new, self.parts)
        for session in new:
            session.stats.seconds["prefill"] += clock.total / len(new)
        self.cache = cache if self.cache is None else self.cache.join(cache)
        self.rows += new


def read(sessions: Sequence[Session], parts: Parts) -> Cache:
    """A cache that remembers all of these rows but their last token, in one pass."""
    model = parts.model
    cache = _opened(sessions, model)
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


def _opened(sessions: Sequence[Session], model: Model) -> Cache:
    if isinstance(model, Encoder):
        return model.encode([s.request.source or () for s in sessions])
    return model.new_cache(len(sessions), max(len(s.tokens) for s in sessions))
