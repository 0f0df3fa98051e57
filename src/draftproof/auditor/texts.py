"""Lay the emitted tokens of many texts flat: the tokens before each one, and its place in its round.

All of this is fixed before the token is drawn, so a bet may use it: given these, an exact decoder draws the token from
the target's distribution. What happened to the token (draft token or last of its round) and what was drafted in its
place are left out: given those, an exact decoder does not (`tests/auditor/test_false_alarms.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.types import PAD, Round

LONGEST_MATCH: Final = 3
"""Tokens that a copying drafter is assumed to match at most."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, the tokens that a decoder emitted after it, and its rounds if the decoder reports them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: tuple[Round, ...] | None = None


class Outside(NamedTuple):
    """An emitted token that is outside the vocabulary, and where: the text's index, and the position in its output."""

    text: int
    position: int
    token: int


def within_vocabulary(texts: Sequence[Text], vocab_size: int) -> tuple[list[Text], Outside | None]:
    """Return the texts up to the first token that is outside the vocabulary, and that token.

    The text with that token is cut off before it, and later texts are dropped: the target has no distribution after it.
    """
    for i, text in enumerate(texts):
        for position, token in enumerate(text.tokens):
            if not 0 <= token < vocab_size:
                cut = replace(text, tokens=text.tokens[:position])
                return [*texts[:i], cut], Outside(i, position, token)
    return list(texts), None


@dataclass(frozen=True)
class Positions:
    """N emitted tokens and what precedes each.

    before        the text up to each token, padded on the right with PAD
    length        the number of tokens in `before`, prompt included
    output_index  how many of them are output tokens
    depth         how many of them belong to the token's own round; PAD if the rounds are not known
    """

    texts: tuple[Text, ...]
    token: Int[Tensor, " N"]
    before: Int[Tensor, "N L"]
    length: Int[Tensor, " N"]
    output_index: Int[Tensor, " N"]
    depth: Int[Tensor, " N"]

    @classmethod
    def of(cls, texts: Sequence[Text]) -> "Positions":
        """List every emitted token of these texts."""
        widths = torch.tensor([len(t.tokens) for t in texts])
        longest = max((len(t.prompt) + len(t.tokens) for t in texts), default=1)
        whole = torch.tensor(
            [[*t.prompt, *t.tokens] + [PAD] * (longest - len(t.prompt) - len(t.tokens)) for t in texts]
        )
        row = torch.arange(len(texts)).repeat_interleave(widths)
        output_index = torch.arange(len(row)) - (widths.cumsum(0) - widths)[row]
        length = torch.tensor([len(t.prompt) for t in texts])[row] + output_index
        whole = whole.view(len(texts), longest)
        before = whole[row].masked_fill(torch.arange(longest) >= length[:, None], PAD)
        depth = torch.tensor([d for t in texts for d in depths(t)], dtype=torch.long)
        return cls(tuple(texts), whole[row, length], before[:, : max(longest - 1, 1)], length, output_index, depth)

    def to(self, device: torch.device) -> "Positions":
        """Copy the tensors to a device."""
        tensors = {
            name: getattr(self, name).to(device) for name in ("token", "before", "length", "output_index", "depth")
        }
        return replace(self, **tensors)

    def text_of(self, n: int) -> int:
        """Return the index of the text that position n belongs to."""
        ends = torch.tensor([len(text.tokens) for text in self.texts]).cumsum(0)
        return int((ends <= n).sum())

    def __len__(self) -> int:
        return len(self.token)

    def late(self, tokens: Int[Tensor, " N"]) -> "Positions":
        """Hide the last `tokens[n]` tokens before position n: the context that a penalty applied late has seen."""
        length = self.length - tokens
        before = self.before.masked_fill(self._place >= length[:, None], PAD)
        return replace(self, before=before, length=length, output_index=self.output_index - tokens)

    @cached_property
    def _place(self) -> Int[Tensor, " L"]:
        return torch.arange(self.before.shape[1], device=self.before.device)

    @cached_property
    def in_output(self) -> Bool[Tensor, "N L"]:
        """Mark the tokens of `before` that are output, not prompt."""
        return (self._place >= (self.length - self.output_index)[:, None]) & (self._place < self.length[:, None])

    def after_end(self, ends: Collection[int]) -> Bool[Tensor, " N"]:
        """Return whether an end-of-text token was emitted before each position."""
        eos = torch.tensor(sorted(ends), dtype=torch.long, device=self.before.device)
        return (torch.isin(self.before, eos) & self.in_output).any(-1)

    @cached_property
    def last(self) -> Int[Tensor, " N"]:
        return self.before.gather(1, self.length[:, None] - 1)[:, 0]

    @cached_property
    def continuation(self) -> Int[Tensor, " N"]:
        """Return the token that followed the latest longest match of the last tokens; PAD if nothing matches.

        Matches have up to LONGEST_MATCH tokens. It is the token that copying drafters propose first.
        """
        place = self._place
        found = torch.full_like(self.token, PAD)
        alike = place < (self.length - 1)[:, None]  # the match must have been followed by something
        for size in range(1, LONGEST_MATCH + 1):
            back = (self.length - size)[:, None]
            same = self.before == self.before.gather(1, back.clamp_min(0))
            alike = alike & torch.nn.functional.pad(same, (size - 1, 0))[:, : same.shape[1]] & (back > 0)
            latest = torch.where(alike, place, -1).amax(-1)
            found = torch.where(latest >= size - 1, self._following(latest), found)
        return found

    def _following(self, place: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        last = self.before.shape[1] - 1
        return self.before.gather(1, (place + 1).clamp(0, last)[:, None])[:, 0]


def depths(text: Text) -> Iterator[int]:
    """Yield for every token how many tokens of its round come before it; PAD if the rounds are not known."""
    if text.rounds is None:
        yield from [PAD] * len(text.tokens)
        return
    counted = [i for round_ in text.rounds for i in range(round_.accepted + 1)]
    if len(counted) < len(text.tokens):
        raise ValueError(
            f"the trace has rounds for {len(counted)} tokens, and {len(text.tokens)} were emitted: a round emits its "
            "accepted tokens and one more"
        )
    yield from counted[: len(text.tokens)]
