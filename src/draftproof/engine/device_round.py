"""Rounds that stay on a GPU: drafting, scoring, verification and the next round's inputs, without the host between.

The host replays recorded work and reads what it emitted one round later, while the next round runs. A row that has
ended in the meantime costs an empty row for that round. Its tokens, random numbers and verdicts are those of `advance`.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.core.device import AsyncCopy, Mark, to_device
from draftproof.core.distribution import Distribution
from draftproof.core.types import Draft
from draftproof.drafters.device_draft import DrafterPart
from draftproof.engine.draft_length import DEPTHS
from draftproof.engine.request import Session
from draftproof.engine.round import Emitted, NoDrafter, Parts, rule_of
from draftproof.kernels import round_steps
from draftproof.kernels.round_steps import Reads
from draftproof.kernels.round_table import DRAFT, LIMIT, LINES
from draftproof.models.cuda_graphs import CapturedGraphs, GraphCache, RecordedStages, launches
from draftproof.models.device_pass import size_class
from draftproof.models.device_rows import DeviceRows
from draftproof.rules.device_verify import MOST_DRAFTED, DeviceVerification, refusal, verify

AHEAD: Final = 2 * (MOST_DRAFTED + 1)
"""Tokens that a row may grow by before the host knows of it: the rounds under way are two at most."""

SERVED_BY_WIDER: Final = 64
"""Rounds in which a wider recording serves a draft length that was not recorded."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A round whose results the host has not read.

    asked       draft tokens asked for, by request
    K           draft tokens that were drawn, a row
    hidden      the target's states at the tokens that were read, for a head that was not there to read them
    is_typical  whether its time says something about later ones: nothing was recorded
    """

    sessions: list[Session]
    asked: dict[int, int]
    K: int
    hidden: tuple[Tensor, ...]
    parts: Parts
    emitted: AsyncCopy
    marks: list[Mark]
    is_typical: bool

    def seconds(self) -> dict[str, float]:
        """Return the device's seconds by stage, once the results are there."""
        stages = ("draft", "score") if self.K else ("score",)
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return {stage: first.seconds_until(second) for stage, (first, second) in zip(stages, pairs, strict=True)}


