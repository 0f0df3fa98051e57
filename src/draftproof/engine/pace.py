"""How long the next draft should be: fixed, or the longest that pays.

Whatever is decided here is decided before the draft is made, from earlier rounds alone, so the law is kept
(docs/why-it-is-exact.md, "Adaptive length").
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from draftproof.engine.request import Session

LONGEST: Final = 12
"""The longest draft that `Auto` asks for."""

PROBE: Final = 24
"""Where drafting does not pay, one round in this many tries it again."""


@runtime_checkable
class Pace(Protocol):
    def lengths(self, sessions: Sequence[Session]) -> list[int]:
        """How many tokens to draft for each row."""

    def observe(self, session: Session, drafted: int, accepted: int) -> None:
        """What came of one row's draft."""

    def timed(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        """How long a round took that scored `width` positions and drafted `drafted` tokens a row at most."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    length: int

    def lengths(self, sessions: Sequence[Session]) -> list[int]:
        return [self.length] * len(sessions)

    def observe(self, session: Session, drafted: int, accepted: int) -> None:
        pass

    def timed(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        pass


@dataclass(slots=True)
class Costs:
    """What a pass over n positions and a drafted token cost, in passes over one position."""

    pass_growth: float = 0.06
    """What a further position adds, until it is measured."""
    draft: float = 0.02
    passes: dict[int, float] = field(default_factory=dict)
    drafting: float | None = None

    def of_pass(self, width: int) -> float:
        """Relative to a pass over one position; between measured widths, a line."""
        base = self.passes.get(1)
        if base is None or len(self.passes) < 2:
            return 1 + self.pass_growth * (width - 1)
        if width in self.passes:
            return max(1.0, self.passes[width] / base)
        known = sorted(self.passes)
        below = max((n for n in known if n < width), default=1)
        above = min((n for n in known if n > width), default=None)
        if above is None:
            return max(1.0, self.passes[below] / base) + self.pass_growth * (width - below)
        share = (width - below) / (above - below)
        return max(1.0, ((1 - share) * self.passes[below] + share * self.passes[above]) / base)

    def of_draft(self) -> float:
        base = self.passes.get(1)
        return self.draft if base is None or self.drafting is None else self.drafting / base

    def learn(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        """A running mean that follows the growing context."""
        spent = sum(seconds.get(stage, 0.0) for stage in ("score", "warp", "verify", "commit"))
        before = self.passes.get(width)
        # a first pass of any width may compile or allocate something: the least of two is nearer the truth
        self.passes[width] = spent if before is None else min(spent, before * 1.02) * 0.3 + before * 0.7
        if drafted:
            each = seconds.get("draft", 0.0) / drafted
            self.drafting = each if self.drafting is None else 0.7 * self.drafting + 0.3 * min(each, 2 * self.drafting)


@dataclass(slots=True)
class Record:
    """How a row's drafts fared lately: a running share of drafted tokens that stood, given those before them did."""

    stood: float = 1.4
    tried: float = 2.0
    since: int = 0

    @property
    def rate(self) -> float:
        return self.stood / self.tried

    def note(self, drafted: int, accepted: int) -> None:
        tried = min(drafted, accepted + 1)  # behind the first that fell nothing was tried
        self.stood = 0.85 * self.stood + accepted
        self.tried = 0.85 * self.tried + tried


@dataclass(slots=True)
class Auto:
    """The length that emits most tokens a second, from measured costs and the row's own acceptance.

    With survival rate a, a draft of k tokens emits 1 + a + … + aᵏ tokens on average and costs k drafted tokens and a
    pass over k + 1 positions. A request with a seed of its own is paced by fixed costs instead of measured ones: its
    text must not depend on how busy the machine is.
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
        best = best_length(record.rate, costs)
        if best:
            return best
        record.since += 1
        return 2 if record.since % PROBE == 0 else 0

    def observe(self, session: Session, drafted: int, accepted: int) -> None:
        if drafted:
            self.records.setdefault(session.id, Record()).note(drafted, accepted)

    def timed(self, seconds: dict[str, float], width: int, drafted: int) -> None:
        self.measured.learn(seconds, width, drafted)


def best_length(rate: float, costs: Costs) -> int:
    """The k that maximises (1 + a + … + aᵏ) / (k · draft + pass over k + 1)."""
    best, speed, emitted, survives = 0, 1 / costs.of_pass(1), 1.0, 1.0
    for k in range(1, LONGEST + 1):
        survives *= min(rate, 0.98)
        emitted += survives
        now = emitted / (k * costs.of_draft() + costs.of_pass(k + 1))
        if now > speed * 1.01:
            best, speed = k, now
    return best
