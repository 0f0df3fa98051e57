"""Rows over a KV pool on a GPU: decoded in passes that CUDA graphs replay, their prompts read in packed passes between.

The host knows how long each row is; it sends a small table with every pass. A pass is padded to a number of rows that
was recorded before, so that rows enter and leave without a new recording.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.models.device_pass import WIDEST, DevicePool, size_class
from draftproof.models.extents import PAGE
from draftproof.models.interface import Forward
from draftproof.models.rows import Block, Group, PackedModel, PooledRows, Reading, Scores

DEVICE_CHUNK: Final = 8 * PAGE
"""Tokens of a prompt read at a time: a GPU is idle for most of a pass over fewer."""

ATTENTION_DOUBLES: Final = 1200
"""Tokens before a token at which attending to them is taken to cost as much as all else of reading it. On a CPU it was
measured (prompt_chunks.py); here it is a guess, with which the figures of a GPU were measured."""


class DeviceRows(PooledRows):
    """Rows over a KV pool on a GPU."""

    chunk: int | None = DEVICE_CHUNK

    def __init__(self, model: PackedModel, pages: int) -> None:
        super().__init__(model, pages, spare=1)
        self._run: Any = model
        slots = pages * PAGE
        longest = getattr(model, "max_length", None)
        capacity = slots if longest is None else min(slots, longest + WIDEST)
        self._device_pool = DevicePool(self.pool.keys, self.pool.values, slots, capacity)

    def chunk_around(self, position: int) -> tuple[int, int]:
        start = position - position % DEVICE_CHUNK
        return start, start + DEVICE_CHUNK

    def reading_cost(self, start: int, end: int) -> float:
        return (end - start) * (1 + start / ATTENTION_DOUBLES)

    def score(self, blocks: Sequence[Block], *, layers: Sequence[int] = (), reading: Sequence[Reading] = ()) -> Scores:
        """Read prompts in one packed pass, then score each block in a pass of its own."""
        read = super().score([], layers=layers, reading=reading).read
        groups = []
        for block in blocks:
            if block.tokens.shape[1] > WIDEST:
                groups += super().score([block], layers=layers).groups
                continue
            widths = [block.tokens.shape[1]] * len(block.rows)
            forward = self._pass(block.rows, block.tokens, widths, parents=block.parents, layers=layers)
            groups.append([Group(list(range(len(block.rows))), forward)])
        return Scores(groups, read)

    def _pass(
        self,
        rows: Sequence[int],
        tokens: Int[Tensor, "b T"],
        widths: Sequence[int],
        *,
        parents: Int[Tensor, "b K"] | None = None,
        last: bool = False,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Run a pass padded to a class of sizes, and return the scores of its rows."""
        b = len(rows)
        padding = size_class(b) - b
        spans = [self._span(row, width) for row, width in zip(rows, widths, strict=True)]
        table = [[span.start for span in spans], [span.before for span in spans], list(widths)]
        places = to_device([[*line, *[0] * padding] for line in table], tokens.device)
        if padding:
            tokens = torch.cat([tokens, tokens.new_zeros((padding, tokens.shape[1]))])
            chain = torch.arange(-1, tokens.shape[1] - 2, device=tokens.device)
            parents = None if parents is None else torch.cat([parents, chain.expand(padding, -1)])
        forward: Forward = self._run.device_pass(
            tokens, places, self._device_pool, parents=parents, last=last, layers=layers
        )
        return Forward(forward.logits[:b], tuple(states[:b] for states in forward.hidden))

    def launch(
        self, tokens: Int[Tensor, "B T"], places: Int[Tensor, "3 B"], *, last: bool = False, layers: Sequence[int] = ()
    ) -> Forward:
        """Run a pass whose rows and lengths only the device knows, as a part of something larger; see `DevicePass`."""
        forward: Forward = self._run.device_pass(
            tokens, places, self._device_pool, last=last, layers=layers, recorded=False
        )
        return forward

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def start(self, row: int) -> int:
        """Return a row's first slot."""
        return self.pool.rows[row].extent.start

    def fits(self, row: int, tokens: int) -> bool:
        """Return whether a row has room for so many tokens where it is."""
        return tokens <= self.pool.rows[row].extent.slots

    def keep(self, rows: Sequence[int], counts: Sequence[int], path: Int[Tensor, "b K"] | None = None) -> None:
        if path is not None and path.shape[1]:
            self._move_paths(rows, counts, path)
        for row, count in zip(rows, counts, strict=True):
            self.pool.rows[row].length += count

    def _move_paths(self, rows: Sequence[int], counts: Sequence[int], path: Int[Tensor, "b K"]) -> None:
        """Move the kept slots of each row's tree next to its root. The host does not know which they are."""
        heres = [self.pool.rows[row] for row in rows]
        first, kept = to_device(
            [[here.extent.start + here.length + 1 for here in heres], [max(count - 1, 0) for count in counts]],
            path.device,
        )
        slot = torch.arange(path.shape[1], device=path.device)
        moves = slot < kept[:, None]
        scratch = self._device_pool.scratch
        source = torch.where(moves, first[:, None] + path, scratch).flatten()
        target = torch.where(moves, first[:, None] + slot, scratch).flatten()
        with torch.inference_mode():
            for buffer in (*self.pool.keys, *self.pool.values):
                buffer.index_copy_(0, target, buffer.index_select(0, source))

    def read_on(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Float[Tensor, "b V"]:
        long = [Reading(row, text[:-1]) for row, text in zip(rows, texts, strict=True) if len(text) > WIDEST]
        for at in range(0, max((len(each.tokens) for each in long), default=0), DEVICE_CHUNK):
            super().score([], reading=[Reading(each.row, each.tokens[at : at + DEVICE_CHUNK]) for each in long])
        rest = [list(text[-1:] if len(text) > WIDEST else text) for text in texts]
        T = max(1, *map(len, rest)) if rest else 1
        tokens = to_device([[*text, *[0] * (T - len(text))] for text in rest], self._model.device)
        logits = self._pass(rows, tokens, [len(text) for text in rest], last=True).logits[:, 0]
        for row, text in zip(rows, rest, strict=True):
            self.pool.rows[row].length += len(text)
        return logits

    def step(self, rows: Sequence[int], tokens: Int[Tensor, " b"], wanted: Sequence[bool]) -> Float[Tensor, "b V"]:
        logits = self._pass(rows, tokens[:, None], [int(want) for want in wanted], last=True).logits[:, 0]
        for row, want in zip(rows, wanted, strict=True):
            self.pool.rows[row].length += want
        return logits