@dataclass(slots=True)
class DeviceRounds:
    """Rounds on a device for up to `most_rows` rows of one engine; `max_length`: tokens of a text, at most."""

    rows: DeviceRows
    most_rows: int
    max_length: int | None
    _seats: list[int] = field(default_factory=list)
    """The request of each column of the table."""
    _asked: list[int] = field(default_factory=list)
    _table: Int[Tensor, "9 N"] = field(init=False)
    _verification: DeviceVerification = field(init=False)
    _drafting: tuple[object, DrafterPart | str | None] | None = None
    _traits: tuple[Hashable, Hashable] = ((), ())
    _graphs: CapturedGraphs = field(default_factory=CapturedGraphs)
    _recorded: dict[Hashable, RecordedStages] = field(default_factory=dict)
    _wanted: Counter[Hashable] = field(default_factory=Counter)
    """How often each recording was wanted."""
    _checked: tuple[Any, str | None] | None = None

    def __post_init__(self) -> None:
        N, device = size_class(self.most_rows), self.rows.pool.device
        self._table = torch.zeros((LINES, N), dtype=torch.long, device=device)
        self._verification = DeviceVerification(N, device)

    # ------------------------------------------------------------------------------------------- who stays on it

    def refusal(self, sessions: Sequence[Session], parts: Parts) -> str | None:
        """Return why a round of these rows needs the host between its stages; None if it does not."""
        self._drafting_of(parts.drafter)
        key = ([session.id for session in sessions], parts)
        if self._checked is None or self._checked[0] != key:
            self._checked = key, self._found_refusal(sessions, parts)
        return self._checked[1] or _graph_cache(parts).refusal

    def _found_refusal(self, sessions: Sequence[Session], parts: Parts) -> str | None:
        if parts.targets is not None:
            return "the target's distributions are made by another host"
        if parts.features.top:
            return f"{type(parts.drafter).__name__} reads the target's likeliest tokens"
        if any(s.request.allowed is not None for s in sessions):
            return "a grammar is asked for every token"
        if any(s.request.logprobs is not None for s in sessions):
            return "log-probabilities are asked for"
        rules = [rule_of(session, parts) for session in sessions]
        if any(rule != rules[0] for rule in rules) or len({s.request.drafter for s in sessions}) > 1:
            return "rows have different rules"
        drafting = self._drafting_of(parts.drafter)
        if sessions[0].request.drafter and isinstance(drafting, str):
            return drafting
        return refusal([session.sampling for session in sessions], rules[0], self.rows.vocab_size, self._table.device)

    def limited(self, sessions: Sequence[Session], lengths: Sequence[int]) -> list[int]:
        """Return the draft lengths of a round: none where nothing drafts."""
        drafts = self._drafting is not None and self._drafting[1] is not None and sessions[0].request.drafter
        return [min(k, MOST_DRAFTED) if drafts else 0 for k in lengths]

    def recorded_length(self, k: int) -> int:
        """Return the draft length to take instead of k where "auto" chose it: every length is a recording."""
        return max(length for length in DEPTHS if length <= k)

    def _drafting_of(self, drafter: Any) -> DrafterPart | str | None:
        """Return a drafter's part of the rounds, or why it has none; None for plain decoding."""
        if self._drafting is None or self._drafting[0] is not drafter or not _is_current(self._drafting[1]):
            make = getattr(drafter, "device_drafting", None)
            made = f"{type(drafter).__name__} drafts on the host" if make is None else make(self._table.shape[1])
            self._drafting = drafter, None if isinstance(drafter, NoDrafter) else made
            self._recorded.clear()
        return self._drafting[1]

    def needed(self, session: Session) -> int:
        """Return the tokens that a row needs room for while rounds are under way."""
        return min(len(session.tokens) + AHEAD, session.prompt_length + session.request.max_tokens)

    def can_follow(self, flight: Flight, sessions: Iterable[Session], lengths: Sequence[int], parts: Parts) -> bool:
        """Return whether a round can follow one whose results the host does not know: no row has to move for it."""
        if flight.parts != parts or (max(lengths) and not flight.K):
            return False  # a drafter that has not followed reads on first
        for session in sessions:
            needed = self.needed(session)
            if not self.rows.fits(session.id, needed):
                return False
            if flight.K and session.id in self._seats and not _drafter(parts).device_fits(session.id, needed):
                return False
        return True

    # --------------------------------------------------------------------------------------------------- a round

    def launch(self, sessions: list[Session], wanted: list[int], asked: list[int], parts: Parts) -> Flight | None:
        """Start a round for these rows; None if the draft model has no room for one of them.

        wanted  draft lengths
        asked   the same, limited to the room that is left, for the record
        """
        before, rule = launches.total(), str(rule_of(sessions[0], parts))
        if not self._seat(sessions, wanted, parts):
            return None
        B = size_class(len(sessions))
        K = self._recorded_near(max(wanted), B, rule)
        key = B, K, rule, *self._traits
        if key not in self._recorded:
            self._recorded[key] = RecordedStages(_graph_cache(parts), self._graphs)
        score = partial(self._score, B, rule)
        stages = [partial(self._draft, B, K, rule == "coupled"), score] if K else [score]
        device = self._table.device
        marks = [Mark(device)]
        widest = self._table[:1, :1].expand(B, K + 1)
        emitted, *hidden = self._recorded[key].run(stages, widest, lambda: marks.append(Mark(device)))
        copy = AsyncCopy(emitted[: len(sessions)])
        kept = tuple(states[: len(sessions)].clone() for states in hidden)  # the next round overwrites them
        by_request = {session.id: k for session, k in zip(sessions, asked, strict=True)}
        return Flight(list(sessions), by_request, K, kept, parts, copy, marks, launches.total() == before)

    def _recorded_near(self, K: int, B: int, rule: str) -> int:
        """Return the width of the recording that serves drafts of up to K tokens.

        A recording takes as long as several rounds: until a length was wanted so often, a slightly wider one serves.
        """
        key = B, K, rule, *self._traits
        self._wanted[key] += 1
        if K and key not in self._recorded and self._wanted[key] <= SERVED_BY_WIDER:
            for wider in DEPTHS:
                if K < wider <= 1.5 * K and (B, wider, rule, *self._traits) in self._recorded:
                    return wider
        return K

    def _draft(self, B: int, K: int, shared: bool) -> tuple[Tensor, ...]:
        """Draw the drafts of all rows that have not ended."""
        draft = self._part().draft(K, self._table[:, :B], self._traits[1], shared=shared)
        q = draft.q
        assert q is not None
        return draft.tokens, draft.lengths, q.logits, q.scale, q.cutoff, q.lse, q.point

    def _score(self, B: int, rule: str, *drafted: Tensor) -> tuple[Tensor, ...]:
        """Score and verify the drafts, and write where the next round starts; return what the host is to know.

        Where nothing was drafted, a head is not run: the states that it will want follow.
        """
        table, draft, layers = self._table[:, :B], self._drafted(B, drafted), self._layers()
        parameters = self._verification.parameters(B, self._traits[0])
        tokens, places = round_steps.begin_scoring(table, draft, self.rows.vocab_size, parameters)
        forward = self.rows.launch(tokens, places, layers=layers)
        verdict = verify(forward.logits, draft, rule, parameters)
        reads: Reads = "later" if not drafted else "at once" if layers else "when it drafts"
        emitted, counts = round_steps.conclude(table, verdict, draft.lengths, reads)
        if reads == "at once":
            self._part().read(forward.hidden, verdict.tokens, torch.stack([table[DRAFT], places[1], counts]))
        return (emitted,) if drafted else (emitted, *forward.hidden)

    def _drafted(self, B: int, drafted: tuple[Tensor, ...]) -> Draft:
        if not drafted:
            nothing = self._table.new_zeros(B)
            return Draft(nothing.new_empty((B, 0)), nothing)
        tokens, lengths, logits, scale, cutoff, lse, point = drafted
        return Draft(tokens, lengths, Distribution(logits, scale, cutoff, lse, point, self._part().vocab))

    def _layers(self) -> tuple[int, ...]:
        """Return the target's layers whose states the drafter of this round reads."""
        return self._part().layers if self._traits[1] else ()

    def _part(self) -> DrafterPart:
        assert self._drafting is not None
        assert isinstance(self._drafting[1], DrafterPart)
        return self._drafting[1]

    def land(self, flight: Flight, running: Iterable[Session]) -> tuple[list[tuple[Session, Emitted]], bool]:
        """Wait for a round; return what it emitted for the rows that still run, and whether one of them has a fault.

        Such a row is where it was before, and takes no part in later rounds: `advance` finds out what is wrong with it.
        """
        still = {session.id for session in running}
        results, faulty = [], False
        for b, (session, row) in enumerate(zip(flight.sessions, flight.emitted.read().tolist(), strict=True)):
            if session.id not in still:
                continue
            *tokens, count, drafted, behind, fault = row
            faulty |= bool(fault)
            self.rows.keep([session.id], [count])
            if flight.K:
                _drafter(flight.parts).device_recorded(session.id, len(session.tokens) + count - behind)
            elif flight.hidden and count:
                missed = tuple(states[b, :count] for states in flight.hidden)
                _drafter(flight.parts).device_missed(session, missed)
            if count:
                results.append((session, Emitted(tokens[:count], drafted, count - 1)))
        return results, faulty

    def clear(self) -> None:
        """Forget the rows: the next round starts from what the host knows."""
        if self._seats and self._drafting is not None and isinstance(self._drafting[1], DrafterPart):
            self._drafting[1].hand_back(self._seats)
        self._seats, self._asked = [], []

    # ----------------------------------------------------------------------------------------------- the table

    def _seat(self, sessions: list[Session], lengths: list[int], parts: Parts) -> bool:
        """Give each row a column of the table; columns of rows that were in the last round are moved, not known."""
        seats = [session.id for session in sessions]
        if seats == self._seats:
            if lengths != self._asked:
                self._table[LIMIT, : len(seats)].copy_(to_device(lengths, self._table.device))
                self._asked = lengths
            return True
        fresh = [session for session in sessions if session.id not in self._seats]
        places = {session.id: (0, 1) for session in fresh}
        if max(lengths) and fresh:
            needed = [self.needed(session) for session in fresh]
            found = _drafter(parts).device_places(fresh, needed)
            if found is None:
                return False
            places = {session.id: place for session, place in zip(fresh, found, strict=True)}
        B, device = size_class(len(sessions)), self._table.device
        columns = [self._column(s, places[s.id]) if s.id in places else [0] * LINES for s in sessions]
        columns += [[0] * LINES] * (B - len(columns))
        source = [self._seats.index(seat) if seat in self._seats else -1 for seat in seats] + [-1] * (B - len(seats))
        lines = to_device([source, *zip(*columns, strict=True)], device)
        moved = self._table[:, lines[0].clamp_min(0)]
        self._table[:, :B].copy_(torch.where(lines[0] >= 0, moved, lines[1:]))
        self._table[LIMIT, :B].copy_(to_device(lengths + [0] * (B - len(lengths)), device))
        if self._drafting is not None and isinstance(self._drafting[1], DrafterPart):
            entering = [b for b, session in enumerate(sessions) if session.id in places and max(lengths)]
            self._drafting[1].seat(lines[0], entering)
        self._load_samplings(sessions, B, parts)
        self._seats, self._asked = seats, lengths
        return True

    def _column(self, session: Session, place: tuple[int, int]) -> list[int]:
        tokens, start = session.tokens, self.rows.start(session.id)
        end = session.prompt_length + session.request.max_tokens
        most = end - 1 if self.max_length is None else min(end - 1, self.max_length)
        end = end if self.max_length is None else min(end, self.max_length)
        previous = tokens[-2] if len(tokens) > 1 else 0
        return [start, place[0], len(tokens), tokens[-1], previous, place[1], end, most, 0]

    def _load_samplings(self, sessions: Sequence[Session], B: int, parts: Parts) -> None:
        samplings = [session.sampling for session in sessions]
        samplings += [samplings[0]] * (B - len(samplings))
        seeds = to_device([sampling.seed for sampling in samplings], self._table.device)
        temperatures, traits = [0.0] * B, cast(Hashable, ())
        if sessions[0].request.drafter and not isinstance(parts.drafter, NoDrafter):
            drawn = [_drafter(parts).device_sampling(sampling) for sampling in samplings]
            temperatures, traits = [sampling.temperature for sampling in drawn], self._part().load(drawn, seeds)
        self._traits = self._verification.load(samplings, temperatures, seeds), traits


def _is_current(part: DrafterPart | str | None) -> bool:
    return not isinstance(part, DrafterPart) or part.is_current()


def _graph_cache(parts: Parts) -> GraphCache:
    model: Any = parts.model  # one whose rows lie in a pool on a GPU
    cache: GraphCache = model.graph_cache
    return cache


def _drafter(parts: Parts) -> Any:
    """Return a drafter that has a `DeviceDrafting`."""
    return parts.drafter
