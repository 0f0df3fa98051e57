"""From tensors to launches: which kernels a call needs, in which order, with what."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from draftproof.core.draw import CHUNK
from draftproof.kernels.batch import Batch, Lists, Out, Sizes, Strides, Traits
from draftproof.kernels.block import block_close, block_sums, block_walk
from draftproof.kernels.call import Call
from draftproof.kernels.coupled import coupled
from draftproof.kernels.deep import settle_deep
from draftproof.kernels.scan import scan
from draftproof.kernels.settle import settle
from draftproof.kernels.token import token
from draftproof.kernels.workspace import NUMBERS, PER_CHUNK, PER_TILE, Workspace, chunks, tiles

LARGE: Final = 8
"""Requests from which on a program of the scan may read several tiles: before that there are too few for the device."""


DEEP: Final = 132
"""Programs that share the rows whose cutoff lies deep: about as many as the device has processors."""

LINES: Final = 16
"""Slices that a search for a cutoff asks for at a time, four times over before it works on the first."""

CROWDED: Final = 80
"""Registers of a thread of `settle` where there are many rows: three programs then share a processor."""

LINE_OF_MEMORY: Final = 128
"""Bytes."""


class Step(NamedTuple):
    """One launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int
    registers: int | None = None
    """Of a thread, at most; None leaves it to the compiler."""


def launch(call: Call, workspace: Workspace) -> None:
    """Verify `call` into `workspace`. Nothing is allocated and nothing is waited for."""
    if call.draft_lse is not None:
        _hand_over(call, call.draft_lse, workspace)
    overlap = call.target_logits.is_cuda and _hopper(call.target_logits.device)
    first, *others = plan(call, workspace, overlap=overlap)
    run(first, overlap=False)
    for step in others:
        run(step, overlap=overlap)


def run(step: Step, *, overlap: bool) -> None:
    """Launch one step; `overlap`: it may start while the one before it ends."""
    step.kernel[step.grid](*step.arguments, launch_pdl=overlap, **options_of(step))


def options_of(step: Step) -> dict[str, int]:
    """What a step's kernel is compiled with."""
    limit = {} if step.registers is None else {"maxnreg": step.registers}
    return {"num_warps": step.warps, **limit}


def plan(call: Call, workspace: Workspace, *, overlap: bool) -> list[Step]:
    """The launches of a call, in order."""
    batch = _batch(call, workspace, overlap)
    out = Out(workspace.tokens, workspace.accepted, workspace.faults)
    B, K = call.B, call.K
    T = batch.sizes.T
    rows = K + 1 + (K if batch.traits.READ_DRAFT else 0)
    # logits of two bytes come in faster than few warps can add them up: each then works on its own, and waits for none
    step, warps = (2, 1) if batch.traits.TILES.value > 1 else (PER_TILE, 4)
    steps = [Step(scan, (-(-T // batch.traits.TILES.value), rows, B), (batch, tl.constexpr(step)), warps)]
    if batch.traits.FILTERED:
        limit = CROWDED if B >= LARGE else None
        steps.append(Step(settle, (rows, B), (batch, tl.constexpr(LINES)), 8, limit))
        steps.append(Step(settle_deep, (min(rows * B, DEEP),), (batch, tl.constexpr(LINES)), 16))
    if call.rule == "coupled":
        return [*steps, Step(coupled, (B,), (batch, out), 8)]
    if call.rule == "token" or call.draft_logits is None or K == 0:  # without a law the two rules are one
        return [*steps, Step(token, (B,), (batch, out), 8)]
    return [
        *steps,
        Step(block_walk, (B,), (batch, out), 8),
        Step(block_sums, (T, K, B), (batch, out), 4),
        Step(block_close, (B,), (batch, out), 8),
    ]


def _hand_over(call: Call, draft_lse: Tensor, workspace: Workspace) -> None:
    """Put the drafter's own numbers where the kernels look for them (`draftproof.kernels.layout`)."""
    J, K = call.K + 1, call.K
    cutoff, base, mass, *_ = (
        workspace.numbers[: call.B * (J + K) * NUMBERS].view(call.B, J + K, NUMBERS)[:, J:].unbind(-1)
    )
    if call.draft_cutoff is None:
        cutoff.fill_(-torch.inf)
    else:
        cutoff.copy_(call.draft_cutoff)
    base.copy_(draft_lse)
    mass.fill_(1.0)


def _batch(call: Call, workspace: Workspace, overlap: bool) -> Batch:
    V, K, parameters, edits = call.V, call.K, call.parameters, call.edits
    draft = call.target_logits if call.draft_logits is None else call.draft_logits
    nothing = parameters.ints  # stands for a pointer that is never followed
    traits = _traits(
        call.draft_logits is not None and call.rule != "coupled",
        call.draft_lse is None,
        parameters.filtered,
        edits is not None,
        call.allowed is not None,
        call.draft_entries is not None,
        overlap,
        call.target_logits.element_size(),
        draft.element_size(),
        call.B >= LARGE,
        K,
        V,
    )
    return Batch(
        target=call.target_logits,
        draft=draft,
        drafted=call.draft_tokens,
        entries=nothing if call.draft_entries is None else call.draft_entries,
        allowed=nothing if call.allowed is None else call.allowed,
        floats=parameters.floats,
        ints=parameters.ints,
        edits=Lists(nothing, nothing, nothing, 0)
        if edits is None
        else Lists(edits.first, edits.tokens, edits.values, edits.tokens.shape[-1]),
        stats=workspace.stats,
        slices=workspace.slices,
        tiles=workspace.tiles,
        numbers=workspace.numbers,
        work=workspace.work if parameters.filtered else nothing,
        trials=workspace.trials,
        strides=Strides(*_strides(call.target_logits), *_strides(draft), *_strides(call.allowed)),
        sizes=Sizes(K + 1, K, V, call.R, chunks(V), tiles(V)),
        traits=traits,
    )


@lru_cache(maxsize=1024)
def _traits(
    drawn: bool,
    measured: bool,
    filtered: bool,
    edited: bool,
    masked: bool,
    mapped: bool,
    overlap: bool,
    size: int,
    draft_size: int,
    large: bool,
    K: int,
    V: int,
) -> Traits:
    """Remembered: the host spends longer on them than the device on a small batch."""
    slice_size = CHUNK // PER_CHUNK
    as_slices = edited or masked  # edits are put in slice by slice
    values = Traits(
        DRAWN=drawn,
        READ_DRAFT=drawn and measured,
        FILTERED=filtered,
        EDITED=edited,
        MASKED=masked,
        MAPPED=mapped,
        OVERLAP=overlap,
        SEGMENT=slice_size if as_slices else LINE_OF_MEMORY // size,
        DRAFT_SEGMENT=slice_size if as_slices else LINE_OF_MEMORY // draft_size,
        TILES=2 if large and size < 4 else 1,
        KP=_power_of_2(K + 1),
        NP=_power_of_2(chunks(V)),
        TP=_power_of_2(tiles(V)),
        NS=_power_of_2(chunks(V) * PER_CHUNK),
    )
    return Traits(*(tl.constexpr(value) for value in values))


def _power_of_2(n: int) -> int:
    """The smallest that is at least n. Triton's own takes the host a hundred times as long."""
    return 1 << (n - 1).bit_length()


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """From request to request and from position to position; in ragged logits both are one row."""
    if tensor is None:
        return 0, 0
    return tensor.stride(0), tensor.stride(-2)


@lru_cache(maxsize=64)
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
