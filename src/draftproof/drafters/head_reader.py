"""Read the target's hidden states with a head, into rows of its pool: one for each request.

States are stored when they come and read when a draft needs them. A row that never drafts has them read now and then,
so that what is stored stays bounded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu, to_device
from draftproof.drafters.interface import Context
from draftproof.models.cuda_graphs import SWITCHED_OFF, GraphCache
from draftproof.models.extents import pages_for
from draftproof.models.head.compiled import Chain, Choice
from draftproof.models.head.network import FittedHead
from draftproof.models.head.rows import HeadRows
from draftproof.models.pool import PoolFull, SavedRow

MAX_BATCHED: Final = 16
"""Positions up to which rows are read in one batch; a longer row is read alone, because the others would be padding."""

POSITIONS_PER_PASS: Final = 512
"""Positions of one row read in a pass; the attention mask of a whole prompt could be larger than the head."""

MOST_UNREAD: Final = 512
"""States of one row that wait to be read, at most, but for a round's: a row that never drafts would keep those of its
whole text. A pass over so many takes about as long as four rounds without a draft (bundled head)."""

MOST_PARTS: Final = 32
"""Rounds whose states wait as they came, at most. On a CPU they are parts of what the pass gave all rows, which stays
with them; joined, they are copied."""

ROOM: Final = 32
"""Entries that a new row has room for after its text; it grows with it."""

LEAST_TOKENS: Final = 2**16
"""Tokens in the pool of a head: beside a target on a GPU, or without an engine."""


class PromptChunk(NamedTuple):
    """The target's states at consecutive tokens of a prompt, from position `start` on, and the token after each."""

    start: int
    followers: list[int]
    states: list[tuple[Tensor, ...]]


@dataclass(slots=True)
class HeadRow:
    """One request's progress: `read` entries of the cache are valid, `waiting` holds the states to be read next.

    Before those come the `chunks` of a prompt, which are read when the row first drafts: many rows never do.
    """

    read: int = 0
    chunks: list["PromptChunk"] = field(default_factory=list)
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)
    known: int = 0
    """Positions whose states are read or waiting."""
    last: Float[Tensor, "1 H"] | None = None
    """The fused state of the last entry, so that a second proposal without new states gives the same draft."""
    after: Float[Tensor, "1 H"] | None = None
    """The head's state after the text's last token, of a row that comes from the device, until it is read on."""

    @property
    def unread(self) -> int:
        """Return how many states wait to be read, those of a prompt's chunks included."""
        return self.known - self.read

    def receive(self, context: Context) -> None:
        """Store the hidden states that are new in the context's target outputs.

        Positions that were skipped get states of zeros; the head then guesses worse, and nothing else changes.
        """
        outputs = context.target_outputs
        if outputs is None or not outputs.hidden:
            return
        first = outputs.stop - len(outputs.hidden[0])
        self.add(outputs.hidden, first, min(outputs.stop, len(context.tokens) - 1))

    def add(self, hidden: tuple[Tensor, ...], first: int, stop: int) -> None:
        """Store those of the hidden states at positions from `first` on that are new, up to `stop`."""
        if stop <= self.known:
            return
        self.after = None
        if first > self.known:
            self.waiting.append(tuple(states.new_zeros(first - self.known, states.shape[1]) for states in hidden))
        is_all_new = first == self.known and len(hidden[0]) == stop - first
        new = slice(max(0, self.known - first), stop - first)
        self.waiting.append(hidden if is_all_new else tuple(states[new] for states in hidden))
        self.known = stop
        if len(self.waiting) > MOST_PARTS:
            self.waiting = [tuple(join_taps(self.waiting))]


