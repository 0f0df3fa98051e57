"""Choose how many tokens to draft: a fixed number, or the number that emits the most tokens per second.

The choice is made before the draft, from earlier rounds alone, so it does not change the output's distribution
(docs/why-it-is-exact.md, "Adaptive length").
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from draftproof.engine.request import Session

Floats = npt.NDArray[np.float64]

LONGEST_DRAFT: Final = 16
"""Tokens in the longest draft that `AutoLength` asks for."""

DEPTHS: Final = (0, 1, 2, 4, 6, 8, 12, 16)
"""Draft lengths that are chosen from where all rows have the same: on a GPU each is a recording."""

PROBE_LENGTH: Final = 2
"""Tokens in a probe: a draft that is asked for now and then where shorter drafts or none seem best."""

PROBE_BUDGET: Final = 0.01
"""Share of the time that probes may cost, so cheap probes are frequent."""

ROUNDS_OF_REST: Final = 3
"""Rounds that several rows go on without drafts before lengths are chosen anew: after a pass, when caches are cold, a
choice for 16 rows takes a hundredth of a round."""

SPEED_TOLERANCE: Final = 0.005
"""Relative difference below which two speeds are equal. The longest of equal lengths is taken, because text that can be
copied starts without notice."""

LEAST_GAIN: Final = 0.02
"""Gain in speed that drafting must promise: the best of many noisy estimates promises more than it keeps. Once it has
begun, one row goes on until it gains nothing, and the rows of a GPU, which all draft at once, until they lose as much:
every change of mind costs time."""

PRIOR_DRAFTS: Final = 16.0
"""Drafts of a request's own that the typical acceptance rates weigh as much as."""

DECAY: Final = 0.9
"""Weight that earlier drafts keep in an acceptance rate when a new one is recorded."""

IDLE_DECAY: Final = 0.9
"""Weight that a row's own drafts keep in a round without a draft: a text that went badly may go well again, and without
new drafts only the other rows tell."""

TYPICAL_DECAY: Final = 0.985
"""Weight that earlier drafts keep in the rates of all requests together, which change more slowly than one text's."""

HIGHEST_RATE: Final = 0.98
"""Upper bound on an estimated acceptance rate: a few drafts that were all accepted do not prove a rate of 1."""

MEAN_STEP: Final = 0.2
"""Least weight of a new value in a running mean, so that it follows costs that grow with the context."""

OUTLIER_FACTOR: Final = 1.5
"""Factor by which one value may differ from the mean; beyond it is clipped, as one slow round is not a trend."""

COMPUTE_BOUND: Final = 16
"""Positions from which a pass is assumed to take time in proportion to them; with fewer, reading weights dominates."""

BLOCK: Final = 4
"""Positions that the four-bit kernel multiplies at a time (models/int4_linear.py)."""

LEAST_WIDTH: Final = 1e-6
"""Chance at least that a draft token is drafted: gains are divided by it."""

LEAST_SECONDS: Final = 1e-9
"""Seconds that a stage takes at least: a coarse clock may measure 0, and costs are divided by it."""


