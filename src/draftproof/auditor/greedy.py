"""Greedy decoding: every token is the likeliest one given the text before it, or it is wrong. Near ties are apart.

A pass over five tokens and a pass over one differ in the last bits of their logits; where the two likeliest tokens are
that close either may come. Which token should have come is asked of the text as it was said, so one near tie does not
make all that follows a difference.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from draftproof.auditor.certificate import THE_END, Impossible, Verdict
from draftproof.auditor.coverage import Coverage, rejections_needed
from draftproof.auditor.reference import ReferenceModel, tilted
from draftproof.auditor.settings import AuditRequest
from draftproof.auditor.texts import Positions, Text

METHOD: Final = "equality with the likeliest token"


@dataclass(slots=True)
class Greedy:
    """A greedy audit, under way."""

    teacher: ReferenceModel
    asked: AuditRequest
    texts: int = 0
    tokens: int = 0
    near_ties: int = 0
    coverage: Coverage = field(default_factory=Coverage)
    wrong: Impossible | None = None

    def look(self, texts: Sequence[Text]) -> None:
        """Compare these texts with what the target holds likeliest."""
        self.coverage.note(texts)
        numbers = [self.texts + i for i, text in enumerate(texts) if text.tokens]
        for chunk in self.teacher.chunks([text for text in texts if text.tokens]):
            if self.wrong is not None:
                break
            self._compare(chunk, numbers)
            numbers = numbers[len(chunk) :]
        self.texts += len(texts)

    def _compare(self, chunk: Sequence[Text], numbers: Sequence[int]) -> None:
        positions = Positions.of(chunk)
        scores = self.teacher.scores(positions)
        positions = positions.to(scores.device)
        scores = tilted(scores, positions, self.asked.sampling)
        said = scores.gather(1, positions.token[:, None])[:, 0]
        short = (scores.amax(-1) - said).double()
        other = positions.token != scores.argmax(-1)
        margin = 2 * math.log1p(self.teacher.tolerance(self.asked.sampling))
        over = positions.behind(self.asked.ends)
        wrong = ((other & ~(short <= margin)) | over).nonzero()[:, 0]
        self.near_ties += int((other & (short <= margin)).sum())
        if len(wrong):
            n = int(wrong[0])
            text, token = numbers[positions.text_of(n)], int(positions.token[n])
            culprit = THE_END if bool(over[n]) else f"a likelier one, by {short[n]:.3g}"
            self.wrong = Impossible(text, int(positions.said[n]), token, culprit)
        self.tokens += len(positions)

    def settled(self) -> bool:
        return self.wrong is not None or self.coverage.rejected >= self._needed

    @property
    def _needed(self) -> int:
        return rejections_needed(self.asked.bias, self.asked.alpha)

    def _ruling(self) -> tuple[Verdict, str]:
        if self.wrong is not None:
            w = self.wrong
            return "biased", f"token {w.token} at position {w.position} of text {w.text}: {w.parameter} keeps it out"
        if self.settled():
            return "no bias found", f"all {self.tokens:,} tokens are the likeliest ones, near ties counted apart"
        if self.coverage.source == "unknown":
            return "not enough evidence", "how much was drafted is unknown: audit a decoder that tells its rounds"
        return "not enough evidence", f"{self.coverage.rejected:,.0f} rejections were seen; {self._needed:,} are needed"

    def findings(self) -> dict[str, Any]:
        verdict, reason = self._ruling()
        rejected = self.coverage.rejected
        more = math.ceil(self.tokens * (self._needed / rejected - 1)) if rejected and not self.settled() else None
        smallest = -math.log(self.asked.alpha) / self.tokens if self.tokens else None
        return {
            "verdict": verdict,
            "reason": reason,
            "method": METHOD,
            "tokens": self.tokens,
            "texts": self.texts,
            "coverage": deepcopy(self.coverage),
            "impossible": self.wrong,
            "near_ties": self.near_ties,
            "smallest_bias": smallest,
            "more_tokens": more,
        }

    def progress(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "near_ties": self.near_ties,
            "coverage": asdict(self.coverage),
            "wrong": None if self.wrong is None else asdict(self.wrong),
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from there."""
        self.texts, self.tokens, self.near_ties = kept["texts"], kept["tokens"], kept["near_ties"]
        self.coverage = Coverage(**kept["coverage"])
        self.wrong = Impossible(**kept["wrong"]) if kept["wrong"] else None
