"""Schedule rows: admit requests, read their prompts chunk by chunk, run a round for the others, and make room.

Requests are admitted first come, first served, by space in the pool. When it is full, idle prefixes go first; then the
youngest row gives up its place and comes back later with the same keys and values, so that its text is the same.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftproof.core.device import current_device, is_cpu
from draftproof.core.sampling import is_whole
from draftproof.drafters.interface import TargetOutputs
from draftproof.drafters.pooling import CachingDrafter, DrafterState
from draftproof.engine.draft_length import AutoLength, Costs, DraftLengths
from draftproof.engine.prefix_cache import MOST_IDLE, Found, PrefixCache
from draftproof.engine.request import Session, TokenLogprobs
from draftproof.engine.round import Clock, Emitted, Parts, advance
from draftproof.models.cuda_graphs import launches
from draftproof.models.extents import PAGE, pages_for
from draftproof.models.pool import PoolFull, pages_within
from draftproof.models.rows import Read, Reading, Rows, open_rows, pooled_shapes
from draftproof.rules import RULES, resolve

if TYPE_CHECKING:
    from draftproof.engine.device_round import DeviceRounds, Flight

RESERVED: int = 256
"""Tokens of output that a row has room for when it enters; a longer text grows, in place where it can."""

CHUNKS_ALONE: int = 8
"""Chunks of prompts that are read in one pass while no row decodes: larger passes are hardly faster on a CPU. More are
not read beside rows that are streamed either."""

PREFILL_PER_ROW: int = 4
"""Tokens of prompts read in a round for each row that decodes: a round then takes about three times as long at most."""

PREFILL_UNWATCHED: int = 16
"""Tokens of prompts read in a round for each row of a full batch, while no text is streamed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine.

    max_batch           rows that advance together
    max_length          tokens of a text, prompt included; None: the model's own limit
    kv_memory           memory of the KV pools: bytes, or a share of what is free when the first request comes
    max_prefill_tokens  tokens of prompts that are read in one round, in whole chunks; None: beside rows that are
                        streamed one chunk for each prompt that is being read, 8 at most (or 4 tokens for each row, if
                        that is more), so that their tokens keep coming
    """

    max_batch: int = 8
    max_length: int | None = None
    kv_memory: int | float = 0.25
    max_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_length", "max_prefill_tokens"):
            value = getattr(self, name)
            unlimited = name != "max_batch" and value is None
            if not unlimited and not (is_whole(value) and int(value or 0) >= 1):
                raise ValueError(f"{name} must be a whole number ≥ 1; got {value!r}")
        share = isinstance(self.kv_memory, float) and 0 < self.kv_memory <= 1
        if not share and not (is_whole(self.kv_memory) and self.kv_memory >= 1):
            raise ValueError(
                f"kv_memory must be a number of bytes, or a share of the free memory in (0, 1]; got {self.kv_memory!r}"
            )


@runtime_checkable
class Encoder(Protocol):
    """A target with an encoder: a request's prompt is the encoder's input, and the decoder starts from `start`."""

    @property
    def start(self) -> int: ...


@dataclass(slots=True)
class Scheduler:
    """The rows of one engine.

    parts               called for the parts of every round
    max_batch           rows in the pool at once, those whose prompts are being read included
    max_length          tokens that the model has positions for; None: no limit
    max_prefill_tokens  tokens of prompts read beside decoding rows in one round, in whole chunks; None: see `Limits`
    """

    parts: Callable[[], Parts]
    rows: Rows
    lengths: DraftLengths
    max_batch: int
    max_length: int | None
    max_prefill_tokens: int | None = None
    reuse_prefixes: bool = True
    waiting: deque[Session] = field(default_factory=deque)
    reading: list[Session] = field(default_factory=list)
    """Rows whose prompts are not read completely, oldest first."""
    running: list[Session] = field(default_factory=list)
    """Rows that decode, oldest first."""
    prefixes: PrefixCache = field(default_factory=PrefixCache)
    device_rounds: "DeviceRounds | None" = None
    """Rounds that need nothing of the host, where rows lie in a pool on a GPU."""
    flight: "Flight | None" = None
    """The round under way there."""
    needs_host: bool = False
    """Whether the next round must be run by the host: a row has a fault, or its draft model has no room."""

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
            stays = self._stays_on_device(parts)
            if self.flight is not None and not (stays and self._can_follow(self.flight, wanted, parts)):
                return self._land_last(self.flight)
            lengths = self._lengths_with_room(wanted, parts)
            reading = self._chunks(parts)
            clock = Clock()
            running = list(self.running)
            if not running and not reading:
                return []
            before = launches.total()
            try:
                if stays:
                    landed = self._device_round([wanted[s.id] for s in running], lengths, parts, clock, reading)
                    if landed is not None:
                        return landed
                self.needs_host = False
                emitted, read = self._round(running, lengths, parts, clock, reading)
            except Exception as error:  # the pass itself failed: none of its rows can go on
                self._drop_flight()
                return _failed([*running, *{s.id: s for s, _ in reading}.values()], error)
            failed = self._record_reading(reading, read, parts, clock)
            is_typical = not reading and launches.total() == before
            self._record(running, emitted, lengths, clock.seconds, is_typical=is_typical)
            return [*zip(running, emitted, strict=True), *failed]

    def _without_unused_states(self, parts: Parts) -> Parts:
        """Ask the target for no states where no row has a drafter that could use them.

        Not on a GPU: another set of states is another recording, and states cost it next to nothing.
        """
        if not parts.features.layers or not is_cpu(parts.model.device):
            return parts
        if any(s.request.drafter for s in (*self.running, *self.reading)):
            return parts
        return replace(parts, features=replace(parts.features, layers=()))

    def _round(
        self,
        running: list[Session],
        lengths: list[int],
        parts: Parts,
        clock: Clock,
        reading: list[tuple[Session, Reading]],
    ) -> tuple[list[Emitted], list[Read]]:
        chunks = [chunk for _, chunk in reading]
        if running:
            return advance(running, lengths, self.rows, parts, clock, chunks)
        with clock("prefill"):
            return [], self.rows.score([], layers=parts.features.layers, reading=chunks).read

    # ---------------------------------------------------------------------------------- rounds that stay on a GPU

    def _stays_on_device(self, parts: Parts) -> bool:
        """Return whether the next round needs nothing of the host between its stages."""
        rounds = self.device_rounds
        if rounds is None or not self.running or self.needs_host:
            return False
        return rounds.refusal(self.running, parts) is None

    def _can_follow(self, flight: "Flight", wanted: dict[int, int], parts: Parts) -> bool:
        """Return whether a round can start before the results of the one under way are known."""
        assert self.device_rounds is not None
        if self.lengths.follow_results(self.running):
            return False
        lengths = self.device_rounds.limited(self.running, [wanted[s.id] for s in self.running])
        return self.device_rounds.can_follow(flight, self.running, lengths, parts)

    def _device_round(
        self,
        wanted: list[int],
        lengths: list[int],
        parts: Parts,
        clock: Clock,
        reading: list[tuple[Session, Reading]],
    ) -> list[tuple[Session, Emitted]] | None:
        """Start a round, and return what the one before emitted; None if it cannot be started, and none is under way.

        wanted   draft lengths before they are limited to the room that is left, as far as the host knows; the device
                 knows better, and an end that is near would be a recording of its own
        reading  prompts that are read between the two rounds
        """
        rounds = self.device_rounds
        assert rounds is not None
        landing, running = self.flight, list(self.running)
        self.flight = rounds.launch(running, rounds.limited(running, wanted), lengths, parts)
        if self.flight is None:
            self.needs_host = True
            return None if landing is None else self._land_last(landing)
        failed: list[tuple[Session, Emitted]] = []
        if reading:
            with clock("prefill"):
                layers, chunks = parts.features.layers, [chunk for _, chunk in reading]
                read = self.rows.score([], layers=layers, reading=chunks).read
            failed = self._record_reading(reading, read, parts, clock)
        return [*self._land(landing, is_typical=not reading), *failed]

    def _land(self, flight: "Flight | None", *, is_typical: bool) -> list[tuple[Session, Emitted]]:
        """Wait for a round, and return what it emitted."""
        if flight is None or self.device_rounds is None:
            return []
        results, faulty = self.device_rounds.land(flight, self.running)
        self.needs_host |= faulty
        rows, emitted = [session for session, _ in results], [each for _, each in results]
        asked = [flight.asked[session.id] for session in rows]
        is_typical = is_typical and flight.is_typical
        self._record(rows, emitted, asked, flight.seconds(), is_typical=is_typical, width=flight.K)
        return results

    def _land_last(self, flight: "Flight") -> list[tuple[Session, Emitted]]:
        """Wait for the round under way without starting another: the host then knows all rows."""
        try:
            return self._land(flight, is_typical=True)
        finally:
            self._drop_flight()

    def _drop_flight(self) -> None:
        self.flight = None
        if self.device_rounds is not None:
            self.device_rounds.clear()

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
            self._drop_flight()
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
        shared = self.rows.shares_prefixes and self.reuse_prefixes
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
            if session.saved is None and (found := self._longest_prefix(session)) is not None:
                self.prefixes.touch(found.holder)  # the last to be freed: the request is about to take it over
            if not self._free_prefix():
                return False

    def _may_stay(self, tokens: int) -> bool:
        """Return whether a row that comes back has room to grow: it would soon give up its place again without."""
        pool = self.rows.pool
        return pool is None or not self.running or pool.extents.free_pages >= pages_for(tokens)

    def _longest_prefix(self, session: Session) -> Found | None:
        """Find the row that holds most of a prompt; None if there is none, or if the prompt is read in full."""
        if not self.reuse_prefixes or _scores_prompt(session) or not self.rows.shares_prefixes:
            return None
        return self.prefixes.longest(session, [*self.running, *self.reading], self.rows)

    def _reuse(self, session: Session, found: Found, parts: Parts) -> None:
        """Take over a prefix of the prompt that another row holds, when the first chunk is to be read."""
        assert self.rows.pool is not None
        if session.request.drafter and not DrafterState(parts.drafter).adopt(session, found.holder, found.length):
            return
        self.rows.pool.share(found.holder, session.id, found.length)
        self.prefixes.touch(found.holder)
        session.read = session.stats.cached_tokens = found.length
        session.whole_chunks = min(found.length, found.whole_chunks)

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
        wanted = {s.id: k for s, k in zip(self.running, self.lengths.choose(self.running), strict=True)}
        if self.device_rounds is not None:
            for session in self.running:
                if self.lengths.is_auto(session):
                    wanted[session.id] = self.device_rounds.recorded_length(wanted[session.id])
        return wanted

    def _lengths_with_room(self, wanted: dict[int, int], parts: Parts) -> list[int]:
        """Limit draft lengths, and make room for each row's draft; rows for which there is none are preempted."""
        limited = {session.id: self._limited(session, wanted[session.id]) for session in self.running}
        for session in list(self.running):
            if session.saved is None:  # not preempted for an older one
                tokens = len(session.tokens) + limited[session.id]
                if self.device_rounds is not None:
                    tokens = max(tokens, self.device_rounds.needed(session))
                self._make_room(session, tokens, parts)
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

    # ---------------------------------------------------------------------------------------------- reading prompts

    def _read_whole(self, parts: Parts) -> list[tuple[Session, Emitted]]:
        """Read the prompts of new rows as a whole, before the round in which they decode; return those that fail."""
        reading = [(s, Reading(s.id, s.request.prompt[:-1], _scores_prompt(s))) for s in self.reading]
        if not reading:
            return []
        clock = Clock()
        try:
            with clock("prefill"):
                scores = self.rows.score([], layers=parts.features.layers, reading=[chunk for _, chunk in reading])
        except Exception as error:
            return _failed([session for session, _ in reading], error)
        return self._record_reading(reading, scores.read, parts, clock)

    def _chunks(self, parts: Parts) -> list[tuple[Session, Reading]]:
        """Choose the chunks of prompts that are read in this round, oldest request first.

        Chunks end at fixed positions, so that a chunk's keys and values depend on its tokens alone. The first is always
        read, others if there is time: a token takes longer the more there are before it.
        """
        if self.rows.chunk is None:
            return []
        chunks: list[tuple[Session, Reading]] = []
        budget: float = self._prefill_budget(self.rows.chunk)
        for session in self.reading:
            if budget <= 0:
                break
            if session.read == 0:
                found = self._longest_prefix(session)
                if self._gains_by_waiting(session, found, chunks):
                    break
                if found is not None:
                    self._reuse(session, found, parts)
            at, stop = session.read, len(session.request.prompt) - 1
            while at < stop and budget > 0:
                end = min(stop, self.rows.chunk_around(at)[1])
                cost = self.rows.reading_cost(at, end)
                if chunks and cost > 2 * budget:  # less than half of it is within the budget
                    return chunks
                chunks.append((session, Reading(session.id, session.request.prompt[at:end], _scores_prompt(session))))
                budget -= cost
                at = end
        return chunks

    def _gains_by_waiting(self, session: Session, found: Found | None, chunks: list[tuple[Session, Reading]]) -> bool:
        """Return whether chunks that are read in this round hold more of a prompt than any row does now."""
        if not self.reuse_prefixes or _scores_prompt(session) or not self.rows.shares_prefixes:
            return False
        most = self.prefixes.most_shared(session, [s for s, _ in chunks], self.rows)
        return most > (0 if found is None else found.length)

    def _prefill_budget(self, size: int) -> int:
        """Return how many tokens of prompts are read in this round.

        Where nobody watches the tokens come, the order of work does not matter, and large passes save overhead. Where
        somebody does, a round has a token for each row that decodes and a chunk for each whose prompt is being read: a
        long prompt does not hold up the others, and many requests that come together soon decode together.
        """
        if self.max_prefill_tokens is not None:
            return max(size, self.max_prefill_tokens)
        if all(session.listener is None for session in self.running):
            return max(CHUNKS_ALONE * size, PREFILL_UNWATCHED * self.max_batch)
        return max(size * min(CHUNKS_ALONE, len(self.reading)), PREFILL_PER_ROW * len(self.running))

    def _is_whole_chunk(self, start: int, tokens: int) -> bool:
        return self.rows.chunk_around(start) == (start, start + tokens)

    def _record_reading(
        self, reading: list[tuple[Session, Reading]], read: list[Read], parts: Parts, clock: Clock
    ) -> list[tuple[Session, Emitted]]:
        """Note what was read; a row whose prompt is read decodes from the next round on.

        Return the requests whose prompts the drafter failed to read.
        """
        failed: dict[int, tuple[Session, Emitted]] = {}
        state, total = DrafterState(parts.drafter), max(1, sum(len(chunk.tokens) for _, chunk in reading))
        for (session, chunk), states in zip(reading, read, strict=True):
            n = len(chunk.tokens)
            if session.read == session.whole_chunks and self._is_whole_chunk(session.read, n):
                session.whole_chunks += n
            session.read += n
            if states.hidden and session.request.drafter:
                session.target_outputs = _joined(session.target_outputs, session.read, states.hidden)
            if states.logits is not None and chunk.scored:
                session.prompt_logprobs += _prompt_logprobs(session, session.read - n, states)
            try:
                if session.request.drafter and session.id not in failed and state.follow(session, session.read):
                    session.target_outputs = None
            except Exception as error:  # a caller's drafter may raise anything; the request ends alone
                fault = f"its drafter failed: {type(error).__name__}: {error}"
                failed[session.id] = session, Emitted([], fault=fault, cause=error)
            session.stats.seconds["prefill"] += clock.seconds.get("prefill", 0.0) * n / total
        done = {s.id for s in self.reading if s.read >= len(s.request.prompt) - 1}
        self.running += [s for s in self.reading if s.id in done]
        self.reading = [s for s in self.reading if s.id not in done]
        return list(failed.values())

    def _record(
        self,
        rows: list[Session],
        emitted: list[Emitted],
        asked: list[int],
        seconds: dict[str, float],
        *,
        is_typical: bool,
        width: int | None = None,
    ) -> None:
        """Record a round for its rows; `width`: draft tokens that were drawn for each, if not as many as each has."""
        for session, row, length in zip(rows, emitted, asked, strict=True):
            session.stats.record_round(row.drafted, row.accepted)
            session.target_outputs = row.target_outputs
            self.lengths.record_draft(session, row.drafted, row.accepted, length)
            for stage, spent in seconds.items():
                session.stats.seconds[stage] += spent / len(rows)
        if rows and is_typical:
            drafted = [row.drafted for row in emitted] if width is None else [width] * len(rows)
            self.lengths.record_time(seconds, drafted)