@dataclass(slots=True)
class AutoLength:
    """A policy that maximises tokens per second, from measured costs and each row's acceptance rates.

    All rows share a pass, so lengths are chosen together: the draft tokens that are likeliest to be accepted come
    first, in whichever rows, up to the point where one more would cost more time than it saves. A request with a seed
    of its own uses fixed costs and its own record alone, unless its text does not depend on lengths: it must not depend
    on how busy the machine is, nor on other requests.
    """

    coupled: bool = False
    """Whether rows that ask for no rule are verified by `coupled`."""
    measured: "Costs" = field(default_factory=lambda: Costs())
    """Costs of rounds of one row."""
    measured_together: dict[int, "Costs"] = field(default_factory=dict)
    """Costs of rounds of more rows, by the powers of two between which their number is."""
    fixed: "Costs" = field(default_factory=lambda: Costs())
    records: dict[int, "DraftRecord"] = field(default_factory=dict)
    typical: "DraftRecord" = field(default_factory=lambda: DraftRecord.decaying(TYPICAL_DECAY))
    """Drafts of requests without a seed of their own: what a row with few drafts is assumed to be like."""

    rest: int = 0
    """Rounds until lengths are chosen anew, unless there is a draft before."""

    def costs(self, rows: int) -> "Costs":
        """Return the costs of rounds of about so many rows.

        A position of a further row costs more than one of the same row, which shares its keys and its draft steps: what
        was measured for one row would make drafts of eight seem cheap.
        """
        if rows <= 1:
            return self.measured
        about = rows.bit_length()
        if about not in self.measured_together:
            self.measured_together[about] = self.measured.unmeasured()
        return self.measured_together[about]

    def lengths(self, sessions: Sequence[Session], rows: int | None = None) -> list[int]:
        """Return how many tokens to draft for each row, in a round of `rows` (default: these)."""
        for session in sessions:
            if session.id not in self.records:
                self.records[session.id] = DraftRecord() if self.reproduces(session) else self.typical.begun()
        asked = {s.id: self._alone(self.records[s.id]) for s in sessions if self.reproduces(s)}
        free = [self.records[s.id] for s in sessions if s.id not in asked]
        costs = self.costs(len(sessions) if rows is None else rows)
        together = iter(self._together(free, len(asked) + sum(asked.values()), costs))
        return [asked[s.id] if s.id in asked else next(together) for s in sessions]

    def reproduces(self, session: Session) -> bool:
        """Return whether a request's text depends on its draft lengths, and must come out again with its seed."""
        request = session.request
        if not request.seeded or session.sampling.temperature == 0:
            return False
        return not self.coupled if request.rule is None else request.rule != "coupled"

    def _alone(self, record: "DraftRecord") -> int:
        [best] = best_lengths([record], self.fixed)
        return self._probed(record, best, 1, self.fixed.of_round(PROBE_LENGTH) - self.fixed.of_round(best))

    def _together(self, records: Sequence["DraftRecord"], others: int, costs: "Costs") -> list[int]:
        """Choose lengths of rows that share costs; several rows that draft nothing go on so for some rounds."""
        if len(records) > 1 and self.rest:
            self.rest -= 1
            return [record.ask(0) for record in records]
        lengths = self._chosen_together(records, others, costs)
        self.rest = ROUNDS_OF_REST if records and not any(lengths) else 0
        return lengths

    def _chosen_together(self, records: Sequence["DraftRecord"], others: int, costs: "Costs") -> list[int]:
        best = best_lengths(records, costs, others)
        positions = others + len(records) + sum(best)
        now = costs.of_pass(positions) if records else 1.0
        widened = len(records) if costs.rectangular else 1  # rows whose pass is wider for one row's probe
        extra = costs.of_pass(positions + PROBE_LENGTH * widened) - now + costs.of_drafting(PROBE_LENGTH)
        if not any(best):
            extra += costs.resume_cost
        return [self._probed(record, k, len(records), extra / now) for record, k in zip(records, best, strict=True)]

    def _probed(self, record: "DraftRecord", best: int, rows: int, extra: float) -> int:
        """Ask for a probe instead of a short draft, if the row's share of the time for probes allows it."""
        record.wants_probe = best < PROBE_LENGTH
        if not record.wants_probe:
            return record.ask(best)
        budget = (record.rounds_since_probe + 1) * PROBE_BUDGET / rows
        return record.ask(PROBE_LENGTH if budget >= extra else best)

    def record_draft(self, session: Session, drafted: int, accepted: int, asked: int | None = None) -> None:
        """Record how many tokens of one row's draft were accepted, of those `asked` for: by default the last choice."""
        record = self.records.get(session.id) or self.records.setdefault(session.id, DraftRecord())
        record.asked = record.asked if asked is None else asked
        record.update(drafted, accepted)
        self.rest = 0 if drafted else self.rest
        if not self.reproduces(session):
            self.typical.asked = record.asked
            self.typical.update(drafted, accepted)

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop the records of requests that have ended. One that is preempted keeps its record."""
        for session in sessions:
            self.records.pop(session, None)

    def record_time(self, seconds: dict[str, float], drafted: Sequence[int]) -> None:
        """Record the seconds by stage of a round, and how many tokens each row drafted."""
        rows, longest = len(drafted), max(drafted)
        positions = rows * (1 + longest) if self.measured.rectangular else rows + sum(drafted)
        self.costs(rows).update(seconds, positions, longest)


def best_lengths(records: Sequence["DraftRecord"], costs: "Costs", others: int = 0) -> list[int]:
    """Return the draft lengths that emit the most tokens per unit of cost; 0 everywhere if plain decoding does.

    With acceptance rates f of first tokens and a of later ones, the k-th draft token of a row adds f aᵏ⁻¹ tokens on
    average. With a rate g of continued drafts it is drafted with probability gᵏ⁻¹, and then widens the pass by one
    position; a step of drafting serves all rows. `others` are positions of rows whose lengths are not chosen here.
    """
    B = len(records)
    if not B:
        return []
    if B == 1 and not costs.rectangular:
        return [_best_alone(records[0], costs, others)]
    return _best_together(records, costs, others)


def _best_alone(record: "DraftRecord", costs: "Costs", others: int) -> int:
    """Return the best length of one row: `_best_together` by Python's numbers, in a third of the time."""
    first, later = min(record.first.value, HIGHEST_RATE), min(record.later.value, HIGHEST_RATE)
    continued = record.continued.value
    gains = [first * later**earlier for earlier in range(LONGEST_DRAFT)]
    widths = [max(continued**earlier, LEAST_WIDTH) for earlier in range(LONGEST_DRAFT)]
    order = sorted(range(LONGEST_DRAFT), key=lambda depth: (-gains[depth] / widths[depth], depth))
    emitted, drafted, speeds = 1.0, 0.0, []
    for depth in order:
        emitted, drafted = emitted + gains[depth], drafted + widths[depth]
        speeds.append(emitted / (costs.of_pass(1 + others + drafted) + costs.of_drafting(drafted)))
    best = max(speeds)
    if best <= costs.least_gain(1) / costs.of_pass(1 + others):
        return 0
    last = max(n for n, speed in enumerate(speeds) if speed >= (1 - SPEED_TOLERANCE) * best)
    return 1 + max(order[: last + 1])


