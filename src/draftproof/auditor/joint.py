"""Audit a decoder of a small vocabulary: count the first three tokens and compare with their enumerated distribution.

The number of texts is fixed beforehand from the bias to be found, and the counts are tested only when it is reached.
Bets run alongside on half of the error rate, and stop the audit early if the bias is large.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.auditor.betting import Betting
from draftproof.auditor.certificate import Verdict
from draftproof.auditor.coverage import rejections_needed
from draftproof.auditor.power import g_test, holm, texts_needed, visible
from draftproof.auditor.reference import ReferenceModel
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams

DEPTH: Final = 3
"""Tokens of each text that are counted jointly."""
CELLS: Final = 4096
"""Cells of a joint distribution that are enumerated at most: vocabularies up to 16."""
METHOD: Final = "the joint distribution of three tokens, and bets on every token"


@dataclass(slots=True)
class Joint:
    """An audit by counting, in progress; `betting` is the audit by bets alongside."""

    betting: Betting
    dists: tuple[Float[Tensor, " W"], ...]
    counts: Int[Tensor, "P W"]
    needed: int
    """Texts to count, over all prompts."""

    @classmethod
    def start(cls, betting: Betting) -> "Joint | None":
        """Enumerate the distributions; None if rounding blurs their support, as counts might then hit a wrong cell."""
        request = betting.request
        dists = tuple(joint_distribution(betting.reference, prompt, request.sampling) for prompt in request.prompts)
        known = [dist for dist in dists if dist is not None]
        if len(known) < len(dists):
            return None
        joint = cls(betting, tuple(known), torch.zeros(len(known), len(known[0]), dtype=torch.long), 0)
        joint.needed = texts_needed(joint.cells, request.bias, joint.each_alpha) * len(known)
        return joint

    @property
    def alpha(self) -> float:
        """Return the error rate of the counts: what the bets leave of the request's."""
        return self.betting.request.alpha - self.betting.alpha

    @property
    def each_alpha(self) -> float:
        """Return the error rate of one test: each prompt has two, the joint distribution and the third token."""
        return self.alpha / (2 * len(self.dists))

    @property
    def cells(self) -> int:
        """Return the largest number of possible outcomes of a prompt."""
        return max(int((dist > 0).sum()) for dist in self.dists)

    def update(self, texts: Sequence[Text]) -> None:
        """Bet on these texts and count them; texts beyond `needed` are not counted."""
        first = self.betting.texts
        self.betting.update(texts)
        if self.betting.biased:  # the counts no longer matter, and a token outside the vocabulary has no cell
            return
        counted = texts[: max(0, self.needed - first)]
        short = next((i for i, text in enumerate(counted) if len(text.tokens) < DEPTH), None)
        if short is not None:
            raise ValueError(
                f"text {first + short} ended after {len(counted[short].tokens)} tokens, and the joint distribution "
                f'needs {DEPTH}: audit a decoder that ends its texts with method="bets"'
            )
        tokens = torch.tensor([text.tokens[:DEPTH] for text in counted], dtype=torch.long).view(-1, DEPTH)
        V = self.betting.reference.vocab_size
        cell = tokens @ torch.tensor([V**i for i in reversed(range(DEPTH))])
        prompt = torch.arange(first, first + len(counted)) % len(self.dists)
        flat = prompt * self.counts.shape[1] + cell
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)

    @property
    def complete(self) -> bool:
        return self.betting.texts >= self.needed

    def settled(self) -> bool:
        """Return whether the bets found bias or all texts are counted."""
        return self.betting.biased or self.complete

    def findings(self) -> dict[str, Any]:
        """Return the fields of a certificate that this method fills."""
        found = self.betting.findings()
        found |= {"method": METHOD, "decisive": {}, "negligible": {}}  # the counts decide, not the bets
        if self.betting.biased:
            return found
        if not self.complete:
            bias = self.betting.request.bias
            reason = f"{self.betting.texts:,} of the {self.needed:,} texts that a bias of {bias:g} needs"
            each = self.betting.tokens // max(1, self.betting.texts)
            more = (self.needed - self.betting.texts) * each
            return {**found, "verdict": "not enough evidence", "reason": reason, "more_tokens": more}
        p_values = self._p_values()
        verdict, reason = self._verdict(p_values)
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
        V, p_values = self.betting.reference.vocab_size, {}
        for i, (dist, seen) in enumerate(zip(self.dists, self.counts, strict=True)):
            p_values[f"joint distribution of three tokens, prompt {i}"] = g_test(seen, dist)
            p_values[f"third token, prompt {i}"] = g_test(seen.view(-1, V).sum(0), dist.view(-1, V).sum(0))
        return p_values

    def _verdict(self, p_values: dict[str, float]) -> tuple[Verdict, str]:
        rejected = [n for n, fails in zip(p_values, holm(list(p_values.values()), self.alpha), strict=True) if fails]
        if rejected:
            return "biased", f"{rejected[0]}: p = {p_values[rejected[0]]:.3g}"
        request, coverage = self.betting.request, self.betting.coverage
        if coverage.source == "unknown":
            return "not enough evidence", "how much was drafted is unknown: give a drafter to replay"
        needed = rejections_needed(request.bias, request.alpha)
        if coverage.rejected < needed:
            return "not enough evidence", f"{coverage.rejected:,.0f} rejections were seen; {needed:,} are needed"
        return "no bias found", f"no test failed, and a total variation of {request.bias:g} would have been seen"

    def progress(self) -> dict[str, Any]:
        """Return the state that `restore` needs, as JSON can hold it."""
        return {**self.betting.progress(), "counts": self.counts.tolist()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `progress` returned."""
        self.betting.restore(saved)
        self.counts = torch.tensor(saved["counts"], dtype=torch.long)


def joint_distribution(
    reference: ReferenceModel, prompt: Sequence[int], sampling: SamplingParams
) -> Float[Tensor, " W"] | None:
    """Enumerate the next three tokens, the last running fastest; None if a cutoff lies within rounding of a token."""
    V = reference.vocab_size
    texts = [Text(tuple(prompt), (a, b, 0)) for a, b in product(range(V), repeat=2)]
    tables = [reference.dists(Positions.of(chunk), sampling) for chunk in reference.chunks(texts)]
    if not all(bool(dists.clear.all()) for dists in tables):
        return None
    p = torch.cat([dists.p for dists in tables]).double().cpu().view(V, V, DEPTH, V)
    return (p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]).flatten()
