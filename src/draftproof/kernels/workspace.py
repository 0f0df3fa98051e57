"""Allocate the kernels' memory once, for the largest batch, to be reused in every round and CUDA graph."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftproof.core.draw import CHUNK

PER_CHUNK: Final = 4
"""Slices in a chunk: 128 tokens each, small enough to skip most of a row in a search."""

PER_TILE: Final = 8
"""Chunks in a tile: 4096 tokens loaded at once are enough bytes in flight to saturate the memory."""

ROW_STATS: Final = 7
"""Columns of statistics kept per distribution row."""

SHORTLIST: Final = 512
"""Logits that the search for a row's cutoff ranks at most; with more, it narrows the span first."""

WORK: Final = SHORTLIST + 2
"""float32 entries per distribution row for that search, besides its list of slices; the last two are the queue's."""

PARTS: Final = 32
"""Parts of a row that are measured side by side, at most."""

PIVOTS: Final = 16
"""Pivots whose masses are measured in one round."""

ROUNDS: Final = 2
"""Rounds of measuring before the logits left are gathered."""

PART_SUMS: Final = ROUNDS * PIVOTS + 3 * PARTS
"""float64 entries per distribution row: pivot sums of each round; count, smallest and largest logit of each part."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that the kernels write. Results are in `tokens` [B, K + 1], `accepted` [B] and `faults` [B].

    A smaller batch may use it: the results are then its first B rows, and the next call overwrites them. Layouts:
    `draftproof.kernels.device.layout`.
    """

    tokens: Tensor
    accepted: Tensor
    faults: Tensor
    chunk_stats: Tensor
    slice_stats: Tensor
    row_stats: Tensor
    work: Tensor
    tile_stats: Tensor
    part_sums: Tensor

    @classmethod
    def empty(cls, B: int, K: int, V: int, device: torch.device | str, *, filtered: bool = True) -> "Workspace":
        """Allocate for up to B requests, drafts of up to K tokens, V tokens; `filtered` as in `Parameters`."""
        return cls(
            **{
                name: torch.empty(size, dtype=_DTYPES.get(name, torch.float32), device=device)
                for name, size in _sizes(B, K, V, filtered).items()
            }
        )

    def check(self, B: int, K: int, V: int, *, filtered: bool) -> None:
        """Refuse a call for which this workspace is too small."""
        needed = _sizes(B, K, V, filtered)
        small = [name for name, size in needed.items() if getattr(self, name).numel() < size]
        if not small:
            return
        if filtered and not any(getattr(self, name).numel() < size for name, size in _sizes(B, K, V, False).items()):
            raise ValueError(
                "workspace was made with filtered=False, and parameters.filtered is True: make it with filtered=True"
            )
        raise ValueError(
            f"workspace is too small for B={B}, K={K}, V={V} ({small[0]} holds {getattr(self, small[0]).numel()} of "
            f"{needed[small[0]]} numbers): make it with Workspace.empty for the largest of each"
        )


_DTYPES: Final = {
    "tokens": torch.int64,
    "accepted": torch.int64,
    "faults": torch.int32,
    "row_stats": torch.float64,
    "part_sums": torch.float64,
}
"""The dtypes of the tensors that are not float32."""


def _sizes(B: int, K: int, V: int, filtered: bool) -> dict[str, int]:
    """Return how many numbers each tensor of a workspace must hold."""
    rows, C = B * (2 * K + 1), chunks(V)
    return {
        "tokens": B * (K + 1),
        "accepted": B,
        "faults": B,
        "chunk_stats": rows * 2 * C,
        "slice_stats": rows * 2 * PER_CHUNK * C,
        "row_stats": rows * ROW_STATS,
        "work": rows * (PER_CHUNK * C + WORK) if filtered else WORK,
        "tile_stats": rows * 2 * tiles(V),
        "part_sums": rows * PART_SUMS if filtered else 1,
    }


def tiles(V: int) -> int:
    """Return the number of tiles in a row of V logits."""
    return -(-V // (CHUNK * PER_TILE))


def chunks(V: int) -> int:
    """Return the number of chunks in a row of V logits."""
    return -(-V // CHUNK)