def _best_together(records: Sequence["DraftRecord"], costs: "Costs", others: int) -> list[int]:
    """Return the best lengths of several rows."""
    B = len(records)
    gains, widths = increments(records)
    if costs.rectangular:
        return [_best_depth(gains, costs, others)] * B
    rows, depths = (index.ravel() for index in np.indices(gains.shape))
    order = np.lexsort((rows, depths, -(gains / widths).ravel()))  # the likeliest first, whatever it is that is likely
    rows, depths = rows[order], depths[order] + 1
    emitted = B + gains.ravel()[order].cumsum()
    positions = B + others + widths.ravel()[order].cumsum()
    steps = np.maximum.accumulate(depths) if B > 1 else positions - 1 - others
    speeds = emitted / (costs.of_passes(positions) + costs.of_drafting(steps))
    lengths = np.zeros(B, dtype=np.int64)
    if speeds.max() > costs.least_gain(B) * B / costs.of_pass(B + others):
        last = np.flatnonzero(speeds >= (1 - SPEED_TOLERANCE) * speeds.max())[-1]
        np.maximum.at(lengths, rows[: last + 1], depths[: last + 1])
    return [int(length) for length in lengths]


def _best_depth(gains: Floats, costs: "Costs", others: int) -> int:
    """Return the draft length that is best for all rows at once, where each of them takes as long as the longest."""
    B, depths = len(gains), np.array(DEPTHS)
    emitted = B + np.concatenate([[0.0], gains.sum(0).cumsum()])[depths]
    spent = costs.of_passes(B * (1.0 + depths) + others) + costs.of_drafting(depths)
    plain, *drafted = emitted / spent
    best = int(np.argmax(drafted))
    return int(depths[1 + best]) if drafted[best] > costs.least_gain(B) * plain else 0


