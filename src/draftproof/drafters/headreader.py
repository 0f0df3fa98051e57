"""A head's memory that follows the contexts: what the target showed is read, what was only drafted is written over.

The head's entry for position t is made of the target's states there and of the token behind. After a round both are
known up to the position before the closing token: all that was kept is read anew, with true states, in one pass whose
last output is the state to draft from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core import host
from draftproof.core.host import sent
from draftproof.drafters import Context
from draftproof.models.fitted import FittedHead
from draftproof.models.graphs import SWITCHED_OFF, Recorder
from draftproof.models.headcache import rounded

WIDE: Final = 16
"""Positions up to which rows are read side by side. A row with more is read by itself: the others would be padded."""

AT_ONCE: Final = 512
"""Positions of one row in a pass: the mask for a whole prompt could be larger than the head."""


@dataclass(slots=True)
class HeadRow:
    """What is known of a request: `read` entries of the cache are true, and `waiting` holds the states behind them."""

    read: int = 0
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)
    shown: int = 0
    """Positions whose states are read or waiting."""
    last: Float[Tensor, "1 H"] | None = None
    """The fused state of the last entry: who asks again before anything is shown gets the same draft."""

    def note(self, context: Context) -> None:
        """Take down what is new of what was shown.

        Positions that were never shown count as states of zeros, and then the head guesses worse, nothing else.
        """
        if context.shown is None or not context.shown.hidden:
            return
        hidden, stop = context.shown.hidden, min(context.shown.stop, len(context.tokens) - 1)
        first = context.shown.stop - len(hidden[0])
        if stop <= self.shown:
            return
        if first > self.shown:
            self.waiting.append(tuple(states.new_zeros(first - self.shown, states.shape[1]) for states in hidden))
        self.waiting.append(tuple(states[max(0, self.shown - first) : stop - first] for states in hidden))
        self.shown = stop


class HeadReader:
    """One row of cache for each context, in their order."""

    def __init__(self, head: FittedHead, *, graphs: bool = True) -> None:
        self._head = head
        self._recorder = Recorder(None if graphs else SWITCHED_OFF)
        self._ids: list[int] = []
        self._rows: list[HeadRow] = []
        self._cache = head.head.new_cache(0)
        self._base = torch.empty(0)

    def __len__(self) -> int:
        return len(self._ids)

    def notice(self, contexts: Sequence[Context]) -> list[bool]:
        """Take down what was shown, and read nothing. Which contexts can be drafted for: of which are the states
        known up to the token before the last?"""
        self._seat([context.id for context in contexts])
        for row, context in zip(self._rows, contexts, strict=True):
            row.note(context)
        return [0 < len(c.tokens) - 1 <= row.shown for row, c in zip(self._rows, contexts, strict=True)]

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool], room: int) -> Float[Tensor, "B H"]:
        """The head's state behind the last token of every wanted context, all of them ready; the other rows hold
        anything. Behind each there is room for `room` steps."""
        states = self._fused(wanted)
        longest = max(len(context.tokens) for context in contexts)
        self._cache.ensure(longest + WIDE + room)
        for b, context in enumerate(contexts):
            if wanted[b]:
                self._rows[b].read = len(context.tokens) - 1 - len(states[b])
                if len(states[b]) > WIDE:
                    states[b] = self._read_long(b, context.tokens, states[b])
        made = self._read(contexts, states)
        for row, context, mine in zip(self._rows, contexts, states, strict=True):
            if len(mine):
                row.read, row.last, row.waiting = len(context.tokens) - 1, mine[-1:], []
        return made

    def step(self, tokens: Int[Tensor, " B"], h: Float[Tensor, "B H"], depth: int) -> Float[Tensor, "B H"]:
        """The state behind one drafted token more, the `depth`-th from 1."""
        reach = max(row.read for row in self._rows) + depth
        return self._states(tokens[:, None], h[:, None], (self._base + depth)[:, None], reach)[:, 0]

    def branch(
        self, tokens: Int[Tensor, "B w"], h: Float[Tensor, "B w H"], lineage: Bool[Tensor, "B w M"]
    ) -> Float[Tensor, "B w H"]:
        """The states behind w nodes of a tree. They are the last w of the M so far; `lineage` says which of the M are
        ancestors of each, or the node itself."""
        B, w, M = lineage.shape
        first = (self._base + 1)[:, None]
        inside = first + torch.arange(M, device=first.device)
        reach = max(row.read for row in self._rows) + M
        visible = (torch.arange(reach, device=first.device) < first)[:, None].repeat(1, w, 1)
        visible.scatter_(2, inside[:, None].expand(B, w, M), lineage)
        positions = self._base[:, None] + lineage.sum(2)
        return self._head.head.step(
            self._head.embedded(tokens), h, positions, self._cache,
            slots=inside[:, M - w :], visible=visible, reach=reach,
        )  # fmt: skip

    def _states(
        self, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"], reach: int
    ) -> Float[Tensor, "B n H"]:
        """The states behind these tokens, of which none stands at `reach` or beyond. On a GPU a step takes longer to
        launch than to run, and is recorded; so that shapes are few it looks at whole buckets there, masked."""
        if host.is_host(tokens.device):
            return self._head.head.step(self._head.embedded(tokens), h, positions, self._cache, reach=reach)
        body, reach = partial(self._masked, rounded(reach)), rounded(reach)
        return self._recorder.run(body, (tokens, h, positions), reach, self._cache.recordings)[0]

    def _masked(
        self, reach: int, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"]
    ) -> tuple[Float[Tensor, "B n H"]]:
        visible = torch.arange(reach, device=positions.device) <= positions[:, :, None]
        embedded = self._head.embedded(tokens)
        return (self._head.head.step(embedded, h, positions, self._cache, visible=visible, reach=reach),)

    def _seat(self, ids: list[int]) -> None:
        """Rows for these requests and no others."""
        if ids == self._ids:
            return
        seat = {name: row for row, name in enumerate(self._ids)}
        old = [seat.get(name) for name in ids]
        self._rows = [HeadRow() if row is None else self._rows[row] for row in old]
        self._cache = self._cache.arranged(old)
        self._ids = ids

    def _fused(self, wanted: Sequence[bool]) -> list[Float[Tensor, "_ H"]]:
        """The states that each wanted row has to read, as the head reads them; fused in one go."""
        waiting = [row.waiting if want else [] for row, want in zip(self._rows, wanted, strict=True)]
        counts = [sum(len(part[0]) for part in parts) for parts in waiting]
        nothing = self._head.table.new_empty((0, self._head.table.shape[1]), dtype=torch.float32)
        parts = [part for row in waiting for part in row]
        fused = nothing
        if parts:
            taps = [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)]
            fused = self._head.head.fuse([tap.float() for tap in taps])
        each = list(fused.split(counts))
        return [
            row.last if want and not len(mine) and row.last is not None else mine
            for row, want, mine in zip(self._rows, wanted, each, strict=True)
        ]

    def _read_long(self, b: int, tokens: Sequence[int], states: Float[Tensor, "n H"]) -> Float[Tensor, "1 H"]:
        """Read all of a row but its last position, by itself; what is left."""
        cache, row = self._cache.row(b), self._rows[b]
        for part in states[:-1].split(AT_ONCE):
            positions = torch.arange(row.read, row.read + len(part), device=part.device)[None]
            follow = sent([list(tokens[row.read + 1 : row.read + 1 + len(part)])], part.device)
            row.read += len(part)
            self._head.head.step(self._head.embedded(follow), part[None], positions, cache, reach=row.read)
        return states[-1:]

    def _read(self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]]) -> Float[Tensor, "B H"]:
        """Read these states, and the tokens behind them, side by side. What has to be known of them is sent in one go:
        each row's tokens, where they begin, and which is the last."""
        counts = [len(mine) for mine in states]
        width, starts = max(counts), [row.read for row in self._rows]
        lines = [
            [*c.tokens[s + 1 : s + 1 + n], *[0] * (width - n), s, max(n - 1, 0), s + n - 1]
            for c, s, n in zip(contexts, starts, counts, strict=True)
        ]
        numbers = sent(lines, states[0].device)
        first, last, self._base = numbers[:, width:].unbind(1)
        h = torch.nn.utils.rnn.pad_sequence(states, batch_first=True) if len(states) > 1 else states[0][None]
        positions = first[:, None] + torch.arange(width, device=numbers.device)
        made = self._states(numbers[:, :width], h, positions, max(starts) + width)
        return made[torch.arange(len(counts), device=numbers.device), last]
