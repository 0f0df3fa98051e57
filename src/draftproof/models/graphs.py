"""Passes that come again and again are recorded once and replayed: on a GPU a short pass takes longer to launch, one
kernel after another, than to run.

A pass over a slot cache has static shapes, and all that differs from round to round is data: tokens and lengths. What
is recorded holds until the cache's buffers are replaced.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

TIMES: Final = 2
"""A shape is launched as usual this often before it is recorded: many come once or twice, and recording costs about as
much as a pass. It is also the warming-up that a recording needs."""

WIDEST: Final = 33
"""Tokens in a row of a pass worth recording; longer ones are prompts, which are busy and come once."""

Body = Callable[[Int[Tensor, "B T"], Int[Tensor, " B"]], Float[Tensor, "B T V"]]
"""Tokens and the lengths behind which they stand to logits."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A pass, and the memory it reads from and writes to."""

    reach: int
    graph: torch.cuda.CUDAGraph
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    logits: Float[Tensor, "B T V"]

    def replay(self, tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Float[Tensor, "B T V"]:
        self.tokens.copy_(tokens)
        self.lengths.copy_(lengths)
        self.graph.replay()
        return self.logits.clone()  # the next replay writes over it


@dataclass(slots=True)
class Recordings:
    """Of the passes over one cache: the last for each width, as older ones look less far than there is to see."""

    times: Counter[tuple[int, int]] = field(default_factory=Counter)
    pool: Any = None
    """Memory that they share: one runs at a time."""
    by_width: dict[int, Recording] = field(default_factory=dict)

    def forget(self) -> None:
        """The buffers are no longer the ones that were recorded. Their memory goes with the recordings: a pool that has
        none left cannot be used again."""
        self.by_width.clear()
        self.pool = None


@dataclass(slots=True)
class Recorder:
    """Records the passes of one model. `refusal`: why it does not, once a recording has failed."""

    refusal: str | None = None

    def run(
        self, body: Body, tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"], reach: int, kept: Recordings
    ) -> Float[Tensor, "B T V"]:
        """`body(tokens, lengths)`, by replay where it was recorded with this width and reach."""
        width = tokens.shape[1]
        found = kept.by_width.get(width)
        if found is None or found.reach != reach:
            kept.times[width, reach] += 1
            if self.refusal is not None or kept.times[width, reach] <= TIMES:
                return body(tokens, lengths)
            found = self._record(body, tokens, lengths, reach, kept)
            if found is None:
                return body(tokens, lengths)
            kept.by_width[width] = found
        return found.replay(tokens, lengths)

    def _record(self, body: Body, tokens: Tensor, lengths: Tensor, reach: int, kept: Recordings) -> Recording | None:
        tokens, lengths = tokens.clone(), lengths.clone()
        try:
            graph, logits = _captured(lambda: body(tokens, lengths), kept)
        except Exception as error:  # a model may do anything in its pass, and then it is launched as usual
            reason = error.__context__ or error
            self.refusal = f"{type(reason).__name__}: {reason}"
            warnings.warn(f"passes are launched one kernel at a time, as recording failed: {reason}", stacklevel=2)
            return None
        return Recording(reach, graph, tokens, lengths, logits)


def _captured(run: Callable[[], Tensor], kept: Recordings) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """What `run` launches, taken down and not run. `torch.cuda.graph` would also wait for the device, collect garbage
    and empty the allocator's cache each time."""
    graph = torch.cuda.CUDAGraph()
    kept.pool = torch.cuda.graph_pool_handle() if kept.pool is None else kept.pool
    here, aside = torch.cuda.current_stream(), _aside(torch.cuda.current_device())
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        graph.capture_begin(kept.pool, capture_error_mode="thread_local")
        try:
            made = run()
        finally:
            graph.capture_end()
    here.wait_stream(aside)
    return graph, made


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """Where passes are recorded: one stream for all, as libraries keep memory for every stream they have seen."""
    return torch.cuda.Stream(device)