def increments(records: Sequence["DraftRecord"]) -> tuple[Floats, Floats]:
    """Return, for each record and depth, the tokens that one more draft token adds, and its chance to be drafted."""
    rates = np.array([(r.first.value, r.later.value, r.continued.value) for r in records])[:, :, None]
    earlier = np.arange(LONGEST_DRAFT)  # draft tokens before this one
    first, later = np.minimum(rates[:, :2], HIGHEST_RATE).swapaxes(0, 1)
    return first * later**earlier, np.maximum(rates[:, 2] ** earlier, LEAST_WIDTH)


@dataclass(slots=True)
class DraftRecord:
    """Recent acceptance rates of one row's drafts. It starts with guesses that weigh as much as two drafts.

    The first token has a rate of its own: a drafter that copies matches is mostly wrong on the first token, and mostly
    right on later ones once the first was accepted. Such a drafter also ends a draft early where it is unsure, and
    tokens that are not drafted cost nothing. So the record counts how far drafts go as well as how far they are right.
    """

    first: "DecayingRate" = field(default_factory=lambda: DecayingRate(0.8, 2.0))
    """Drafts whose first token was accepted, of all drafts."""
    later: "DecayingRate" = field(default_factory=lambda: DecayingRate(1.5, 2.0))
    """Tokens drafted and accepted, of all that were asked for after an accepted one."""
    continued: "DecayingRate" = field(default_factory=lambda: DecayingRate(2.0, 2.0))
    """Tokens drafted, of all that were asked for after a drafted one."""
    asked: int = 0
    """Draft length asked for in the current round."""
    wants_probe: bool = False
    """Whether fewer than `PROBE_LENGTH` tokens seemed best for the current round."""
    rounds_since_probe: int = 0
    """Rounds since at least `PROBE_LENGTH` tokens were asked for and a draft was made."""

    @classmethod
    def decaying(cls, decay: float) -> "DraftRecord":
        """Return a new record in which earlier drafts keep this share of their weight."""
        record = cls()
        record.first.decay = record.later.decay = record.continued.decay = decay
        return record

    def begun(self) -> "DraftRecord":
        """Return the record of a new request that is like this one as far as its own drafts do not say otherwise.

        Its rates follow this record's, so that what the drafts of one row show counts for all rows at once: if each
        found out alone, a batch of requests would try a useless drafter once for every row.
        """
        first, later, continued = (
            DecayingRate(0.0, 0.0, prior=rate) for rate in (self.first, self.later, self.continued)
        )
        return DraftRecord(first, later, continued)

    def ask(self, length: int) -> int:
        """Remember the length asked for, and return it."""
        self.asked = length
        return length

    def update(self, drafted: int, accepted: int) -> None:
        """Record the outcome of one round. In one without a draft, rates move towards the typical ones, if any."""
        self.rounds_since_probe += self.wants_probe  # counted here: a row may be preempted before its round
        if not drafted:
            if self.first.prior is not None:
                for rate in (self.first, self.later, self.continued):
                    rate.fade()
            return
        asked = max(self.asked, drafted)
        self.rounds_since_probe = 0 if asked >= PROBE_LENGTH else self.rounds_since_probe
        self.first.update(int(accepted > 0), 1)
        self.continued.update(drafted - 1, min(asked - 1, drafted))
        if accepted:
            self.later.update(accepted - 1, min(asked - 1, accepted))


@dataclass(slots=True)
class DecayingRate:
    """A success rate in which earlier trials lose weight.

    prior  a rate that counts as PRIOR_DRAFTS trials; None: only own trials count
    """

    successes: float
    trials: float
    decay: float = DECAY
    prior: "DecayingRate | None" = None

    @property
    def value(self) -> float:
        if self.prior is None:
            return self.successes / self.trials
        return (self.successes + PRIOR_DRAFTS * self.prior.value) / (self.trials + PRIOR_DRAFTS)

    def fade(self) -> None:
        """Let own trials lose weight beside the prior's."""
        self.successes *= IDLE_DECAY
        self.trials *= IDLE_DECAY

    def update(self, successes: int, trials: int) -> None:
        if trials:
            self.successes = self.decay * self.successes + successes
            self.trials = self.decay * self.trials + trials


