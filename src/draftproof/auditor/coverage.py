"""Count the drafts that an audit has seen: proposed, kept and rejected. A clean audit without drafts shows nothing."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from draftproof.auditor.texts import Text
from draftproof.core.types import PAD

Source = Literal["trace", "replay", "unknown"]


@dataclass(slots=True)
class Coverage:
    """Counts of draft tokens and rounds.

    source      "trace": the decoder's own rounds; "replay": estimated by replaying the drafter one token at a time;
                "unknown": neither was possible
    rejected    rounds that did not keep everything they drafted; nearly every round, if drafts are trees
    drafted_at  draft tokens at each depth, of which `kept_at` were kept
    """

    source: Source = "unknown"
    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    rejected: int | float = 0
    drafted_at: list[int] = field(default_factory=list)
    kept_at: list[int] = field(default_factory=list)

    def note(self, texts: Sequence[Text]) -> None:
        """Count the rounds that these texts report."""
        counts = Counter(round_ for text in texts for round_ in text.rounds or ())
        for (drafted, kept), times in counts.items():
            self.source = "trace"
            self.rounds += times
            self.drafted += drafted * times
            self.kept += kept * times
            self.rejected += (kept < drafted) * times
            _add(self.drafted_at, drafted, times)
            _add(self.kept_at, kept, times)

    def replayed(self, drafts: int, rejected: int | float) -> None:
        """Count drafts of one token that a replayed drafter would have proposed."""
        if self.source == "trace":
            return
        self.source = "replay"
        self.rounds += drafts
        self.drafted += drafts
        self.kept += round(drafts - rejected)
        self.rejected += rejected


def _add(counts: list[int], depth: int, times: int) -> None:
    counts += [0] * (depth - len(counts))
    for i in range(depth):
        counts[i] += times


def rejections_needed(bias: float, alpha: float) -> int:
    """Return how many rejections a defect that affects a share `bias` of them misses with probability below alpha."""
    return math.ceil(math.log(alpha) / math.log1p(-bias))


def copies(continuation: torch.Tensor, token: torch.Tensor) -> tuple[int, int]:
    """Count the drafts that a copying drafter proposes at these positions, and how many differ from the token."""
    proposed = continuation != PAD
    return int(proposed.sum()), int((proposed & (continuation != token)).sum())
