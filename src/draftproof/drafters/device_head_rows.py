"""Hand a head's rows over to rounds that stay on a device (device_head.py), and take them back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.drafters.head_reader import MAX_BATCHED, HeadReader
from draftproof.drafters.interface import Context
from draftproof.models.head.network import FittedHead
from draftproof.models.head.rows import HeadRows


class Entering(NamedTuple):
    """What a head knows of rows that were just read.

    states  the head's own after each text's last token
    fused   the target's at the token before it, combined: the input of which `states` are the output
    ready   whether the two are known; not for a text of one token, whose target has no states yet
    """

    states: Float[Tensor, "b H"]
    fused: Float[Tensor, "b H"]
    ready: Bool[Tensor, " b"]


class DeviceHeadRows:
    """The host's knowledge of a head's rows while rounds stay on the device."""

    def __init__(self, reader: HeadReader, head: FittedHead) -> None:
        self._reader, self._head = reader, head
        self._entering: Entering | None = None

    @property
    def pool(self) -> HeadRows:
        return self._reader.pool

    def refusal(self) -> str | None:
        """Return why steps of this head cannot be a part of something that is recorded; None if they can."""
        from draftproof.kernels.attention import MOST_SIZE

        if self._reader.graphs.refusal is not None:
            return f"steps of the head are not recorded: {self._reader.graphs.refusal}"
        if max(keys.shape[2] for keys in self.pool.pool.keys) > MOST_SIZE:
            return f"the kernels attend with up to {MOST_SIZE} numbers in a head"
        return None

    def places(self, contexts: Sequence[Context], tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """Bring rows up to date, and say where they are; see `HeadDrafter.device_places`."""
        reader = self._reader
        names = reader.names = [context.id for context in contexts]
        for context, most in zip(contexts, tokens, strict=True):
            if not reader.enter(context, max(most - len(context.tokens), MAX_BATCHED)):
                return None
        ready = [reader.take(context) for context in contexts]
        if any(len(context.tokens) > 1 and not is_ready for context, is_ready in zip(contexts, ready, strict=True)):
            return None  # states are missing: the next round that the host follows makes up for them
        states = self._states_after(contexts, ready)
        last = [reader.rows[name].last if is_ready else None for name, is_ready in zip(names, ready, strict=True)]
        self._entering = Entering(
            states,
            torch.cat([torch.zeros_like(states[:1]) if each is None else each for each in last]),
            to_device(ready, states.device, torch.bool),
        )
        rows = self.pool.pool.rows
        return [(rows[name].extent.start, 1) for name in names]

    def _states_after(self, contexts: Sequence[Context], ready: Sequence[bool]) -> Float[Tensor, "B H"]:
        """Return the head's state after the last token of every context that is ready, reading what was not read."""
        rows = [self._reader.rows[context.id] for context in contexts]
        after = [row.after for row in rows]
        for row in rows:
            row.after = None
        unread = [is_ready and state is None for is_ready, state in zip(ready, after, strict=True)]
        made = self._head.table.new_zeros((len(contexts), self._head.table.shape[1]), dtype=self._head.dtype)
        if any(unread):
            made = self._reader.catch_up(contexts, unread)
        return torch.cat([one if state is None else state for one, state in zip(made.split(1), after, strict=True)])

    def take_entering(self) -> Entering:
        """Return what is known of the rows that were given places last, in their order."""
        entering, self._entering = self._entering, None
        assert entering is not None
        return entering

    def take_back(self, requests: Sequence[int], states: Float[Tensor, "b H"], fused: Float[Tensor, "b H"]) -> None:
        """Take over rows whose rounds the host did not follow: their last input may have to be read again."""
        for name, state, last in zip(requests, states.split(1), fused.split(1), strict=True):
            row = self._reader.rows.get(name)
            if row is not None and row.last is None and 0 < row.read == row.known:
                row.last, row.after = last, state

    def fits(self, name: int, tokens: int) -> bool:
        """Return whether a row has room for so many entries where it is."""
        reader = self._reader
        return name in reader.rows and name not in reader.saved and tokens <= self.pool.pool.rows[name].extent.slots

    def record_read(self, name: int, read: int) -> None:
        """Note how many entries a row has after a round that the host did not follow."""
        row = self._reader.rows.get(name)
        if row is not None:
            row.read = row.known = read
            row.chunks, row.waiting, row.last = [], [], None

    def store(self, context: Context, hidden: tuple[Float[Tensor, "n H"], ...]) -> None:
        """Store the target's states from a text's last token on, at tokens that it does not have yet."""
        if self._reader.enter(context, MAX_BATCHED):
            row, first = self._reader.rows[context.id], len(context.tokens) - 1
            row.receive(context)  # of a round that the host followed
            row.add(hidden, first, first + len(hidden[0]))
            row.after = None
            self._reader.limit_unread(context)
