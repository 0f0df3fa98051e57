"""Rows of hybrid models that come and go: prompts in runs of equal length, keys and values in a pool where they can be.

Every row has recurrent states of its own, which are copied when rows come and go.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from draftproof.models.hybrid_cache import HybridCache
from draftproof.models.pool import KVPool, SavedRow
from draftproof.models.pooled_slots import PooledSlots
from draftproof.models.rows import Read, Reading, RectangularRows

if TYPE_CHECKING:
    from draftproof.models.hybrid import HybridModel

PIECE: Final = 256
"""Tokens of a prompt in one pass: what is recorded for a replay takes memory for each of them."""


class HybridRows(RectangularRows):
    """Rows of a hybrid model: prompts are read in runs of equal length, and in pieces."""

    def _read(self, reading: Sequence[Reading], layers: Sequence[int]) -> list[Read]:
        read: dict[int, Read] = {}
        by_length: dict[int, list[Reading]] = {}
        for each in reading:
            by_length.setdefault(len(each.tokens), []).append(each)
        for length, run in by_length.items():
            read |= dict(zip([each.row for each in run], self._read_run(run, length, layers), strict=True))
        return [read[each.row] for each in reading]

    def _read_run(self, run: Sequence[Reading], length: int, layers: Sequence[int]) -> list[Read]:
        """Read prompts of one length piece by piece, and add their rows to the cache."""
        cache = self._new_cache([each.row for each in run], length)
        scored = None if any(each.scored for each in run) else 1
        pieces = []
        for start in range(0, length, PIECE):
            tokens = self._padded([each.tokens[start : start + PIECE] for each in run])
            pieces.append(self._model(tokens, cache, scored=scored, layers=layers))
            cache.keep(torch.full((len(run),), tokens.shape[1]))
        self._cache = cache if self._cache is None else self._cache.join(cache)
        self._rows += [each.row for each in run]
        if not pieces:
            return [Read((), None) for _ in run]
        logits = torch.cat([piece.logits for piece in pieces], 1)
        hidden = [torch.cat(states, 1) for states in zip(*(piece.hidden for piece in pieces), strict=True)]
        return [Read(tuple(states[b] for states in hidden), logits[b]) for b in range(len(run))]


class SavedHybrid(NamedTuple):
    """A row that was taken out: its recurrent states, and its keys and values."""

    states: HybridCache
    kept: SavedRow


class PooledHybridRows(HybridRows):
    """Rows of a hybrid model with keys and values in a pool: only their states are copied when rows come and go."""

    pool: KVPool

    def __init__(self, model: "HybridModel", pages: int) -> None:
        super().__init__(model)
        self._hybrid = model
        self.pool = KVPool(model.kv_shapes(), pages, model.device)

    def enter(self, row: int, tokens: int, source: Sequence[int] | None = None) -> None:
        self.pool.enter(row, tokens)
        super().enter(row, tokens, source)

    def leave(self, row: int) -> None:
        self.pool.leave(row)
        super().leave(row)

    def ensure(self, row: int, tokens: int) -> None:
        self.pool.ensure(row, tokens)

    def save(self, row: int) -> SavedHybrid:
        return SavedHybrid(super().save(row), self.pool.save(row))

    def restore(self, row: int, saved: SavedHybrid) -> None:
        self.pool.restore(row, saved.kept)
        super().restore(row, saved.states.with_slots(self._slots([row])))

    def _new_cache(self, rows: Sequence[int], capacity: int) -> HybridCache:
        for row in rows:
            del self._entering[row]
        return self._hybrid.empty_cache(self._slots(rows), len(rows))

    def _slots(self, rows: Sequence[int]) -> PooledSlots:
        return PooledSlots(self.pool, [self.pool.rows[row] for row in rows])
