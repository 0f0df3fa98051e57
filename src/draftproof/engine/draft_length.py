"""How long the next draft should be: fixed, or the longest that pays.

Whatever is decided here is decided before the draft is made, from earlier rounds alone, so the distribution is kept
(docs/why-it-is-exact.md, "Adaptive length").
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from draftproof.engine.request import Session

FOLLOW: Final = 0.2
"""How far a running mean goes towards a new value, at least."""

OUTLIER: Final = 1.5
"""How many times the mean a single value may count for: a busy moment is no trend."""

TICK: Final = 1e-9
"""A clock may be too coarse to see a stage at all, and a cost of nothing would be divided by."""


@dataclass(slots=True)
class Mean:
    """A running mean: of all values while they are few, then of late ones, as the context grows."""

    value: float
    count: int = 1

    def note(self, value: float) -> None:
        value = min(max(value, self.value / OUTLIER), self.value * OUTLIER)
        self.value += (value - self.value) * max(FOLLOW, 1 / (self.count + 1))
        self.count += 1


@dataclass(slots=True)
class Costs:
    """What a pass over n positions and a drafted token cost, in passes over one position.

    What was measured counts beside what is assumed as one more measurement would: a first pass of any width may compile
    or allocate something. And no pass costs more than a wider one: where it seems to, it was disturbed.
    """

    pass_growth: float = 0.04
    """What a further position is assumed to add."""
    draft: float = 0.05
    """What a drafted token is assumed to cost."""
    passes: dict[int, Mean] = field(default_factory=dict)
    drafting: Mean | None = None
    _curve: list[tuple[float, float]] = field(default_factory=list)

    def of(self, length: int | float) -> float:
        """A round with a draft of this length, which may be a mean."""
        return length * self.of_draft() + self.of_pass(1 + length)

    def of_pass(self, width: int | float) -> float:
        """Relative to a pass over one position; a line between measured widths, and the assumed growth behind them."""
        i = bisect_left(self._curve, (width,))
        below, low = self._curve[i - 1] if i else (1.0, 1.0)
        if i == len(self._curve):
            return low + self.pass_growth * (width - below)
        above, high = self._curve[i]
        return low + (high - low) * (width - below) / (above - below)

    def of_draft(self) -> float:
        base = self._base()
        return self.draft if base is None or self.drafting is None else self.drafting.value / base.value

    def learn(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        """Take note of a round that scored `width` positions and drafted `drafted` tokens a row at most."""
        spent = sum(seconds.get(stage, 0.0) for stage in ("score", "warp", "verify", "commit"))
        known = self.passes.get(width)
        if known is None:
            self.passes[width] = Mean(max(spent, TICK))
        else:
            known.note(spent)
        if drafted:
            each = seconds.get("draft", 0.0) / drafted
            if self.drafting is None:
                self.drafting = Mean(max(each, TICK))
            else:
                self.drafting.note(each)
        self._curve = self._measured()

    def _assumed(self, width: int) -> float:
        return 1 + self.pass_growth * (width - 1)

    def _base(self) -> Mean | None:
        """A pass over one position. Where every round drafts there is none, and the narrowest must tell."""
        if not self.passes:
            return None
        narrowest = min(self.passes)
        here = self.passes[narrowest]
        return Mean(here.value / self._assumed(narrowest), here.count)

    def _measured(self) -> list[tuple[float, float]]:
        """The price of each measured width but 1, in rising order."""
        base = self._base()
        if base is None:
            return []
        curve, least = [], float("inf")
        for width in sorted(self.passes.keys() - {1}, reverse=True):
            here = self.passes[width]
            weight = min(here.count, base.count)
            least = min(least, (weight * here.value / base.value + self._assumed(width)) / (weight + 1))
            curve.append((float(width), max(1.0, least)))
        return curve[::-1]


LONGEST: Final = 16
"""The longest draft that `Auto` asks for."""

PROBE: Final = 2
"""Where shorter drafts or none seem best, one of this length is tried now and then."""

SPENT: Final = 0.01
"""The share of the time that such tries may cost: where they are cheap they are frequent."""

TIE: Final = 0.005
"""Lengths whose speeds differ by less are equal. The longest is taken: text that is copied comes without notice."""

FORGET: Final = 0.9
"""What a record is worth a draft later."""

CERTAIN: Final = 0.98
"""The most that a share is believed."""


@runtime_checkable
class DraftLengthPolicy(Protocol):
    def lengths(self, sessions: Sequence[Session]) -> list[int]:
        """How many tokens to draft for each row."""

    def observe(self, session: Session, drafted: int, accepted: int) -> None:
        """What came of one row's draft."""

    def timed(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        """How long a round took that scored `width` positions and drafted `drafted` tokens a row at most."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same length."""

    length: int

    def lengths(self, sessions: Sequence[Session]) -> list[int]:
        return [self.length] * len(sessions)

    def observe(self, session: Session, drafted: int, accepted: int) -> None:
        pass

    def timed(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        pass


@dataclass(slots=True)
class Share:
    """How much came of what was tried, lately."""

    came: float
    tried: float

    @property
    def value(self) -> float:
        return self.came / self.tried

    def note(self, came: int, tried: int) -> None:
        if tried:
            self.came = FORGET * self.came + came
            self.tried = FORGET * self.tried + tried


@dataclass(slots=True)
class Record:
    """How a row's drafts fared lately. It begins with guesses that are worth two drafts.

    A drafter that looks for matches is wrong on the first token mostly: where that stands, many do. So the first token
    has a share of its own. Such a drafter also ends a draft by itself where it is unsure, and a draft that is not made
    costs nothing: how far it goes is noted beside how far it is right.
    """

    first: Share = field(default_factory=lambda: Share(0.8, 2.0))
    """Of the drafts, those whose first token stood."""
    later: Share = field(default_factory=lambda: Share(1.5, 2.0))
    """Of further tokens asked for, each behind one that stood, those that were drafted and stood."""
    going: Share = field(default_factory=lambda: Share(2.0, 2.0))
    """Of further tokens asked for, each behind one that was drafted, those that were drafted."""
    asked: int = 0
    idle: int = 0
    """Rounds since a draft of at least `PROBE` tokens was asked for and one was made."""

    def ask(self, length: int) -> int:
        self.asked = length
        return length

    def note(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        asked = max(self.asked, drafted)
        self.idle = 0 if asked >= PROBE else self.idle
        self.first.note(int(accepted > 0), 1)
        self.going.note(drafted - 1, min(asked - 1, drafted))
        if accepted:
            self.later.note(accepted - 1, min(asked - 1, accepted))


@dataclass(slots=True)
class AutoLength:
    """The length that emits most tokens a second, from measured costs and the row's own record.

    A request with a seed of its own is paced by fixed costs instead of measured ones: its text must not depend on how
    busy the machine is.
    """

    measured: Costs = field(default_factory=Costs)
    fixed: Costs = field(default_factory=Costs)
    records: dict[int, Record] = field(default_factory=dict)

    def lengths(self, sessions: Sequence[Session]) -> list[int]:
        alive = {s.id for s in sessions}
        self.records = {i: record for i, record in self.records.items() if i in alive}
        return [self._length(s) for s in sessions]

    def _length(self, session: Session) -> int:
        record = self.records.setdefault(session.id, Record())
        costs = self.fixed if session.request.seeded and session.sampling.temperature > 0 else self.measured
        best = best_length(record, costs)
        if best >= PROBE:
            return record.ask(best)
        record.idle += 1
        saved = record.idle * SPENT
        return record.ask(PROBE if saved >= costs.of(PROBE) - costs.of(best) else best)

    def observe(self, session: Session, drafted: int, accepted: int) -> None:
        self.records.setdefault(session.id, Record()).note(drafted, accepted)

    def timed(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        self.measured.learn(seconds, width, drafted)


def best_length(record: Record, costs: Costs) -> int:
    """The k that emits most a unit of cost; 0 where none emits more than plain decoding.

    With shares f of first tokens and a of later ones that stand, k tokens asked for emit 1 + f (1 + a + … + aᵏ⁻¹) on
    average; with a share g of drafts that go on, 1 + g + … + gᵏ⁻¹ are drafted and cost their drafting and a wider pass.
    """
    later, going = min(record.later.value, CERTAIN), record.going.value
    stands, goes = min(record.first.value, CERTAIN), 1.0
    emitted, length = 1.0, 0.0
    speeds = []
    for _ in range(LONGEST):
        emitted, stands = emitted + stands, stands * later
        length, goes = length + goes, goes * going
        speeds.append(emitted / costs.of(length))
    if max(speeds) <= 1:
        return 0
    return max(k for k, speed in enumerate(speeds, 1) if speed >= (1 - TIE) * max(speeds))
