"""What an audit came to: a verdict, how sure it is, what it has seen and what it has not. Kept as JSON, shown as text.

A certificate never says "exact": only which bias it would have seen.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from draftproof.auditor.bets import hint
from draftproof.auditor.coverage import Coverage

Verdict = Literal["no bias found", "biased", "not enough evidence"]
EXIT_CODES: Final[dict[str, int]] = {"no bias found": 0, "biased": 1, "not enough evidence": 2}


THE_END: Final = "the end of the text"
"""What keeps out a token behind an end token."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """A token that cannot come: which text, where in it, and which parameter (or THE_END) should have kept it out."""

    text: int
    position: int
    token: int
    parameter: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of an audit.

    reason        one sentence: what decided the verdict
    log_evidence  log of the mean wealth of all bets, which decides at 1/`bet_alpha`, their part of alpha; `found_by` is
                  the bet that decided, `found_at` after how many tokens
    bets          each bet's own log evidence, and `visible` the smallest share of its distribution that would have been found
                  nine times in ten (None: none would)
    smallest_bias the share of a mixture with what is drafted that would have been found
    decisive      the bets without which nobody is acquitted, and the share of its distribution that each must have seen
    negligible    known defects that would have changed too few tokens to be looked for, and the share that they change
    more_tokens   how many more would settle it, as far as can be told
    unbet         positions where a cutoff lay within rounding of a token, on which nothing was bet
    near_ties     of a greedy audit: tokens that differ from the likeliest within rounding
    curve         (tokens, log evidence) on the way
    tested        what was examined, and `untested` what was not
    asked         the audit's own arguments, and `progress` all that is needed to go on with it
    """

    verdict: Verdict
    reason: str
    method: str
    tokens: int
    texts: int
    alpha: float
    bias: float
    coverage: Coverage
    log_evidence: float = 0.0
    bet_alpha: float | None = None
    found_by: str | None = None
    found_at: int | None = None
    impossible: Impossible | None = None
    bets: dict[str, float] = field(default_factory=dict)
    visible: dict[str, float | None] = field(default_factory=dict)
    smallest_bias: float | None = None
    decisive: dict[str, float] = field(default_factory=dict)
    negligible: dict[str, float] = field(default_factory=dict)
    more_tokens: int | None = None
    unbet: int = 0
    near_ties: int = 0
    p_values: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[int, float]] = field(default_factory=list)
    tested: dict[str, str] = field(default_factory=dict)
    untested: list[str] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def threshold(self) -> float:
        """The log evidence that decides."""
        return -math.log(self.bet_alpha or self.alpha)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False, indent=1) + "\n"

    def save(self, path: str | Path) -> Path:
        """Keep it as JSON: the whole audit, to be read, repeated, or gone on with."""
        Path(path).write_text(self.as_json(), encoding="utf-8")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Certificate":
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "Certificate":
        unknown = sorted(set(kept) - {f.name for f in fields(cls)})
        if unknown or "verdict" not in kept:
            raise ValueError(f"this is not a certificate: {'unknown ' + unknown[0] if unknown else 'no verdict'}")
        impossible = kept.get("impossible")
        return cls(
            **{
                **kept,
                "coverage": Coverage(**kept["coverage"]),
                "impossible": Impossible(**impossible) if impossible else None,
                "curve": [(int(n), float(e)) for n, e in kept.get("curve", ())],
            }
        )

    def to_html(self, path: str | Path) -> Path:
        """One page that needs nothing else, with the evidence as it grew."""
        from draftproof.auditor.page import page

        Path(path).write_text(page(self), encoding="utf-8")
        return Path(path)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(c: Certificate) -> list[str]:
    lines = [f"verdict: {c.verdict}", f"  {c.reason}", ""]
    lines.append(f"tokens seen     {c.tokens:,} in {c.texts:,} texts ({c.method})")
    lines.append(f"drafts          {drafts_line(c.coverage)}")
    if c.bets:
        lines.append(f"evidence        {number(c.log_evidence)}; {number(c.threshold)} decides")
    if c.smallest_bias is not None:
        lines.append(f"smallest bias   {c.smallest_bias:.3g} would have been seen; asked for {c.bias:g}")
    lines += [f"{'':15} {line}" for line in defects_seen(c)]
    if c.more_tokens:
        lines.append(f"more tokens     about {c.more_tokens:,} to settle it")
    if c.unbet or c.near_ties:
        lines.append(f"within rounding {c.unbet:,} positions not bet on, {c.near_ties:,} near ties")
    lines += _bet_lines(c)
    lines += [f"p-value         {value:.3g}  {name}" for name, value in c.p_values.items()]
    lines += ["", *(f"{name:<15} {value}" for name, value in c.tested.items())]
    return lines + [f"not tested      {line}" for line in c.untested]


def _bet_lines(c: Certificate) -> list[str]:
    if not c.bets:
        return []
    lines = ["", "evidence by bet (the e-value of each; the bias it would have seen)"]
    for name, log_e in sorted(c.bets.items(), key=lambda item: -item[1]):
        seen = c.visible.get(name)
        told = f": {hint(name)}" if log_e > 0.5 * c.threshold and hint(name) else ""
        lines.append(f"  {number(log_e):>9}  {'–' if seen is None else f'{seen:.3g}':>7}  {name}{told}")
    return lines


def defects_seen(c: Certificate) -> list[str]:
    """For each decisive bet that is no mixture, how often its defect would have had to strike to be seen."""
    asked = {name: share for name, share in c.decisive.items() if share != c.bias}
    seen = {name: c.visible.get(name) for name in asked}
    found = [
        f"{'none' if seen[name] is None else f'{seen[name]:.3g}'} of the defect “{name}”; asked for {share:g}"
        for name, share in asked.items()
    ]
    return found + [
        f"“{name}” was not looked for: it would change {share:.2g} of the tokens"
        for name, share in c.negligible.items()
    ]


def drafts_line(coverage: Coverage) -> str:
    if coverage.source == "unknown":
        return "unknown: the decoder gives no trace, and no drafter was given to replay"
    where = "from the decoder's trace" if coverage.source == "trace" else "estimated by replaying the drafter"
    by_depth = ", ".join(f"{kept}/{made}" for made, kept in zip(coverage.drafted_at, _padded(coverage), strict=True))
    return (
        f"{coverage.drafted:,} tokens drafted, {coverage.kept:,} kept, {coverage.rejected:,.0f} rejections "
        f"in {coverage.rounds:,} rounds, {where}" + (f"; kept by depth {by_depth}" if by_depth else "")
    )


def _padded(coverage: Coverage) -> list[int]:
    return coverage.kept_at + [0] * (len(coverage.drafted_at) - len(coverage.kept_at))


def number(log_e: float) -> str:
    """An e-value, given its logarithm; it may be beyond any float."""
    power = log_e / math.log(10)
    return f"{math.exp(log_e):.3g}" if abs(power) < 4 else f"1e{power:+.0f}"
