"""Keep the memory of a server flat: bound what libraries remember, and give what was freed back to the system."""

import asyncio
import ctypes
import os
from typing import Any, Final

KERNELS_KEPT: Final = 128
"""Compiled products that are kept, of 0.4 MB each: those of 25 numbers of rows with five shapes of weights, of the 73
numbers that products have (models/cpu_linear.padded_rows). A server meets rare numbers for hours, and if all were kept,
it would grow as long; one that is met again is compiled in 0.2 ms."""

KERNEL_CACHES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""What bounds oneDNN's cache of kernels, and torch's of their descriptions, which are as large; both hold 1024."""

WORDS_KEPT: Final = 1000
"""Words whose tokens a tokenizer remembers, of 0.5 kB each; it would remember 10000. Clients send new ones for ever."""

TRIM_SECONDS: Final = 5.0
"""Time between two looks for freed memory; one takes a few milliseconds on a thread of its own."""


def limit_kernel_cache() -> None:
    """Bound the memory of compiled products, unless the environment does; to be called before the first one."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KERNELS_KEPT))


def limit_word_cache(tokenizer: Any) -> None:
    """Bound the words that a tokenizer of `tokenizers` remembers; others remember what they like."""
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if hasattr(model, "_resize_cache"):
        model._resize_cache(WORDS_KEPT)


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
