"""Passes that come again and again are recorded once and replayed: on a GPU a short pass takes longer to launch, one
kernel after another, than to run.

A pass over a slot cache has static shapes, and all that differs from round to round is data: tokens, lengths, and the
parents of a tree. What is recorded holds until the cache's buffers are replaced.
"""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor

TIMES: Final = 2
"""A shape is launched as usual this often before it is recorded: many come once or twice, and recording costs about as
much as a pass. It is also the warming-up that a recording needs, and the last time is its rehearsal."""

WIDEST: Final = 33
"""Tokens in a row of a pass worth recording; longer ones are prompts, which are busy and come once."""

SWITCHED_OFF: Final = "switched off"
"""A refusal that is the user's."""

Tensors = tuple[Tensor, ...]
Body = Callable[..., Tensors]
"""What a pass reads to what it gives."""

Captured = tuple[torch.cuda.CUDAGraph, Tensors]


def recordable(tokens: Int[Tensor, "B T"]) -> bool:
    """Whether a pass over these is worth recording: a short one, on a GPU."""
    return tokens.is_cuda and tokens.shape[1] <= WIDEST


@dataclass(frozen=True, slots=True)
class Recording:
    """A pass, and the memory it reads from and writes to."""

    reach: int
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Tensors

    def replay(self, inputs: Tensors) -> Tensors:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)  # the next replay writes over them


@dataclass(slots=True)
class Recordings:
    """Of the passes over one cache: of each kind the one that looks furthest."""

    times: Counter[Hashable] = field(default_factory=Counter)
    pool: Any = None
    """Memory that they share: one runs at a time."""
    by_kind: dict[Hashable, Recording] = field(default_factory=dict)

    def forget(self) -> None:
        """The buffers are no longer the ones that were recorded. Their memory goes with the recordings: a pool that has
        none left cannot be used again."""
        self.by_kind.clear()
        self.pool = None


@dataclass(slots=True)
class GraphCache:
    """Records the passes of one model. `refusal`: why it does not, once a pass has turned out not to be recordable."""

    refusal: str | None = None

    def run(self, body: Body, inputs: Tensors, reach: int, kept: Recordings, asked: Hashable = ()) -> Tensors:
        """`body(*inputs)`, by replay where it was recorded with these shapes and looked at least so far: what lies
        beyond is masked. `asked`: what else the body depends on. The first of the inputs are tokens."""
        if self.refusal is not None or not recordable(inputs[0]):
            return body(*inputs)
        kind = (*(tensor.shape for tensor in inputs), asked)
        found = kept.by_kind.get(kind)
        if found is None or found.reach < reach:
            kept.times[kind, reach] += 1
            if kept.times[kind, reach] < TIMES:
                return body(*inputs)
            if kept.times[kind, reach] == TIMES:
                return self._rehearsed(body, inputs)
            found = self._recorded(body, inputs, reach, kept)
            if found is None:
                return body(*inputs)
            kept.by_kind[kind] = found
        return found.replay(inputs)

    def _rehearsed(self, body: Body, inputs: Tensors) -> Tensors:
        """`body(*inputs)`, and whether it waits for the device: while a recording runs that would be an error from
        which torch's allocator and random numbers do not recover."""
        with watched() as waits:
            made = body(*inputs)
        if waits:
            self._refuse(f"it waits for the device ({waits[0]})")
        return made

    def _recorded(self, body: Body, inputs: Tensors, reach: int, kept: Recordings) -> Recording | None:
        memory = tuple(tensor.clone() for tensor in inputs)
        try:
            graph, outputs = captured(lambda: body(*memory), kept, memory[0].device)
        except Exception as error:  # a model may do anything in its pass, and then it is launched as usual
            reason = error.__context__ or error
            self._refuse(f"{type(reason).__name__}: {reason}")
            return None
        return Recording(reach, graph, memory, outputs)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        warnings.warn(f"passes are launched one kernel at a time, as they cannot be recorded: {reason}", stacklevel=2)


def captured(
    run: Callable[[], Tensors], kept: Recordings, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Tensors]:
    """What `run` launches on this device, taken down and not run. `torch.cuda.graph` would also wait for the device,
    collect garbage and empty the allocator's cache each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), _undisturbed():
        kept.pool = torch.cuda.graph_pool_handle() if kept.pool is None else kept.pool
        here, aside = torch.cuda.current_stream(), _aside(torch.cuda.current_device())
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            _begin(graph, kept.pool)
            try:
                made = run()
            finally:
                graph.capture_end()
        here.wait_stream(aside)
    return graph, made


def _begin(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    # What torch allocates for its random numbers at its first recording is written to at every later one, which may be
    # somebody else's, outside of inference mode.
    with torch.inference_mode(False):
        graph.capture_begin(pool, capture_error_mode="thread_local")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage is collected meanwhile: older recordings may be among it, and to destroy one can end another."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def watched() -> Iterator[list[str]]:
    """Which lines wait for the device meanwhile, as far as torch sees it; the list is filled at the end."""
    before, waits = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # not "error": it holds for all threads
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            waits.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """Where passes are recorded: one stream for all, as libraries keep memory for every stream they have seen."""
    return torch.cuda.Stream(device)
