"""Memory of a call: allocated once, for the largest batch, and used again in every round and graph."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftproof.core.draw import CHUNK

PER_CHUNK: Final = 4
"""Slices in a chunk."""

PER_TILE: Final = 8
"""Chunks in a tile: 4096 tokens, read at one go, are enough bytes on the way to fill the memory's pipe."""

NUMBERS: Final = 7
"""Numbers kept of a distribution row."""

FEW: Final = 512
"""Logits of a row that the search for its cutoff ranks."""

WORK: Final = FEW + 2
"""Places a distribution row has for that search besides its list of slices; two serve the queue of rows that need more."""

PARTS: Final = 32
PIVOTS: Final = 16
ROUNDS: Final = 2
"""Pieces of a row that are measured side by side, at most; how many numbers it is measured with, and how often."""

MEASURED: Final = ROUNDS * PIVOTS + 3 * PARTS
"""Places a distribution row has for what was measured."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the kernels write. The results stand in `tokens` [B, K + 1], `accepted` [B] and `faults` [B].

    A smaller batch may use it: the results are then its first B rows, and the next call overwrites them.
    """

    tokens: Tensor
    accepted: Tensor
    faults: Tensor
    stats: Tensor
    slices: Tensor
    numbers: Tensor
    work: Tensor
    tiles: Tensor
    parts: Tensor

    @classmethod
    def empty(cls, B: int, K: int, V: int, device: torch.device | str, *, filtered: bool = True) -> "Workspace":
        """For up to B requests, drafts of up to K tokens, V tokens; `filtered` as in `Parameters`."""
        rows, C = B * (2 * K + 1), chunks(V)

        def floats(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        return cls(
            tokens=torch.empty(B * (K + 1), dtype=torch.int64, device=device),
            accepted=torch.empty(B, dtype=torch.int64, device=device),
            faults=torch.empty(B, dtype=torch.int32, device=device),
            stats=floats(rows * 2 * C),
            slices=floats(rows * 2 * PER_CHUNK * C),
            numbers=floats(rows * NUMBERS, torch.float64),
            work=floats(rows * (PER_CHUNK * C + WORK) if filtered else WORK),
            tiles=floats(rows * 2 * tiles(V)),
            parts=floats(rows * MEASURED if filtered else 1, torch.float64),
        )

    def check(self, B: int, K: int, V: int, *, filtered: bool) -> None:
        """Refuse a call this workspace is too small for."""
        rows, C = B * (2 * K + 1), chunks(V)
        small = self.stats.numel() < rows * 2 * C or self.tokens.numel() < B * (K + 1) or len(self.accepted) < B
        if small or self.numbers.numel() < rows * NUMBERS:
            raise ValueError(
                f"workspace is too small for B={B}, K={K}, V={V}: make it with Workspace.empty for the largest of each"
            )
        if filtered and (self.work.numel() < rows * (PER_CHUNK * C + WORK) or self.parts.numel() < rows * MEASURED):
            raise ValueError(
                "workspace was made with filtered=False, and parameters.filtered is True: make it with filtered=True"
            )


def tiles(V: int) -> int:
    """Tiles in a row of V logits."""
    return -(-V // (CHUNK * PER_TILE))


def chunks(V: int) -> int:
    """Chunks in a row of V logits."""
    return -(-V // CHUNK)
