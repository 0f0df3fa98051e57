"""What drafting costs, in passes over one position: assumed at first, then measured."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

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
