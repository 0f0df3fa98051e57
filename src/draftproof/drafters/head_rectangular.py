"""Read published heads over one rectangular cache, which is copied when rows come and go: MTP, and EAGLE-3 on a CPU.

Other heads have the pool of `drafters/head_reader.py`. An MTP layer brings its own attention, which knows no pool, and
packed passes on a CPU know the layer of the heads trained here only.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu, to_device
from draftproof.drafters.head_reader import MAX_BATCHED, MOST_UNREAD, POSITIONS_PER_PASS, HeadRow, join_taps
from draftproof.drafters.interface import Context
from draftproof.models.cuda_graphs import SWITCHED_OFF, GraphCache
from draftproof.models.head.network import FittedHead, rounded


class RectangularHeadReader:
    """The cache of a published head: one row per context, in the contexts' order; a request that leaves is dropped."""

    def __init__(self, head: FittedHead, *, graphs: bool = True) -> None:
        self._head = head
        self._graphs = GraphCache(None if graphs else SWITCHED_OFF)
        self._ids: list[int] = []
        self._rows: list[HeadRow] = []
        self._cache = head.head.new_cache(0)
        self._base = torch.empty(0)
        self._room = 0

    def __len__(self) -> int:
        return len(self._ids)

    def receive(self, contexts: Sequence[Context], room: int) -> list[bool]:
        """Store the target's new hidden states; return which contexts can be drafted for.

        Those are the contexts whose states are known up to the token before the last. The cache gets room for so many
        entries after every text. States are read later, or here once more than `MOST_UNREAD` wait in a row.
        """
        self._arrange([context.id for context in contexts])
        self._room = room
        for b, (row, context) in enumerate(zip(self._rows, contexts, strict=True)):
            row.receive(context)
            if row.unread > MOST_UNREAD:
                self._read_unread(b, context)
        return [0 < len(c.tokens) - 1 <= row.known for row, c in zip(self._rows, contexts, strict=True)]

    def logits(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N R"]:
        """Return the logits of the next token over the draft vocabulary, from the head's states."""
        return self._head.logits(h)

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Float[Tensor, "B H"]:
        """Read the stored states and return the head's state after the last token of every wanted context.

        Wanted contexts must be ready (see `receive`); the other rows are undefined.
        """
        states = self._fused(wanted)
        longest = max(len(context.tokens) for context in contexts)
        self._cache.ensure(longest + MAX_BATCHED + self._room)
        for b, context in enumerate(contexts):
            if wanted[b]:
                self._rows[b].read = len(context.tokens) - 1 - len(states[b])
                if len(states[b]) > MAX_BATCHED:
                    states[b] = self._read_long(b, context.tokens, states[b])
        made = self._read(contexts, states)
        for row, context, fused in zip(self._rows, contexts, states, strict=True):
            if len(fused):
                row.read, row.last, row.waiting = len(context.tokens) - 1, fused[-1:], []
        return made

    def step(
        self, tokens: Int[Tensor, " B"], h: Float[Tensor, "B H"], depth: int, wanted: Sequence[bool]
    ) -> Float[Tensor, "B H"]:
        """Return the state after one more drafted token, the `depth`-th, counted from 1."""
        reach = max(row.read for row in self._rows) + depth
        return self._states(tokens[:, None], h[:, None], (self._base + depth)[:, None], reach)[:, 0]

    def branch(
        self, tokens: Int[Tensor, "B w"], h: Float[Tensor, "B w H"], lineage: Bool[Tensor, "B w M"]
    ) -> Float[Tensor, "B w H"]:
        """Return the states after w nodes of a tree, the last w of the M nodes so far.

        `lineage` marks for each of them which of the M nodes are its ancestors or itself.
        """
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
        """Return the states after these tokens, whose positions are all below `reach`.

        On a GPU a step takes longer to launch than to run, so it is captured as a CUDA graph. The attention span is
        rounded up and masked there, which keeps the number of shapes small.
        """
        if is_cpu(tokens.device):
            return self._head.head.step(self._head.embedded(tokens), h, positions, self._cache, reach=reach)
        body, reach = partial(self._masked, rounded(reach)), rounded(reach)
        return self._graphs.run(body, (tokens, h, positions), reach, self._cache.recordings)[0]

    def _masked(
        self, reach: int, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"]
    ) -> tuple[Float[Tensor, "B n H"]]:
        visible = torch.arange(reach, device=positions.device) <= positions[:, :, None]
        embedded = self._head.embedded(tokens)
        return (self._head.head.step(embedded, h, positions, self._cache, visible=visible, reach=reach),)

    def _arrange(self, ids: list[int]) -> None:
        """Give the cache one row for each of these requests and no others."""
        if ids == self._ids:
            return
        row_of = {name: row for row, name in enumerate(self._ids)}
        old = [row_of.get(name) for name in ids]
        self._rows = [HeadRow() if row is None else self._rows[row] for row in old]
        self._cache = self._cache.arranged(old)
        self._ids = ids

    def _fused(self, wanted: Sequence[bool]) -> list[Float[Tensor, "_ H"]]:
        """Fuse the stored states of all wanted rows in one call; return them row by row."""
        waiting = [row.waiting if want else [] for row, want in zip(self._rows, wanted, strict=True)]
        counts = [sum(len(part[0]) for part in parts) for parts in waiting]
        parts = [part for row in waiting for part in row]
        fused = self._head.table.new_empty((0, self._head.table.shape[1]), dtype=self._head.dtype)
        if parts:
            fused = self._head.head.fuse([tap.to(self._head.dtype) for tap in join_taps(parts)])
        each = list(fused.split(counts))
        return [
            row.last if want and not len(states) and row.last is not None else states
            for row, want, states in zip(self._rows, wanted, each, strict=True)
        ]

    def _read_unread(self, b: int, context: Context) -> None:
        """Read the stored states of a row, all but the last."""
        row = self._rows[b]
        taps = join_taps(row.waiting)
        row.read = row.known - len(taps[0])
        self._cache.ensure(len(context.tokens) + MAX_BATCHED + self._room)
        self._read_long(b, context.tokens, self._head.head.fuse([tap.to(self._head.dtype) for tap in taps]))
        row.waiting = [tuple(tap[-1:].clone() for tap in taps)]

    def _read_long(self, b: int, tokens: Sequence[int], states: Float[Tensor, "n H"]) -> Float[Tensor, "1 H"]:
        """Read all positions of a row but the last, without the other rows; return the last one's state."""
        cache, row = self._cache.row(b), self._rows[b]
        for part in states[:-1].split(POSITIONS_PER_PASS):
            positions = torch.arange(row.read, row.read + len(part), device=part.device)[None]
            follow = to_device([list(tokens[row.read + 1 : row.read + 1 + len(part)])], part.device)
            row.read += len(part)
            self._head.head.step(self._head.embedded(follow), part[None], positions, cache, reach=row.read)
        return states[-1:]

    def _read(self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]]) -> Float[Tensor, "B H"]:
        """Read these states and the tokens after them in one batch; return each row's last state.

        Tokens, start and last index of each row are copied to the device together, in one tensor.
        """
        counts = [len(row) for row in states]
        width, starts = max(counts), [row.read for row in self._rows]
        lines = [
            [*c.tokens[s + 1 : s + 1 + n], *[0] * (width - n), s, max(n - 1, 0), s + n - 1]
            for c, s, n in zip(contexts, starts, counts, strict=True)
        ]
        numbers = to_device(lines, states[0].device)
        first, last, self._base = numbers[:, width:].unbind(1)
        h = torch.nn.utils.rnn.pad_sequence(states, batch_first=True) if len(states) > 1 else states[0][None]
        positions = first[:, None] + torch.arange(width, device=numbers.device)
        made = self._states(numbers[:, :width], h, positions, max(starts) + width)
        return made[torch.arange(len(counts), device=numbers.device), last]