class HeadReader:
    """The head's rows, one for each request, and the passes that read into them.

    Until a pool is opened by an engine, rows of requests that are not among the contexts are dropped.
    """

    def __init__(self, head: FittedHead, *, graphs: bool = True) -> None:
        self._head = head
        self.graphs = GraphCache(None if graphs else SWITCHED_OFF)
        self._pool: HeadRows | None = None
        self._is_managed = False
        self.rows: dict[int, HeadRow] = {}
        self.saved: dict[int, SavedRow] = {}
        """Rows that are copied out of the pool."""
        self.names: list[int] = []
        """The requests of this round, in the contexts' order."""
        self._starts = self._base = torch.empty(0)

    def __len__(self) -> int:
        return len(self.rows)

    def open(self, pages: int) -> None:
        """Allocate a pool; from then on rows stay until they are dropped."""
        self._pool, self._is_managed = HeadRows(self._head, max(pages, pages_for(LEAST_TOKENS))), True
        self.rows.clear()
        self.saved.clear()

    @property
    def pool(self) -> HeadRows:
        if self._pool is None:
            self._pool = HeadRows(self._head, pages_for(LEAST_TOKENS))
        return self._pool

    def receive(self, contexts: Sequence[Context], room: int) -> list[bool]:
        """Store the target's new hidden states; return which contexts can be drafted for.

        Those are the contexts whose states are known up to the token before the last, and whose rows have room for so
        many entries after their text. States are read later, or here once more than `MOST_UNREAD` wait in a row.
        """
        self.names = [context.id for context in contexts]
        for row in self.rows.values():
            row.after = None
        if not self._is_managed:
            self.drop([name for name in self.rows if name not in self.names])
        return [self._receive(context, room) for context in contexts]

    def _receive(self, context: Context, room: int) -> bool:
        if not self.enter(context, room):
            return False
        is_ready = self.take(context)
        self.limit_unread(context)
        return is_ready

    def take(self, context: Context) -> bool:
        """Store the target's new hidden states; return whether all are known up to the token before the last."""
        row = self.rows[context.id]
        row.receive(context)
        has_state = bool(row.waiting) or bool(row.chunks) or row.last is not None
        return 0 < len(context.tokens) - 1 <= row.known and has_state

    def limit_unread(self, context: Context) -> None:
        """Read a row's stored states, all but the last, once more than `MOST_UNREAD` wait.

        When that happens depends on the row alone, so that its drafts do not depend on other rows.
        """
        row = self.rows[context.id]
        if row.unread <= MOST_UNREAD:
            return
        self._settle([context.id])
        row.read = row.known - _count(row.waiting)
        # On a GPU the tokens after the last states may not be known to the host yet.
        count = min(row.unread - 1, len(context.tokens) - 1 - row.read)
        if count < 1:
            return
        taps = join_taps(row.waiting)
        self._read_entries(context, self._fuse([tuple(tap[:count] for tap in taps)]))
        row.waiting = [tuple(tap[count:].clone() for tap in taps)]

    @property
    def is_compiled(self) -> bool:
        """Return whether `draft` can be used."""
        return self.pool.compiled is not None and self.pool.compiled.drafts

    def logits(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N R"]:
        """Return the logits of the next token over the draft vocabulary, from the head's states."""
        return self.pool.logits(h)

    def draft(self, contexts: Sequence[Context], index: Sequence[int], choice: Choice) -> Chain:
        """Read the stored states of the contexts with these numbers and draft for them, in one compiled call.

        The contexts must be ready (see `receive`).
        """
        names = [self.names[b] for b in index]
        self._settle(names)
        rows, texts = [self.rows[name] for name in names], [contexts[b].tokens for b in index]
        counts = [_count(row.waiting) for row in rows]
        if not all(0 < n <= MAX_BATCHED for n in counts):
            h = self.catch_up(contexts, [b in index for b in range(len(contexts))])[list(index)]
            at = [row.read - 1 for row in rows]
            return self.pool.draft(h, (), torch.empty(0, dtype=torch.long), names, at, [1] * len(rows), choice)[0]
        at = [len(text) - 1 - n for text, n in zip(texts, counts, strict=True)]
        follow = torch.tensor([token for text, n in zip(texts, counts, strict=True) for token in text[len(text) - n :]])
        taps = join_taps([part for row in rows for part in row.waiting])
        chain, fused = self.pool.draft(None, taps, follow, names, at, counts, choice)
        assert fused is not None
        for row, text, stop in zip(rows, texts, accumulate(counts), strict=True):
            row.read, row.last, row.waiting = len(text) - 1, fused[stop - 1 : stop], []
        return chain

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Float[Tensor, "B H"]:
        """Read the stored states and return the head's state after the last token of every wanted context.

        Wanted contexts must be ready (see `receive`); the other rows are undefined.
        """
        self._settle([name for name, want in zip(self.names, wanted, strict=True) if want])
        states = self._fused(wanted)
        for b, context in enumerate(contexts):
            if wanted[b]:
                row = self.rows[context.id]
                row.read = len(context.tokens) - 1 - len(states[b])
                if len(states[b]) > MAX_BATCHED:
                    self._read_entries(context, states[b][:-1])
                    states[b] = states[b][-1:]
        made = self._read(contexts, states)
        for context, fused in zip(contexts, states, strict=True):
            if len(fused):
                row = self.rows[context.id]
                row.read, row.last, row.waiting = len(context.tokens) - 1, fused[-1:], []
        return made

    def step(
        self, tokens: Int[Tensor, " B"], h: Float[Tensor, "B H"], depth: int, wanted: Sequence[bool]
    ) -> Float[Tensor, "B H"]:
        """Return the state after one more drafted token, the `depth`-th, counted from 1; other rows are undefined."""
        if not is_cpu(tokens.device):
            reach = max(self.rows[name].read for name in self.names) + depth
            positions = (self._base + depth)[:, None]
            inputs = tokens[:, None], h[:, None], positions, self._starts
            return self.pool.captured_states(self.graphs, reach, *inputs)[:, 0]
        index = [b for b, want in enumerate(wanted) if want]
        names = [self.names[b] for b in index]
        at = [self.rows[name].read - 1 + depth for name in names]
        if len(index) == len(wanted):
            return self.pool.packed_states(tokens, h, names, at, [1] * len(names))
        made = torch.zeros_like(h)
        made[index] = self.pool.packed_states(tokens[index], h[index], names, at, [1] * len(names))
        return made

    def branch(
        self, tokens: Int[Tensor, "B w"], h: Float[Tensor, "B w H"], lineage: Bool[Tensor, "B w M"]
    ) -> Float[Tensor, "B w H"]:
        """Return the states after w nodes of a tree, the last w of the M nodes so far.

        `lineage` marks for each of them which of the M nodes are its ancestors or itself.
        """
        B, w, M = lineage.shape
        reads = [self.rows[name].read if name in self.rows else 0 for name in self.names]
        if is_cpu(tokens.device):
            return self.pool.packed_level(tokens, h, self.names, reads, lineage)
        first = (self._base + 1)[:, None]
        inside = first + torch.arange(M, device=first.device)
        reach = max(reads) + M
        visible = (torch.arange(reach, device=first.device) < first)[:, None].repeat(1, w, 1)
        visible.scatter_(2, inside[:, None].expand(B, w, M), lineage)
        positions = self._base[:, None] + lineage.sum(2)
        return self.pool.gathered_states(
            reach, tokens, h, positions, self._starts, slots=inside[:, M - w :], visible=visible
        )

    # --------------------------------------------------------------------------------------------- prompts and pages

    def follow(self, context: Context) -> bool:
        """Take the target's states at the tokens of a prompt that it has just read; False if there is no room."""
        if not self.enter(context, MAX_BATCHED):
            return False
        row = self.rows[context.id]
        row.receive(context)
        states, row.waiting = row.waiting, []
        if states:
            start = row.known - _count(states)
            owned = [tuple(map(_own_memory, part)) for part in states]
            row.chunks.append(PromptChunk(start, list(context.tokens[start + 1 : row.known + 1]), owned))
        if row.unread > MOST_UNREAD:
            self._settle([context.id])
        return True

    def _settle(self, names: Iterable[int]) -> None:
        """Read the chunks of prompts that wait in these rows, all of them in one pass on a CPU."""
        due = [(name, chunk) for name in names if name in self.rows for chunk in self.rows[name].chunks]
        if not due:
            return
        for name, _ in due:
            self.rows[name].chunks = []
        counts = [len(chunk.followers) for _, chunk in due]
        fused = self._fuse([part for _, chunk in due for part in chunk.states])
        followers = to_device([token for _, chunk in due for token in chunk.followers], fused.device)
        starts = [chunk.start for _, chunk in due]
        self.pool.write(followers, fused, [name for name, _ in due], starts, counts)
        for (name, chunk), states in zip(due, fused.split(counts), strict=True):
            row = self.rows[name]
            row.read, row.last = chunk.start + len(states), states[-1:]

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        """Take over the first entries of another request's row: as many as tokens, the next token is the same."""
        self._settle([holder])
        held = self.rows.get(holder)
        if held is None or holder in self.saved or held.read < length or not self.enter(context, MAX_BATCHED):
            return False
        pool = self.pool.pool
        pool.rows[holder].length = max(pool.rows[holder].length, length)
        pool.share(holder, context.id, length)
        pool.rows[context.id].length = 0
        self.rows[context.id] = HeadRow(read=length, known=length)
        return True

    def suspend(self, name: int) -> None:
        """Copy a row out of the pool until its request is back."""
        if name in self.rows and name not in self.saved:
            self._settle([name])
            self.pool.pool.rows[name].length = self.rows[name].read
            self.saved[name] = self.pool.pool.save(name)

    def rest(self, name: int) -> None:
        """Free the room after a row's text, and states that wait: the request has ended."""
        if name in self.rows and name not in self.saved:
            self._settle([name])
            self.rows[name] = HeadRow(read=self.rows[name].read, known=self.rows[name].read)
            self.pool.pool.rows[name].length = self.rows[name].read
            self.pool.pool.trim(name)

    def drop(self, names: Sequence[int]) -> None:
        """Forget the rows of these requests."""
        for name in names:
            if self.rows.pop(name, None) is not None and self.saved.pop(name, None) is None:
                self.pool.pool.leave(name)

    def enter(self, context: Context, room: int) -> bool:
        """Give a request a row with room for its text and so many entries more; False if the pool has none."""
        pool, name = self.pool.pool, context.id
        try:
            if name in self.saved:
                pool.restore(name, self.saved[name])
                del self.saved[name]
            if name not in self.rows:
                pool.enter(name, len(context.tokens) + room + ROOM)
                self.rows[name] = HeadRow()
            pool.rows[name].length = self.rows[name].read  # what must be copied if the row moves
            pool.ensure(name, len(context.tokens) + room)
        except PoolFull:
            return False
        return True

    def _fused(self, wanted: Sequence[bool]) -> list[Float[Tensor, "_ H"]]:
        """Fuse the stored states of all wanted rows in one call; return them row by row."""
        rows = [self.rows[name] if want else HeadRow() for name, want in zip(self.names, wanted, strict=True)]
        counts = [_count(row.waiting) for row in rows]
        each = list(self._fuse([part for row in rows for part in row.waiting]).split(counts))
        return [
            row.last if not len(states) and row.last is not None else states
            for row, states in zip(rows, each, strict=True)
        ]

    def _fuse(self, parts: Sequence[tuple[Tensor, ...]]) -> Float[Tensor, "n H"]:
        if not parts:
            return self._head.table.new_empty((0, self._head.table.shape[1]), dtype=self._head.dtype)
        return self.pool.fuse([tap.to(self._head.dtype) for tap in join_taps(parts)])

    def _read_entries(self, context: Context, states: Float[Tensor, "n H"]) -> None:
        """Read states of one row, each with the token after it; only keys and values are of use."""
        row = self.rows[context.id]
        for part in states.split(POSITIONS_PER_PASS):
            n = len(part)
            follow = to_device(list(context.tokens[row.read + 1 : row.read + 1 + n]), part.device)
            self.pool.write(follow, part, [context.id], [row.read], [n])
            row.read += n

    def _read(self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]]) -> Float[Tensor, "B H"]:
        """Read these states and the tokens after them together; return each row's last state."""
        counts = [len(row) for row in states]
        starts = [self.rows[name].read if name in self.rows else 0 for name in self.names]
        if is_cpu(states[0].device):
            return self._read_packed(contexts, states, counts, starts)
        width = max(counts)
        slots = [self.pool.pool.rows[name].extent.start if name in self.rows else 0 for name in self.names]
        # Tokens, start, last index and first slot of each row are copied to the device together, in one tensor.
        lines = [
            [*c.tokens[s + 1 : s + 1 + n], *[0] * (width - n), s, max(n - 1, 0), s + n - 1, slot]
            for c, s, n, slot in zip(contexts, starts, counts, slots, strict=True)
        ]
        numbers = to_device(lines, states[0].device)
        first, last, self._base, self._starts = numbers[:, width:].unbind(1)
        h = torch.nn.utils.rnn.pad_sequence(states, batch_first=True) if len(states) > 1 else states[0][None]
        positions = first[:, None] + torch.arange(width, device=numbers.device)
        reach = max(starts) + width
        made = self.pool.captured_states(self.graphs, reach, numbers[:, :width], h, positions, self._starts)
        return made[torch.arange(len(counts), device=numbers.device), last]

    def _read_packed(
        self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]], counts: list[int], starts: list[int]
    ) -> Float[Tensor, "B H"]:
        index = [b for b, n in enumerate(counts) if n]
        follow = torch.tensor([t for b in index for t in contexts[b].tokens[starts[b] + 1 : starts[b] + 1 + counts[b]]])
        widths = [counts[b] for b in index]
        made = self.pool.packed_states(
            follow,
            torch.cat([states[b] for b in index]) if len(index) > 1 else states[index[0]],
            [self.names[b] for b in index],
            [starts[b] for b in index],
            widths,
        )
        last = made[torch.tensor(widths).cumsum(0) - 1]
        if len(index) == len(counts):
            return last
        every = last.new_zeros((len(counts), last.shape[1]))
        every[index] = last
        return every


def join_taps(parts: Sequence[tuple[Tensor, ...]]) -> list[Float[Tensor, "n H"]]:
    """Join states that came part by part, tap by tap."""
    return [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)]


def _own_memory(states: Float[Tensor, "n H"]) -> Float[Tensor, "n H"]:
    """Copy states that are a part of a larger tensor, such as those of several prompts: it would stay with them."""
    return states if states.untyped_storage().nbytes() == states.nbytes else states.clone()


def _count(parts: Sequence[tuple[Tensor, ...]]) -> int:
    return sum(len(part[0]) for part in parts)