def _failed(sessions: Iterable[Session], error: Exception) -> list[tuple[Session, Emitted]]:
    """Return what a round that failed as a whole gives to its rows."""
    fault = f"the round failed: {type(error).__name__}: {error}"
    return [(session, Emitted([], fault=fault, cause=error)) for session in sessions]


def _joined(before: TargetOutputs | None, stop: int, hidden: tuple[Tensor, ...]) -> TargetOutputs:
    """Return the target's states at a prompt's tokens up to `stop`: those of earlier chunks, then these."""
    if before is None:
        return TargetOutputs(stop, None, hidden)
    pairs = zip(before.hidden, hidden, strict=True)
    return TargetOutputs(stop, None, tuple(torch.cat(pair) for pair in pairs))


def _scores_prompt(session: Session) -> bool:
    return session.request.prompt_logprobs is not None


def _prompt_logprobs(session: Session, first: int, read: Read) -> list[TokenLogprobs]:
    """Return the log-probabilities of the prompt's tokens that follow those just read."""
    assert read.logits is not None
    more = session.request.prompt_logprobs or 0
    followers = session.request.prompt[first + 1 : first + 1 + len(read.logits)]
    raw = read.logits.double().log_softmax(-1)
    own = raw.gather(1, torch.tensor(followers, device=raw.device)[:, None])[:, 0].tolist()
    best = raw.topk(more) if more else None
    top = (
        [[] for _ in followers]
        if best is None
        else [
            list(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    )
    return [TokenLogprobs(token, value, None, row) for token, value, row in zip(followers, own, top, strict=True)]


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
    return Scheduler(
        parts,
        rows,
        DraftLengths(
            num_draft_tokens,
            AutoLength(resolve(parts().rule) is RULES["coupled"], Costs(**assumed), fixed=Costs(**assumed)),
        ),
        limits.max_batch,
        max_length,
        limits.max_prefill_tokens,
        device_rounds=_device_rounds(rows, limits.max_batch, max_length),
    )


def _device_rounds(rows: Rows, max_batch: int, max_length: int | None) -> "DeviceRounds | None":
    if rows.pool is None or is_cpu(rows.pool.device):
        return None
    from draftproof.engine.device_round import DeviceRounds
    from draftproof.models.device_rows import DeviceRows

    return DeviceRounds(rows, max_batch, max_length) if isinstance(rows, DeviceRows) else None
