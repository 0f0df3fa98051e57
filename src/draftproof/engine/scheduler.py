"""Schedule rows: admit requests, make room for them in the pool, and run the rounds in which they read and decode.

Requests are admitted first come, first served, by space in the pool. When it is full, idle prefixes go first; then the
youngest row gives up its place and comes back later with the same keys and values, so that its text is the same.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from draftproof.core.device import current_device, is_cpu
from draftproof.drafters.pooling import CachingDrafter, DrafterState
from draftproof.engine.draft_length import AutoLength, Costs, DraftLengths
from draftproof.engine.limits import Limits
from draftproof.engine.overlapped_rounds import OverlappedRounds, overlapped_rounds_for
from draftproof.engine.prefill import Prefill, PromptChunk
from draftproof.engine.prefix_cache import MOST_IDLE, PrefixCache
from draftproof.engine.request import Session
from draftproof.engine.round import Clock, Emitted, FinishedRound, Parts, advance
from draftproof.models.cuda_graphs import launches
from draftproof.models.extents import PAGE, pages_for
from draftproof.models.pool import PoolFull, pages_within
from draftproof.models.rows import Read, Rows, open_rows, pooled_shapes
from draftproof.rules import RULES, resolve

RESERVED: int = 256
"""Tokens of output that a row has room for when it enters; a longer text grows, in place where it can."""


@dataclass(slots=True)
class Scheduler:
    """The rows of one engine.

    parts       called for the parts of every round
    lengths     chooses how many tokens are drafted
    prefill     chooses and reads the chunks of prompts
    overlapped  runs rounds that stay on a GPU
    max_batch   rows in the pool at once, those whose prompts are being read included
    max_length  tokens that the model has positions for; None: no limit
    """

    parts: Callable[[], Parts]
    rows: Rows
    lengths: DraftLengths
    prefixes: PrefixCache
    prefill: Prefill
    overlapped: OverlappedRounds
    max_batch: int
    max_length: int | None
    waiting: deque[Session] = field(default_factory=deque)
    reading: list[Session] = field(default_factory=list)
    """Rows whose prompts are not read completely, oldest first."""
    running: list[Session] = field(default_factory=list)
    """Rows that decode, oldest first."""

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to do."""
        return not (self.waiting or self.reading or self.running)

    def step(self) -> list[tuple[Session, Emitted]]:
        """Admit requests, run one round, and return what it emitted for each row."""
        parts = self.parts()
        with current_device(parts.model.device), torch.inference_mode():
            self._admit(parts)
            parts = self._without_unused_states(parts)
            if self.rows.chunk is None and (failed := self._read_whole(parts)):
                return failed
            wanted = self._wanted_lengths()
            stays = self.overlapped.can_run(self.running, parts)
            if self.overlapped.flights and not (stays and self._can_follow(wanted, parts)):
                return self._record(self.overlapped.land_last(self.running))
            lengths = self._lengths_with_room(wanted, parts)
            chunks = self.prefill.chunks(self.reading, self.running, parts)
            running = list(self.running)
            if not running and not chunks:
                return []
            try:
                if stays and (landed := self._device_round(wanted, lengths, chunks, parts)) is not None:
                    return landed
                finished, read = self._host_round(lengths, chunks, parts)
            except Exception as error:  # the pass itself failed: none of its rows can go on
                self.overlapped.drop()
                return _failed([*running, *{s.id: s for s, _ in chunks}.values()], error)
            failed = self._record_reading(chunks, read, parts, finished.seconds)
            return [*self._record(finished), *failed]

    def _without_unused_states(self, parts: Parts) -> Parts:
        """Ask the target for no states where no row has a drafter that could use them.

        Not on a GPU: another set of states is another recording, and states cost it next to nothing.
        """
        if not parts.features.layers or not is_cpu(parts.model.device):
            return parts
        if any(s.request.drafter for s in (*self.running, *self.reading)):
            return parts
        return replace(parts, features=replace(parts.features, layers=()))

    # -------------------------------------------------------------------------------------------------------- a round

    def _can_follow(self, wanted: dict[int, int], parts: Parts) -> bool:
        """Return whether a round can start before the results of the one under way are known."""
        if self.lengths.follow_results(self.running):
            return False
        return self.overlapped.can_follow(self.running, wanted, parts)

    def _device_round(
        self, wanted: dict[int, int], lengths: list[int], chunks: list[PromptChunk], parts: Parts
    ) -> list[tuple[Session, Emitted]] | None:
        """Start a round on the device, read prompts after it, and return what the round before emitted.

        None if it cannot be started, and none is under way.
        """
        rounds, failed = self.overlapped, list[tuple[Session, Emitted]]()
        if not rounds.launch(self.running, wanted, lengths, parts):
            return self._record(rounds.land_last(self.running)) if rounds.flights else None
        if chunks:
            clock = Clock()
            read = self.prefill.run(chunks, parts, clock)
            failed = self._record_reading(chunks, read, parts, clock.seconds)
        if len(rounds.flights) == 1:  # the first: there is none to be read yet
            return failed
        return [*self._record(rounds.land(self.running, is_typical=not chunks)), *failed]

    def _host_round(
        self, lengths: list[int], chunks: list[PromptChunk], parts: Parts
    ) -> tuple[FinishedRound, list[Read]]:
        """Run a round that the host follows, and read chunks of prompts in the same pass."""
        self.overlapped.needs_host = False
        running, clock, before = list(self.running), Clock(), launches.total()
        if not running:
            read = self.prefill.run(chunks, parts, clock)
            return FinishedRound([], [], [], [], clock.seconds, is_typical=False), read
        emitted, read = advance(running, lengths, self.rows, parts, clock, [chunk for _, chunk in chunks])
        is_typical = not chunks and launches.total() == before
        drawn = [row.drafted for row in emitted]
        return FinishedRound(running, emitted, lengths, drawn, clock.seconds, is_typical), read

    def _read_whole(self, parts: Parts) -> list[tuple[Session, Emitted]]:
        """Read the prompts of new rows as a whole, before the round in which they decode; return those that fail."""
        prompts, clock = self.prefill.whole_prompts(self.reading), Clock()
        if not prompts:
            return []
        try:
            read = self.prefill.run(prompts, parts, clock)
        except Exception as error:
            return _failed(self.reading, error)
        return self._record_reading(prompts, read, parts, clock.seconds)

    def _record_reading(
        self, chunks: list[PromptChunk], read: list[Read], parts: Parts, seconds: dict[str, float]
    ) -> list[tuple[Session, Emitted]]:
        """Record what was read; a row whose prompt is read decodes from the next round on.

        Return the requests whose prompts the drafter failed to read.
        """
        failed = self.prefill.record(chunks, read, parts, seconds.get("prefill", 0.0))
        done = {s.id for s in self.reading if s.read >= len(s.request.prompt) - 1}
        self.running += [s for s in self.reading if s.id in done]
        self.reading = [s for s in self.reading if s.id not in done]
        return failed

    def _record(self, finished: FinishedRound) -> list[tuple[Session, Emitted]]:
        """Record a round for its rows, and return what it emitted for each."""
        results = list(zip(finished.sessions, finished.emitted, strict=True))
        for (session, row), asked in zip(results, finished.asked, strict=True):
            session.stats.record_round(row.drafted, row.accepted)
            session.target_outputs = row.target_outputs
            self.lengths.record_draft(session, row.drafted, row.accepted, asked)
            for stage, spent in finished.seconds.items():
                session.stats.seconds[stage] += spent / len(results)
        if results and finished.is_typical:
            self.lengths.record_time(finished.seconds, finished.drawn)
        return results

    # ------------------------------------------------------------------------------------------ entering and leaving

    def submit(self, sessions: Iterable[Session]) -> None:
        """Queue requests. One that could never fit into the pool fails at once."""
        pool = self.rows.pool
        for session in sessions:
            if pool is not None and self._most_tokens(session) > pool.tokens:
                session.finish_reason = "error"
                session.error = (
                    f"request {session.id} may need {self._most_tokens(session)} tokens in the KV pool, which holds "
                    f"{pool.tokens}: ask for fewer max_tokens, or give the engine a larger kv_memory"
                )
            else:
                self.waiting.append(session)

    def remove(self, sessions: Iterable[Session]) -> None:
        """Remove finished and cancelled requests; a finished row stays as an idle prefix until its pages are needed."""
        gone = {session.id: session for session in sessions}
        state = DrafterState(self.parts().drafter)
        for session in [s for s in (*self.reading, *self.running) if s.id in gone]:
            if self._can_stay(session):
                self._rest(session, state)
                if len(self.prefixes.idle) > MOST_IDLE:
                    self._free_prefix()
            else:
                self.rows.leave(session.id)
                state.forget([session.id])
        for session in self.waiting:
            if session.id in gone and session.saved is not None:
                session.saved = None
                state.forget([session.id])
        self.waiting = deque(s for s in self.waiting if s.id not in gone)
        self.reading = [s for s in self.reading if s.id not in gone]
        self.running = [s for s in self.running if s.id not in gone]
        if not self.running:
            self.overlapped.drop()
        self.lengths.forget(gone)

    def _rest(self, session: Session, state: DrafterState) -> None:
        """Keep a row as an idle prefix, without the room after its text."""
        pool = self.rows.pool
        assert pool is not None
        length = min(pool.rows[session.id].length, len(session.tokens))
        self.rows.truncate([session.id], [length])
        pool.trim(session.id)
        state.rest(session.id)
        self.prefixes.add(session, length)

    def clear_prefixes(self) -> None:
        """Free the pages of all idle prefixes."""
        while self._free_prefix():
            pass

    def _can_stay(self, session: Session) -> bool:
        shared = self.rows.shares_prefixes and self.prefixes.enabled
        return shared and session.finish_reason != "error" and session.request.source is None and session.read >= PAGE

    def _most_tokens(self, session: Session) -> int:
        """Return the tokens that a request may hold at once: its text, and the widest draft after it."""
        most = session.prompt_length + session.request.max_tokens
        return most if self.max_length is None else min(most, self.max_length)

    def _admit(self, parts: Parts) -> None:
        while self.waiting and len(self.reading) + len(self.running) < self.max_batch:
            session, comes_back = self.waiting[0], self.waiting[0].saved is not None
            if not self._enter(session, parts):
                return  # first come, first served: nobody overtakes
            self.waiting.popleft()
            if session.stats.rounds == 0 and session.read == 0:
                session.stats.queue_seconds = time.perf_counter() - session.created
            is_new_and_whole = self.rows.chunk is None and not comes_back
            if session.read < len(session.request.prompt) - 1 or is_new_and_whole:
                self.reading.append(session)
            else:
                self.running.append(session)

    def _enter(self, session: Session, parts: Parts) -> bool:
        """Give a request its place in the pool; False if there is no room for it now."""
        reserved = min(self._most_tokens(session), len(session.tokens) + RESERVED)
        while True:
            try:
                if session.saved is None:
                    self.rows.enter(session.id, reserved, session.request.source)
                    return True
                if self._may_stay(reserved):
                    self.rows.restore(session.id, session.saved)
                    session.saved = None
                    return True
            except PoolFull:
                pass
            if session.saved is None:
                found = self.prefixes.longest(session, [*self.running, *self.reading], self.rows)
                if found is not None:
                    self.prefixes.touch(found.holder)  # the last to be freed: the request is about to take it over
            if not self._free_prefix():
                return False

    def _may_stay(self, tokens: int) -> bool:
        """Return whether a row that comes back has room to grow: it would soon give up its place again without."""
        pool = self.rows.pool
        return pool is None or not self.running or pool.extents.free_pages >= pages_for(tokens)

    def _free_prefix(self) -> bool:
        """Free the idle prefix that was used least recently; False if there is none."""
        oldest = self.prefixes.pop_oldest()
        if oldest is None:
            return False
        self.rows.leave(oldest)
        DrafterState(self.parts().drafter).forget([oldest])
        return True

    # --------------------------------------------------------------------------------------------------- making room

    def _wanted_lengths(self) -> dict[int, int]:
        """Choose draft lengths; on a GPU "auto" is limited to lengths that are recorded."""
        chosen = zip(self.running, self.lengths.choose(self.running), strict=True)
        recorded = self.overlapped.recorded_length
        return {s.id: recorded(k) if self.lengths.is_auto(s) else k for s, k in chosen}

    def _lengths_with_room(self, wanted: dict[int, int], parts: Parts) -> list[int]:
        """Limit draft lengths, and make room for each row's draft; rows for which there is none are preempted."""
        limited = {session.id: self._limited(session, wanted[session.id]) for session in self.running}
        for session in list(self.running):
            if session.saved is None:  # not preempted for an older one
                tokens = len(session.tokens) + limited[session.id]
                self._make_room(session, max(tokens, self.overlapped.needed(session)), parts)
        return [limited[s.id] for s in self.running]

    def _make_room(self, session: Session, tokens: int, parts: Parts) -> None:
        while True:
            try:
                return self.rows.ensure(session.id, tokens)
            except PoolFull:
                if self._free_prefix():
                    continue
                youngest = max((*self.running, *self.reading), key=lambda s: s.id)
                self._preempt(youngest, parts)
                if youngest is session:
                    return None

    def _preempt(self, session: Session, parts: Parts) -> None:
        """Take a row out of the pool; it is the next to come back."""
        session.saved = self.rows.save(session.id)
        session.stats.preemptions += 1
        DrafterState(parts.drafter).suspend(session.id)
        self.running = [s for s in self.running if s is not session]
        self.reading = [s for s in self.reading if s is not session]
        self.waiting.appendleft(session)

    def _limited(self, session: Session, k: int) -> int:
        """Limit a draft length to what the request and the model have room for: the round adds one token more."""
        room = session.room - 1
        return max(0, min(k, room if self.max_length is None else min(room, self.max_length - len(session.tokens))))


