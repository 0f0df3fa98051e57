"""The emitted tokens of many texts, laid flat: what came before each, and where it stands in its round.

All of it is fixed before the token is drawn, so a bet may use it: an exact decoder's distribution of the token, given these, is
the target's. What became of the token (kept or closing) and what was drafted in its place are left out on purpose:
given those it is not (`tests/auditor/test_false_alarms.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.types import PAD, Round

LONGEST_MATCH: Final = 3


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what a decoder said to it; `rounds` where it tells."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: tuple[Round, ...] | None = None


@dataclass(frozen=True)
class Positions:
    """N emitted tokens. `before` are the texts up to each, PAD behind their ends; `said` how many tokens of the output
    come before it; `depth` how many tokens of its round do, PAD where the rounds are not known."""

    texts: tuple[Text, ...]
    token: Int[Tensor, " N"]
    before: Int[Tensor, "N L"]
    length: Int[Tensor, " N"]
    said: Int[Tensor, " N"]
    depth: Int[Tensor, " N"]

    @classmethod
    def of(cls, texts: Sequence[Text]) -> "Positions":
        widths = torch.tensor([len(t.tokens) for t in texts])
        longest = max((len(t.prompt) + len(t.tokens) for t in texts), default=1)
        whole = torch.tensor(
            [[*t.prompt, *t.tokens] + [PAD] * (longest - len(t.prompt) - len(t.tokens)) for t in texts]
        )
        row = torch.arange(len(texts)).repeat_interleave(widths)
        said = torch.arange(len(row)) - (widths.cumsum(0) - widths)[row]
        length = torch.tensor([len(t.prompt) for t in texts])[row] + said
        whole = whole.view(len(texts), longest)
        before = whole[row].masked_fill(torch.arange(longest) >= length[:, None], PAD)
        depth = torch.tensor([d for t in texts for d in depths(t)], dtype=torch.long)
        return cls(tuple(texts), whole[row, length], before[:, : max(longest - 1, 1)], length, said, depth)

    def to(self, device: torch.device) -> "Positions":
        """The same where the distributions are."""
        tensors = {name: getattr(self, name).to(device) for name in ("token", "before", "length", "said", "depth")}
        return replace(self, **tensors)

    def text_of(self, n: int) -> int:
        """Which of the texts position n is in."""
        ends = torch.tensor([len(text.tokens) for text in self.texts]).cumsum(0)
        return int((ends <= n).sum())

    def __len__(self) -> int:
        return len(self.token)

    def late(self, tokens: Int[Tensor, " N"]) -> "Positions":
        """The same with so many of the tokens before each not yet known."""
        length = self.length - tokens
        before = self.before.masked_fill(self._place >= length[:, None], PAD)
        return replace(self, before=before, length=length, said=self.said - tokens)

    @cached_property
    def _place(self) -> Int[Tensor, " L"]:
        return torch.arange(self.before.shape[1], device=self.before.device)

    @cached_property
    def in_output(self) -> Bool[Tensor, "N L"]:
        """Which of the tokens before were said, and not asked."""
        return (self._place >= (self.length - self.said)[:, None]) & (self._place < self.length[:, None])

    def behind(self, ends: Collection[int]) -> Bool[Tensor, " N"]:
        """Whether one of these tokens was said before each: its text had ended."""
        over = torch.tensor(sorted(ends), dtype=torch.long, device=self.before.device)
        return (torch.isin(self.before, over) & self.in_output).any(-1)

    @cached_property
    def last(self) -> Int[Tensor, " N"]:
        return self.before.gather(1, self.length[:, None] - 1)[:, 0]

    @cached_property
    def continuation(self) -> Int[Tensor, " N"]:
        """What followed the last tokens where they stood before, PAD where they never did: the longest match of up to
        LONGEST_MATCH tokens, and of those the latest. It is what copying drafters propose first."""
        place = self._place
        found = torch.full_like(self.token, PAD)
        alike = place < (self.length - 1)[:, None]  # the match must have been followed by something
        for size in range(1, LONGEST_MATCH + 1):
            back = (self.length - size)[:, None]
            same = self.before == self.before.gather(1, back.clamp_min(0))
            alike = alike & torch.nn.functional.pad(same, (size - 1, 0))[:, : same.shape[1]] & (back > 0)
            latest = torch.where(alike, place, -1).amax(-1)
            found = torch.where(latest >= size - 1, self._behind(latest), found)
        return found

    def _behind(self, place: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        last = self.before.shape[1] - 1
        return self.before.gather(1, (place + 1).clamp(0, last)[:, None])[:, 0]


def depths(text: Text) -> Iterator[int]:
    """For every token how many of its round came before it, by the borders of the rounds that ended before it."""
    if text.rounds is None:
        yield from [PAD] * len(text.tokens)
        return
    counted = [i for round_ in text.rounds for i in range(round_.accepted + 1)]
    if len(counted) < len(text.tokens):
        raise ValueError(
            f"the trace has rounds for {len(counted)} tokens, and {len(text.tokens)} were emitted: a round emits what "
            "it accepts and one token more"
        )
    yield from counted[: len(text.tokens)]
