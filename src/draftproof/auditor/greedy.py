"""Audit greedy decoding: every token must be the likeliest one given the text before it, up to near ties.

Passes over five tokens and over one differ in the last bits of their logits, so either of two tokens that close may be
emitted. The target reads the text as it was emitted, so one near tie does not make the rest of a text differ.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from draftproof.auditor.certificate import THE_END, Impossible, Verdict, vocabulary
from draftproof.auditor.coverage import Coverage, rejections_needed
from draftproof.auditor.reference import ReferenceModel, tilted
from draftproof.auditor.settings import AuditRequest
from draftproof.auditor.texts import Positions, Text, within_vocabulary

METHOD: Final = "equality with the likeliest token"


@dataclass(slots=True)
class Greedy:
    """A greedy audit in progress."""

    reference: ReferenceModel
    request: AuditRequest
    texts: int = 0
    tokens: int = 0
    near_ties: int = 0
    coverage: Coverage = field(default_factory=Coverage)
    wrong: Impossible | None = None

    def update(self, texts: Sequence[Text]) -> None:
        """Compare every token of these texts with the target's likeliest one."""
        known, outside = within_vocabulary(texts, self.reference.vocab_size)
        self.coverage.note(known)
        numbers = [self.texts + i for i, text in enumerate(known) if text.tokens]
        for chunk in self.reference.chunks([text for text in known if text.tokens]):
            if self.wrong is not None:
                break
            self._compare(chunk, numbers)
            numbers = numbers[len(chunk) :]
        if outside is not None and self.wrong is None:
            where = self.texts + outside.text, outside.position, outside.token
            self.wrong = Impossible(*where, vocabulary(self.reference.vocab_size))
            self.tokens += 1
        self.texts += len(known)

    def _compare(self, chunk: Sequence[Text], numbers: Sequence[int]) -> None:
        positions = Positions.of(chunk)
        scores = self.reference.scores(positions)
        positions = positions.to(scores.device)
        scores = tilted(scores, positions, self.request.sampling)
        emitted = scores.gather(1, positions.token[:, None])[:, 0]
        deficit = (scores.amax(-1) - emitted).double()
        other = positions.token != scores.argmax(-1)
        margin = 2 * math.log1p(self.reference.tolerance(self.request.sampling))
        ended = positions.after_end(self.request.ends)
        wrong = ((other & ~(deficit <= margin)) | ended).nonzero()[:, 0]
        self.near_ties += int((other & (deficit <= margin)).sum())
        if len(wrong):
            n = int(wrong[0])
            text, token = numbers[positions.text_of(n)], int(positions.token[n])
            culprit = THE_END if bool(ended[n]) else f"a likelier one, by {deficit[n]:.3g}"
            self.wrong = Impossible(text, int(positions.output_index[n]), token, culprit)
        self.tokens += len(positions)

    def settled(self) -> bool:
        """Return whether a wrong token was found, or enough rejections were seen without one."""
        return self.wrong is not None or self.coverage.rejected >= self._needed

    @property
    def _needed(self) -> int:
        return rejections_needed(self.request.bias, self.request.alpha)

    def _verdict(self) -> tuple[Verdict, str]:
        if self.wrong is not None:
            w = self.wrong
            return "biased", f"token {w.token} at position {w.position} of text {w.text}: {w.parameter} rules it out"
        if self.settled():
            return "no bias found", f"all {self.tokens:,} tokens are the likeliest ones, up to near ties"
        if self.coverage.source == "unknown":
            return "not enough evidence", "how much was drafted is unknown: audit a decoder that reports its rounds"
        return "not enough evidence", f"{self.coverage.rejected:,.0f} rejections were seen; {self._needed:,} are needed"

    def findings(self) -> dict[str, Any]:
        """Return the fields of a certificate that this method fills."""
        verdict, reason = self._verdict()
        rejected = self.coverage.rejected
        more = math.ceil(self.tokens * (self._needed / rejected - 1)) if rejected and not self.settled() else None
        smallest = -math.log(self.request.alpha) / self.tokens if self.tokens else None
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
        """Return the state that `restore` needs, as JSON can hold it."""
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "near_ties": self.near_ties,
            "coverage": asdict(self.coverage),
            "wrong": None if self.wrong is None else asdict(self.wrong),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `progress` returned."""
        self.texts, self.tokens, self.near_ties = saved["texts"], saved["tokens"], saved["near_ties"]
        self.coverage = Coverage(**saved["coverage"])
        self.wrong = Impossible(**saved["wrong"]) if saved["wrong"] else None
