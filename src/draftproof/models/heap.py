"""Return freed memory to the operating system while weights are loaded."""

import ctypes
from collections.abc import Callable
from functools import cache


def trim_heap() -> None:
    """Return all free pages of the heap, where the C library can (glibc); elsewhere do nothing.

    Loading leaves large free blocks between the packed weights, too small for the next temporary: without this the
    process holds 190 MB that nothing uses.
    """
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no handle of the process itself
        return lambda _padding: None
    return trim
