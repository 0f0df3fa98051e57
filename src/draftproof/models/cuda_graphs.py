"""Capture short passes as CUDA graphs and replay them: on a GPU they take longer to launch than to run.

A pass over a slot cache has static shapes, and all that differs from round to round is data: tokens, lengths, and the
parents of a tree. A graph stays valid until the cache's buffers are replaced.
"""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor

WARMUP_PASSES: Final = 2
"""Ordinary launches of a shape before it is captured: many shapes occur once or twice, and a capture costs about as
much as a pass. They are also the warm-up that a capture needs; the last one is checked for syncs."""

WIDEST: Final = 33
"""Tokens in a row up to which a pass is captured; longer ones are prompts, which are compute-bound and occur once."""

SWITCHED_OFF: Final = "switched off"
"""The `GraphCache.refusal` of a user who does not want CUDA graphs."""

launches: Counter[str] = Counter()
"""Passes of this process that could be replayed one day and were launched instead, by what was done: times measured
around them say nothing about later ones."""

Tensors = tuple[Tensor, ...]

Body = Callable[..., Tensors]
"""A pass: reads input tensors, returns output tensors."""


@dataclass(slots=True)
class GraphCache:
    """The CUDA graph policy of one model. `refusal`: why passes are not captured; None while they are."""

    refusal: str | None = None

    def run(self, body: Body, inputs: Tensors, reach: int, graphs: "CapturedGraphs", variant: Hashable = ()) -> Tensors:
        """Return `body(*inputs)`, by replay if a graph of these shapes exists.

        A graph captured with a larger `reach` serves too, as slots beyond the rows are masked. The first input is the
        tokens. `variant`: whatever else the body depends on.
        """
        if self.refusal is not None or not capturable(inputs[0]):
            return body(*inputs)
        kind = (*(tensor.shape for tensor in inputs), variant)
        found = graphs.by_kind.get(kind)
        if found is None or found.reach < reach:
            launches["first passes"] += 1
            graphs.times[kind, reach] += 1
            if graphs.times[kind, reach] < WARMUP_PASSES:
                return body(*inputs)
            if graphs.times[kind, reach] == WARMUP_PASSES:
                return self.rehearse(body, inputs)
            found = self._capture(body, inputs, reach, graphs)
            if found is None:
                return body(*inputs)
            graphs.by_kind[kind] = found
        return found.replay(inputs)

    def rehearse(self, body: Body, inputs: Tensors) -> Tensors:
        """Return `body(*inputs)`, and refuse to capture it if it synchronises with the device.

        During a capture a sync is an error from which torch's allocator and random numbers do not recover.
        """
        with sync_warnings() as syncs:
            outputs = body(*inputs)
        if syncs:
            self.refuse(f"it synchronises with the device ({syncs[0]})")
        return outputs

    def _capture(self, body: Body, inputs: Tensors, reach: int, graphs: "CapturedGraphs") -> "CapturedGraph | None":
        """Capture `body` on its own copy of the inputs; None, with a refusal, if that fails."""
        memory = tuple(tensor.clone() for tensor in inputs)
        try:
            graph, outputs = capture(lambda: body(*memory), graphs, memory[0].device)
        except Exception as error:  # a model's forward may raise anything; its passes are then launched as usual
            self.refuse(error)
            return None
        return CapturedGraph(reach, graph, memory, outputs)

    def refuse(self, reason: str | Exception) -> None:
        """Capture nothing from now on, and warn why."""
        if isinstance(reason, Exception):
            cause = reason.__context__ or reason
            reason = f"{type(cause).__name__}: {cause}"
        self.refusal = reason
        warnings.warn(f"passes are launched one kernel at a time, as they cannot be recorded: {reason}", stacklevel=2)


