"""Divide the work of a parallel region among torch's OpenMP threads, and let them wait for each other."""

from typing import Any, Final

from llvmlite import ir
from numba import types

from draftproof.core.simd import (
    I64,
    Emit,
    compiled,
    emitted,
)

PATIENCE: Final = 500
"""Looks at the gate before a thread gives way to others. A thread that only spins keeps the core that the thread it
waits for may need: with one other busy process on two cores, a pass took 140 times as long."""


give_way = types.ExternalFunction("sched_yield", types.int32())


@emitted
def arrive(typingctx, gate):  # type: ignore[no-untyped-def]
    """Count one more thread at a gate; return how many had arrived before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], I64.as_pointer()), I64(1), "acq_rel")

    return types.int64(types.int64), codegen


@emitted
def arrived(typingctx, gate):  # type: ignore[no-untyped-def]
    """Return how many threads have arrived at a gate, and wait a moment."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Emit(builder).call("llvm.x86.sse2.pause", ir.VoidType())
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@compiled()
def wait_for_others(gate: Any, threads: Any) -> None:
    """Wait until all threads have arrived as often as this one."""
    wanted, looks = (arrive(gate) // threads + 1) * threads, 0
    while arrived(gate) < wanted:
        looks += 1
        if looks > PATIENCE:
            give_way()


@compiled(inline="always")
def share(count: Any, thread: Any, threads: Any) -> Any:
    """Return the first and the last-plus-one of `count` pieces of work that are this thread's."""
    return count * thread // threads, count * (thread + 1) // threads