@dataclass(slots=True)
class Costs:
    """The cost of a pass over n positions and of a draft token, in units of a pass over one position.

    An assumed cost weighs as much as one measurement: the first pass of any width may compile or allocate something.
    Costs never fall with the width: a pass that took longer than a wider one was disturbed.
    """

    pass_growth: float = 0.04
    """Assumed cost of a further position."""
    draft_cost: float = 0.05
    """Assumed cost of a draft token."""
    compute_bound: int = COMPUTE_BOUND
    """Positions from which a pass is assumed to take time in proportion to them."""
    rectangular: bool = False
    """Whether a pass is as wide for every row as for the one with the longest draft."""
    resume_cost: float = 0.0
    """Assumed cost of a round that drafts after one that did not: a draft model reads on, the host waits for it."""
    draft_start: float = 0.0
    """Draft tokens that beginning a draft costs as much as: a head reads the target's new states first."""
    block_cost: float = 0.0
    """Assumed cost of a further BLOCK of positions, on top of theirs: a kernel may read the weights for each block."""
    pass_seconds: dict[int, "RunningMean"] = field(default_factory=dict)
    """Measured seconds of a pass, by positions: those of all rows, rounded where there are many."""
    draft_seconds: "RunningMean | None" = None
    """Measured seconds of drafting one token, in rounds after one with a draft."""
    drafting: bool = False
    """Whether the last round had a draft. After a pause, and at first, a drafter also reads what it has missed."""
    _curve: list[tuple[float, float]] = field(default_factory=list)

    def unmeasured(self) -> "Costs":
        """Return the same assumed costs without any measured ones."""
        return replace(self, pass_seconds={}, draft_seconds=None, drafting=False, _curve=[])

    def least_gain(self, rows: int) -> float:
        """Return the speed, as a multiple of plain decoding's, above which so many rows are drafted for.

        Where rows are drafted for one by one, a draft of one among many loses next to nothing: it must gain.
        """
        if not self.drafting or (rows > 1 and not self.rectangular):
            return 1 + LEAST_GAIN
        return 1 - LEAST_GAIN if self.rectangular else 1.0

    def of_round(self, length: int | float) -> float:
        """Return the cost of a round with a draft of this length, which may be a mean."""
        return float(self.of_drafting(length)) + self.of_pass(1 + length)

    def of_pass(self, width: int | float) -> float:
        """Return the cost of a pass over so many positions: as `of_passes`, of which numpy's calls are most."""
        before = (1.0, 1.0)
        for after in self._curve:
            if width <= after[0]:
                share = (width - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        last, cost = before
        if last >= self.compute_bound:
            return cost + cost / last * (width - last)
        bound = max(self.compute_bound, 1 + LONGEST_DRAFT)
        there = cost + float(self._assumed(bound) - self._assumed(last))
        within = cost + float(self._assumed(min(width, bound)) - self._assumed(last))
        return within + there / bound * max(width - bound, 0)

    def of_passes(self, widths: Floats) -> Floats:
        """Return the costs of passes: interpolated between measured widths, with the assumed growth beyond them."""
        known, costs = np.array([(1.0, 1.0), *self._curve]).T
        last, beyond = known[-1], np.maximum(widths, known[-1])
        found: Floats = np.interp(widths, known, costs)
        if last >= self.compute_bound:
            found += costs[-1] / last * (beyond - last)
        else:
            bound = max(self.compute_bound, 1 + LONGEST_DRAFT)
            found += self._assumed(np.minimum(beyond, bound)) - self._assumed(last)
            there = costs[-1] + self._assumed(bound) - self._assumed(last)
            found += there / bound * np.maximum(widths - bound, 0)
        return found

    def of_drafting(self, length: Any) -> Any:
        """Return the cost of a draft of this length, which may be a mean, or an array of them."""
        return (length + self.draft_start * (length > 0)) * self.of_draft()

    def of_draft(self) -> float:
        """Return the cost of one draft token."""
        base = self._base()
        if base is None or self.draft_seconds is None:
            return self.draft_cost
        return self.draft_seconds.value / base.value

    def update(self, seconds: dict[str, float], positions: int, drafted: int) -> None:
        """Record a round that scored so many positions, and drafted `drafted` tokens a row at most."""
        width = positions if positions <= COMPUTE_BOUND else round(positions / 8) * 8
        spent = sum(seconds.get(stage, 0.0) for stage in ("score", "warp", "verify", "commit"))
        known = self.pass_seconds.get(width)
        if known is None:
            self.pass_seconds[width] = RunningMean(max(spent, LEAST_SECONDS))
        else:
            known.update(spent)
        if drafted and self.drafting:
            each = seconds.get("draft", 0.0) / (drafted + self.draft_start)
            if self.draft_seconds is None:
                self.draft_seconds = RunningMean(max(each, LEAST_SECONDS))
            else:
                self.draft_seconds.update(each)
        self.drafting = drafted > 0
        self._curve = self._measured()

    def _assumed(self, width: Any) -> Any:
        """Return the assumed cost of a pass over so many positions, a number or an array."""
        return 1 + self.pass_growth * (width - 1) + self.block_cost * ((width - 1) // BLOCK)

    def _base(self) -> "RunningMean | None":
        """Estimate the seconds of a pass over one position from the narrowest pass: if every round drafts, there is
        none over one."""
        if not self.pass_seconds:
            return None
        narrowest = min(self.pass_seconds)
        here = self.pass_seconds[narrowest]
        return RunningMean(here.value / self._assumed(narrowest), here.count)

    def _measured(self) -> list[tuple[float, float]]:
        """Return (width, cost) of each measured width but 1, in rising order."""
        base = self._base()
        if base is None:
            return []
        curve, least = [], float("inf")
        for width in sorted(self.pass_seconds.keys() - {1}, reverse=True):
            here = self.pass_seconds[width]
            weight = min(here.count, base.count)
            least = min(least, (weight * here.value / base.value + self._assumed(width)) / (weight + 1))
            curve.append((float(width), max(1.0, least)))
        return curve[::-1]


@dataclass(slots=True)
class RunningMean:
    """A mean of all values while they are few, and of recent ones later."""

    value: float
    count: int = 1

    def update(self, value: float) -> None:
        value = min(max(value, self.value / OUTLIER_FACTOR), self.value * OUTLIER_FACTOR)
        self.value += (value - self.value) * max(MEAN_STEP, 1 / (self.count + 1))
        self.count += 1


def check_length(num_draft_tokens: int | str) -> None:
    """Refuse a draft length that is neither "auto" nor a whole number ≥ 0."""
    if num_draft_tokens == "auto":
        return
    if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 0:
        raise ValueError(f'num_draft_tokens must be "auto" or a whole number ≥ 0; got {num_draft_tokens!r}')


@dataclass(slots=True)
class DraftLengths:
    """Draft lengths of the rows of an engine: `default` where a request asks for none."""

    default: int | str
    auto: AutoLength = field(default_factory=AutoLength)

    def choose(self, sessions: Sequence[Session]) -> list[int]:
        """Return how many tokens to draft for each row."""
        asked = [self._asked(session) for session in sessions]
        free = [session for session, length in zip(sessions, asked, strict=True) if length == "auto"]
        chosen = iter(self.auto.lengths(free, len(sessions)))
        return [next(chosen) if length == "auto" else int(length) for length in asked]

    def _asked(self, session: Session) -> int | str:
        if not session.request.drafter:
            return 0
        length = session.request.num_draft_tokens
        return self.default if length is None else length

    def record_draft(self, session: Session, drafted: int, accepted: int, asked: int | None = None) -> None:
        """Record how many tokens of one row's draft were accepted, of those `asked` for."""
        self.auto.record_draft(session, drafted, accepted, asked)

    def follow_results(self, sessions: Sequence[Session]) -> bool:
        """Return whether the next lengths depend on the last results in a way that a seed must reproduce."""
        return any(self.is_auto(s) and self.auto.reproduces(s) for s in sessions)

    def is_auto(self, session: Session) -> bool:
        return self._asked(session) == "auto"

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop what is known of requests that have ended."""
        self.auto.forget(sessions)

    def record_time(self, seconds: dict[str, float], drafted: Sequence[int]) -> None:
        """Record the seconds by stage of a round, and how many tokens each row drafted."""
        self.auto.record_time(seconds, drafted)
