"""Keep the memory of a server flat: bound compiled products, and give what was freed back to the system."""

import asyncio
import ctypes
import os
from typing import Any, Final

KERNELS_KEPT: Final = 384
"""Kernels that oneDNN keeps, of 0.6 MB each; it would keep 1024. Products have 72 numbers of rows
(models/cpu_linear.padded_rows) and a decoder five shapes of weights: all fit, and none replaces another."""

TRIM_SECONDS: Final = 5.0
"""Time between two looks for freed memory; one takes a few milliseconds on a thread of its own."""


def limit_kernel_cache() -> None:
    """Bound the memory of compiled products, unless the environment does; to be called before the first one."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT))


async def give_back_freed_memory(seconds: float = TRIM_SECONDS) -> None:
    """Return freed memory to the system again and again, until cancelled.

    glibc keeps it for each thread, in pieces between blocks that are in use: a server that has met its largest requests
    would hold all they took for ever.
    """
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(library, "malloc_trim"):
        return
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(library.malloc_trim, 0)
