"""Hold the result of an audit: a verdict, its evidence, what was tested and what was not; as JSON, text or HTML.

A certificate never says "exact"; it says which bias would have been found.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from draftproof.auditor.bets import hint
from draftproof.auditor.coverage import Coverage

Verdict = Literal["no bias found", "biased", "not enough evidence"]
EXIT_CODES: Final[dict[str, int]] = {"no bias found": 0, "biased": 1, "not enough evidence": 3}
"""The command's exit status by verdict; 2 is left out, as it is the status of a usage error."""

THE_END: Final = "the end of the text"
"""`Impossible.parameter` of a token after an end-of-text token."""


def vocabulary(size: int) -> str:
    """Return `Impossible.parameter` of a token that is outside the target's vocabulary of this size."""
    return f"the vocabulary (ids 0 to {size - 1:,})"


@dataclass(frozen=True, slots=True)
class Impossible:
    """An emitted token of probability 0: its text, its position, and what rules it out.

    `parameter` is the name of a sampling parameter, THE_END, the vocabulary, or a likelier token (greedy decoding).
    """

    text: int
    position: int
    token: int
    parameter: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of an audit.

    reason         one sentence: what decided the verdict
    log_evidence   log of the mean wealth of all bets; it decides at 1/`bet_alpha`, the bets' part of alpha
    found_by       the bet or test that decided, and `found_at` after how many tokens
    bets           each bet's own log evidence
    visible        for each bet the smallest share of its distribution that would have been found nine times in ten
                   (None: not even all of it)
    smallest_bias  the smallest share of a mixture with the drafts that would have been found
    decisive       the bets that must be able to win before "no bias found", and the share that each must find
    negligible     known defects that would have changed too few tokens to be required, and the share that they change
    more_tokens    an estimate of how many more tokens would settle the audit
    unbet          positions not bet on, because a cutoff lay within rounding of a token
    near_ties      greedy audits: tokens that differ from the likeliest one within rounding
    curve          (tokens, log evidence) after every chunk of texts
    tested         what was examined, and `untested` what was not
    asked          the audit's arguments, and `progress` the state that resuming needs
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
        """Return the log evidence that decides."""
        return -math.log(self.bet_alpha or self.alpha)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False, indent=1) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the certificate as JSON; the audit can be repeated or resumed from it."""
        Path(path).write_text(self.as_json(), encoding="utf-8")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "Certificate":
        """Read a certificate that `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Certificate":
        """Restore a certificate from `as_dict`; refuse a dict that is not one."""
        unknown = sorted(set(saved) - {f.name for f in fields(cls)})
        if unknown or "verdict" not in saved:
            raise ValueError(f"this is not a certificate: {'unknown ' + unknown[0] if unknown else 'no verdict'}")
        impossible = saved.get("impossible")
        return cls(
            **{
                **saved,
                "coverage": Coverage(**saved["coverage"]),
                "impossible": Impossible(**impossible) if impossible else None,
                "curve": [(int(n), float(e)) for n, e in saved.get("curve", ())],
            }
        )

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained HTML page, with a curve of the evidence over tokens."""
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
        suspect = f": {hint(name)}" if log_e > 0.5 * c.threshold and hint(name) else ""
        lines.append(f"  {number(log_e):>9}  {'–' if seen is None else f'{seen:.3g}':>7}  {name}{suspect}")
    return lines


def defects_seen(c: Certificate) -> list[str]:
    """Describe for each known defect the share of it that would have been seen, or why it was not looked for."""
    wanted = {name: share for name, share in c.decisive.items() if share != c.bias}
    seen = {name: c.visible.get(name) for name in wanted}
    found = [
        f"{'none' if seen[name] is None else f'{seen[name]:.3g}'} of the defect “{name}”; asked for {share:g}"
        for name, share in wanted.items()
    ]
    return found + [
        f"“{name}” was not looked for: it would change {share:.2g} of the tokens"
        for name, share in c.negligible.items()
    ]


def drafts_line(coverage: Coverage) -> str:
    """Describe how much was drafted, kept and rejected, on one line."""
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
    """Format an e-value, given its logarithm; it may exceed any float."""
    power = log_e / math.log(10)
    return f"{math.exp(log_e):.3g}" if abs(power) < 4 else f"1e{power:+.0f}"
