"""Small and exact: with a small vocabulary, the joint distribution of three tokens against its enumeration.

The number of texts is chosen beforehand, from the bias to be seen; only then are the counts looked at. The bets run
along on half of the error rate, and stop the audit early where something is plainly wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.auditor.betting import Betting, findings
from draftproof.auditor.certificate import Verdict
from draftproof.auditor.coverage import rejections_needed
from draftproof.auditor.power import g_test, holm, texts_needed, visible
from draftproof.auditor.reference import ReferenceModel
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams

DEPTH: Final = 3
CELLS: Final = 4096
"""Most cells of a joint distribution that is enumerated: vocabularies up to 16."""
METHOD: Final = "the joint distribution of three tokens, and bets on every token"


@dataclass(slots=True)
class Joint:
    """An audit by counting, under way; its bets are `betting`."""

    betting: Betting
    dists: tuple[Float[Tensor, " W"], ...]
    counts: Int[Tensor, "P W"]
    needed: int
    """Texts, over all prompts."""

    @classmethod
    def start(cls, betting: Betting) -> "Joint | None":
        """None where rounding blurs the distribution's support: counts would be held against the wrong cells."""
        asked = betting.asked
        dists = tuple(joint_distribution(betting.teacher, prompt, asked.sampling) for prompt in asked.prompts)
        known = [dist for dist in dists if dist is not None]
        if len(known) < len(dists):
            return None
        made = cls(betting, tuple(known), torch.zeros(len(known), len(known[0]), dtype=torch.long), 0)
        made.needed = texts_needed(made.cells, asked.bias, made.each_alpha) * len(known)
        return made

    @property
    def alpha(self) -> float:
        """What the bets leave."""
        return self.betting.asked.alpha - self.betting.alpha

    @property
    def each_alpha(self) -> float:
        """The joint distribution and the third token's, for each prompt."""
        return self.alpha / (2 * len(self.dists))

    @property
    def cells(self) -> int:
        return max(int((dist > 0).sum()) for dist in self.dists)

    def look(self, texts: Sequence[Text]) -> None:
        """Count and bet. What goes beyond the chosen number of texts is not counted."""
        first = self.betting.texts
        self.betting.look(texts)
        counted = texts[: max(0, self.needed - first)]
        short = next((i for i, text in enumerate(counted) if len(text.tokens) < DEPTH), None)
        if short is not None:
            raise ValueError(
                f"text {first + short} ended after {len(counted[short].tokens)} tokens, and the joint distribution is of "
                f'{DEPTH}: audit a decoder that ends its texts with method="bets"'
            )
        tokens = torch.tensor([text.tokens[:DEPTH] for text in counted], dtype=torch.long).view(-1, DEPTH)
        V = self.betting.teacher.vocab_size
        cell = tokens @ torch.tensor([V**i for i in reversed(range(DEPTH))])
        prompt = torch.arange(first, first + len(counted)) % len(self.dists)
        flat = prompt * self.counts.shape[1] + cell
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)

    @property
    def complete(self) -> bool:
        return self.betting.texts >= self.needed

    def settled(self) -> bool:
        return self.betting.biased or self.complete

    def findings(self) -> dict[str, Any]:
        found = findings(self.betting)
        found |= {"method": METHOD, "decisive": {}, "negligible": {}}  # counts decide, not bets
        if self.betting.biased:
            return found
        if not self.complete:
            reason = (
                f"{self.betting.texts:,} of the {self.needed:,} texts that a bias of {self.betting.asked.bias:g} needs"
            )
            each = self.betting.tokens // max(1, self.betting.texts)
            more = (self.needed - self.betting.texts) * each
            return {**found, "verdict": "not enough evidence", "reason": reason, "more_tokens": more}
        p_values = self._p_values()
        verdict, reason = self._ruling(p_values)
        smallest = visible(self.cells, int(self.counts.sum(1).min()), self.each_alpha)
        return {
            **found,
            "verdict": verdict,
            "reason": reason,
            "p_values": p_values,
            "smallest_bias": smallest,
            "more_tokens": None,
            "found_by": reason.split(":")[0] if verdict == "biased" else None,
            "found_at": self.betting.tokens if verdict == "biased" else None,
        }

    def _p_values(self) -> dict[str, float]:
        V, made = self.betting.teacher.vocab_size, {}
        for i, (dist, seen) in enumerate(zip(self.dists, self.counts, strict=True)):
            made[f"joint distribution of three tokens, prompt {i}"] = g_test(seen, dist)
            made[f"third token, prompt {i}"] = g_test(seen.view(-1, V).sum(0), dist.view(-1, V).sum(0))
        return made

    def _ruling(self, p_values: dict[str, float]) -> tuple[Verdict, str]:
        falls = [n for n, fell in zip(p_values, holm(list(p_values.values()), self.alpha), strict=True) if fell]
        if falls:
            return "biased", f"{falls[0]}: p = {p_values[falls[0]]:.3g}"
        asked, coverage = self.betting.asked, self.betting.coverage
        if coverage.source == "unknown":
            return "not enough evidence", "how much was drafted is unknown: give a drafter to replay"
        needed = rejections_needed(asked.bias, asked.alpha)
        if coverage.rejected < needed:
            return "not enough evidence", f"{coverage.rejected:,.0f} rejections were seen; {needed:,} are needed"
        return "no bias found", f"no test fell, and a total variation of {asked.bias:g} would have been seen"

    def progress(self) -> dict[str, Any]:
        return {**self.betting.progress(), "counts": self.counts.tolist()}

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from there."""
        self.betting.restore(kept)
        self.counts = torch.tensor(kept["counts"], dtype=torch.long)


def joint_distribution(
    teacher: ReferenceModel, prompt: Sequence[int], sampling: SamplingParams
) -> Float[Tensor, " W"] | None:
    """The distribution of the next three tokens, the last running fastest; None where a cutoff is within rounding of a token."""
    V = teacher.vocab_size
    texts = [Text(tuple(prompt), (a, b, 0)) for a, b in product(range(V), repeat=2)]
    pieces = [teacher.dists(Positions.of(chunk), sampling) for chunk in teacher.chunks(texts)]
    if not all(bool(dists.clear.all()) for dists in pieces):
        return None
    p = torch.cat([dists.p for dists in pieces]).double().cpu().view(V, V, DEPTH, V)
    return (p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]).flatten()