@dataclass(slots=True)
class RecordedStages:
    """Work in stages, each given what the one before returned, captured as one CUDA graph a stage.

    Unlike a pass of `GraphCache`, it reads and writes memory that never moves, and its results are valid until the next
    run.
    """

    policy: GraphCache
    graphs: "CapturedGraphs"
    runs: int = 0
    recorded: list[tuple[torch.cuda.CUDAGraph, Tensors]] = field(default_factory=list)

    def run(self, stages: Sequence[Body], tokens: Int[Tensor, "B T"], between: Callable[[], None]) -> Tensors:
        """Run all stages, by replay from the second time on; `between` is called after each.

        tokens  as many as the widest stage has: they decide whether the stages are worth recording
        """
        if self.policy.refusal is not None or not capturable(tokens):
            return self._launch(stages, between)
        if not self.recorded:
            launches["first passes"] += 1
            self.runs += 1
            if self.runs == 1:
                return self.policy.rehearse(lambda: self._launch(stages, between), ())
            if not self._record(stages, tokens.device):
                return self._launch(stages, between)
        for graph, _ in self.recorded:
            graph.replay()
            between()
        return self.recorded[-1][1]

    def _launch(self, stages: Sequence[Body], between: Callable[[], None]) -> Tensors:
        outputs: Tensors = ()
        for stage in stages:
            outputs = stage(*outputs)
            between()
        return outputs

    def _record(self, stages: Sequence[Body], device: torch.device) -> bool:
        """Capture all stages without running them; return False, with a refusal, if one of them fails."""
        outputs: Tensors = ()
        try:
            for stage in stages:
                graph, outputs = capture(partial(stage, *outputs), self.graphs, device)
                self.recorded.append((graph, outputs))
        except Exception as error:  # as in `GraphCache`
            self.recorded.clear()
            self.policy.refuse(error)
            return False
        return True


def capturable(tokens: Int[Tensor, "B T"]) -> bool:
    """Return whether a pass over these tokens is worth a CUDA graph: a short one, on a GPU."""
    return tokens.is_cuda and tokens.shape[1] <= WIDEST


@dataclass(slots=True)
class CapturedGraphs:
    """The CUDA graphs of passes over one cache: per input signature, the one with the largest attention span."""

    times: Counter[Hashable] = field(default_factory=Counter)
    """Ordinary launches of each signature and reach."""
    pool: Any = None
    """Memory pool shared by the graphs, of which one runs at a time."""
    by_kind: dict[Hashable, "CapturedGraph"] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop all graphs, because the cache's buffers are replaced. A pool without graphs cannot be used again."""
        self.by_kind.clear()
        self.pool = None


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured pass, with the memory it reads from and writes to."""

    reach: int
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Tensors

    def replay(self, inputs: Tensors) -> Tensors:
        for memory, tensor in zip(self.inputs, inputs, strict=True):
            memory.copy_(tensor)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)  # the next replay overwrites them


def capture(
    run: Callable[[], Tensors], graphs: CapturedGraphs, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Tensors]:
    """Capture the kernels that `run` launches on this device, without running them.

    `torch.cuda.graph` would also synchronise, collect garbage and empty the allocator's cache each time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), _garbage_collection_off():
        graphs.pool = torch.cuda.graph_pool_handle() if graphs.pool is None else graphs.pool
        current, capturing = torch.cuda.current_stream(), _capture_stream(torch.cuda.current_device())
        capturing.wait_stream(current)
        with torch.cuda.stream(capturing):
            _begin(graph, graphs.pool)
            try:
                outputs = run()
            finally:
                graph.capture_end()
        current.wait_stream(capturing)
    return graph, outputs


def _begin(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    # torch allocates its generator state at the first capture and writes to it at every later one. A later capture may
    # be the user's, outside of inference mode, where an inference tensor cannot be written to.
    with torch.inference_mode(False):
        graph.capture_begin(pool, capture_error_mode="thread_local")


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Suspend garbage collection: it may destroy an older graph, which can invalidate the running capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def sync_warnings() -> Iterator[list[str]]:
    """Collect the source lines that synchronise with the device, as far as torch reports them.

    The list is filled when the context ends; other warnings are passed on.
    """
    mode_before, syncs = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # not "error": the mode applies to all threads
        try:
            yield syncs
        finally:
            torch.cuda.set_sync_debug_mode(mode_before)
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            syncs.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for captures: one for all, as libraries allocate memory for every stream they see."""
    return torch.cuda.Stream(device)
