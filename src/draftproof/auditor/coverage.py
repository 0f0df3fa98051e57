"""How much speculation an audit has seen: drafts made, kept and rejected. A clean audit of no drafts shows nothing."""

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
    """Counts of drafts. `source`: from the decoder's own trace, estimated by replaying the drafter one token at a time,
    or not known. `rejected` counts rounds that did not keep all they drafted; of trees that is nearly every one.
    `drafted_at[i]` and `kept_at[i]` count the draft tokens at depth i."""

    source: Source = "unknown"
    rounds: int = 0
    drafted: int = 0
    kept: int = 0
    rejected: int | float = 0
    drafted_at: list[int] = field(default_factory=list)
    kept_at: list[int] = field(default_factory=list)

    def note(self, texts: Sequence[Text]) -> None:
        """Count what these texts tell of their rounds."""
        counts = Counter(round_ for text in texts for round_ in text.rounds or ())
        for (drafted, kept), times in counts.items():
            self.source = "trace"
            self.rounds += times
            self.drafted += drafted * times
            self.kept += kept * times
            self.rejected += (kept < drafted) * times
            _raise(self.drafted_at, drafted, times)
            _raise(self.kept_at, kept, times)

    def replayed(self, drafts: int, rejected: int | float) -> None:
        """Count what a drafter would have proposed, one token at a time."""
        if self.source == "trace":
            return
        self.source = "replay"
        self.rounds += drafts
        self.drafted += drafts
        self.kept += round(drafts - rejected)
        self.rejected += rejected


def _raise(counts: list[int], depth: int, times: int) -> None:
    counts += [0] * (depth - len(counts))
    for i in range(depth):
        counts[i] += times


def rejections_needed(bias: float, alpha: float) -> int:
    """So many that a defect which strikes at this share of rejections misses them all with a chance below alpha."""
    return math.ceil(math.log(alpha) / math.log1p(-bias))


def copies(continuation: torch.Tensor, token: torch.Tensor) -> tuple[int, int]:
    """Of a drafter that copies: how many drafts it makes at these positions, and how many are not what came."""
    made = continuation != PAD
    return int(made.sum()), int((made & (continuation != token)).sum())
