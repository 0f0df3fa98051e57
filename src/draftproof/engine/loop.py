"""Run rounds for all callers of an engine: whoever waits for a text drives the rounds that all texts share.

One thread at a time runs a round. Requests and cancellations of other threads are taken up between rounds.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Condition

from draftproof.engine.request import Session
from draftproof.engine.round import Emitted
from draftproof.engine.scheduler import Scheduler

Extend = Callable[[Session, Emitted], None]
"""Adds what a round emitted to a session, and ends it where its text ends."""


@dataclass(slots=True)
class Loop:
    """The rounds of one engine."""

    scheduler: Scheduler
    extend: Extend
    rounds: int = 0
    """Rounds run so far."""
    after_step: list[Callable[[], None]] = field(default_factory=list)
    """Called after every round, by the thread that ran it."""
    _changed: Condition = field(default_factory=Condition)
    _arriving: deque[Session] = field(default_factory=deque)
    _leaving: deque[Session] = field(default_factory=deque)
    _is_running: bool = False
    _round_began: float | None = None

    @property
    def round_seconds(self) -> float:
        """Return how long the present round has been running; 0 between rounds."""
        began = self._round_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def waiting(self) -> int:
        """Return the number of requests that have no place in the pool yet."""
        return len(self._arriving) + len(self.scheduler.waiting)

    @property
    def is_idle(self) -> bool:
        return not self._arriving and not self._leaving and self.scheduler.idle

    def submit(self, sessions: Iterable[Session]) -> None:
        """Queue requests; one that has ended already is not run."""
        with self._changed:
            self._arriving.extend(session for session in sessions if session.finish_reason is None)
            self._changed.notify_all()

    def cancel(self, sessions: Iterable[Session]) -> None:
        """End requests between two rounds, where they are."""
        with self._changed:
            self._leaving.extend(session for session in sessions if session.finish_reason is None)
            self._changed.notify_all()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run rounds, taking turns with other threads, until `done` returns True."""
        while not done():
            self.next_round(done)

    def next_round(self, done: Callable[[], bool]) -> None:
        """Run a round, or wait for the one that another thread runs; return at once when `done` returns True."""
        with self._changed:
            before = self.rounds
            self._changed.wait_for(lambda: done() or self.rounds != before or not self._is_running)
            if done() or self.rounds != before:
                return
            self._is_running, self._round_began = True, time.monotonic()
        try:
            self.step()
        finally:
            with self._changed:
                self._is_running, self._round_began = False, None
                self.rounds += 1
                self._changed.notify_all()

    def wait_for_work(self, stopped: Callable[[], bool]) -> None:
        """Wait until there is something to run, or until `stopped` returns True."""
        with self._changed:
            self._changed.wait_for(lambda: stopped() or not self.is_idle)

    def wake(self) -> None:
        """Let whoever waits look again."""
        with self._changed:
            self._changed.notify_all()

    def step(self) -> None:
        """Run one round: take up what arrived, extend the texts, and remove what has ended."""
        self._take_up()
        try:
            for session, emitted in self.scheduler.step():
                self.extend(session, emitted)
        finally:
            running = (*self.scheduler.running, *self.scheduler.reading)
            self.scheduler.remove([s for s in running if s.finish_reason is not None])
            for call in self.after_step:
                call()

    def _take_up(self) -> None:
        with self._changed:
            arriving, leaving = list(self._arriving), list(self._leaving)
            self._arriving.clear()
            self._leaving.clear()
        self.scheduler.submit(arriving)
        ended = [session for session in arriving if session.finish_reason is not None]
        for session in leaving:
            if session.finish_reason is None:  # it may have ended in the last round
                session.finish_reason = "cancelled"
                ended.append(session)
        for session in ended:
            session.notify([])
        self.scheduler.remove(leaving)
