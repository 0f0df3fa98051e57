"""What a kernel is compiled for. Every combination costs a user seconds at his first request: there are few."""

from functools import lru_cache
from typing import Final

import torch
import triton.language as tl

from draftproof.core.draw import CHUNK
from draftproof.kernels.batch import Traits
from draftproof.kernels.call import MOST_DRAFTED
from draftproof.kernels.workspace import PER_CHUNK, PER_TILE

SHORT: Final = 8
"""Drafts below this length, and all others: two ways to compile what looks at a request's rows side by side."""

VOCABULARIES: Final = (8, 64, 256, 512)
"""Chunks in a row, at most: as many ways to compile what looks at them side by side."""

LINE_OF_MEMORY: Final = 128
"""Bytes."""

_REQUEST: Final = ("DRAWN", "READ_DRAFT", "MAPPED", "KP")
UNSEEN: Final = {
    "scan": (*_REQUEST, "NP", "TP", "NS"),
    "settle": (*_REQUEST, "FILTERED", "WARM"),
    "settle_deep": (*_REQUEST, "FILTERED", "WARM"),
    "sift": (*_REQUEST, "FILTERED", "WARM"),
    "token": ("NS",),
    "coupled": ("DRAWN", "READ_DRAFT", "MAPPED", "WARM", "NS"),
    "block_walk": ("WARM", "NS"),
    "block_sums": ("WARM", "NS"),
    "block_close": ("WARM", "NS"),
}
"""Traits that a kernel does not look at, and is not compiled anew for: they are 0 for it."""


@lru_cache(maxsize=64)
def constant(value: int) -> tl.constexpr:
    return tl.constexpr(value)


@lru_cache(maxsize=1024)
def traits_of(
    drawn: bool,
    measured: bool,
    filtered: bool,
    warm: bool,
    edited: bool,
    masked: bool,
    mapped: bool,
    overlap: bool,
    dtype: torch.dtype,
    draft_dtype: torch.dtype,
    K: int,
    V: int,
) -> dict[str, Traits]:
    """By kernel. Remembered: the host spends longer on them than the device on a small batch."""
    slice_size = CHUNK // PER_CHUNK
    most = next(size for size in VOCABULARIES if size * CHUNK >= V)
    as_slices = edited or masked  # edits are put in slice by slice
    values = Traits(
        DRAWN=drawn,
        READ_DRAFT=drawn and measured,
        FILTERED=filtered,
        WARM=warm,
        EDITED=edited,
        MASKED=masked,
        MAPPED=mapped,
        ALIKE=dtype == draft_dtype,
        OVERLAP=overlap,
        SEGMENT=slice_size if as_slices else LINE_OF_MEMORY // dtype.itemsize,
        KP=SHORT if K < SHORT else 2 * MOST_DRAFTED,
        NP=most,
        TP=max(most // PER_TILE, 1),
        NS=most * PER_CHUNK,
    )
    traits = Traits(*(constant(int(value)) for value in values))
    return {kernel: traits._replace(**dict.fromkeys(unseen, constant(0))) for kernel, unseen in UNSEEN.items()}