def _failed(sessions: Iterable[Session], error: Exception) -> list[tuple[Session, Emitted]]:
    """Return what a round that failed as a whole gives to its rows."""
    fault = f"the round failed: {type(error).__name__}: {error}"
    return [(session, Emitted([], fault=fault, cause=error)) for session in sessions]


def scheduler_for(
    parts: Callable[[], Parts], limits: Limits, num_draft_tokens: int | str, max_length: int | None
) -> Scheduler:
    """Make a scheduler, and allocate the pools of target and drafter within the memory that they may take."""
    model, drafter = parts().model, parts().drafter
    pages = 0
    if shapes := pooled_shapes(model):
        own = 2 * drafter.kv_bytes() if isinstance(drafter, CachingDrafter) else 0
        bytes_per_token = sum(shape.bytes for shape in shapes) + own
        pages = pages_within(limits.kv_memory, bytes_per_token, limits.max_batch, max_length, model.device)
    if isinstance(drafter, CachingDrafter):
        # Twice the pages, and two for each row: a draft ends after its text, and runs must be found at once.
        drafter.open_pool(2 * (pages + limits.max_batch))
    rows, assumed = open_rows(model, pages), getattr(model, "assumed_costs", {})
    coupled = resolve(parts().rule) is RULES["coupled"]
    prefixes = PrefixCache()
    return Scheduler(
        parts,
        rows,
        DraftLengths(num_draft_tokens, AutoLength(coupled, Costs(**assumed), fixed=Costs(**assumed))),
        prefixes,
        Prefill(rows, prefixes, limits.max_batch, limits.max_prefill_tokens),
        overlapped_rounds_for(rows, limits.max_batch, max_length),
        limits.max_batch,
        max_length,
    )
