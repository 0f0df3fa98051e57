"""From tensors to launches: which kernels a call needs, in which order, with what."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from draftproof.kernels.batch import Batch, Lists, Out, Sizes, Strides
from draftproof.kernels.block import PIECE, block_close, block_sums, block_walk
from draftproof.kernels.call import Call
from draftproof.kernels.coupled import coupled
from draftproof.kernels.deep import settle_deep
from draftproof.kernels.scan import scan
from draftproof.kernels.settle import settle
from draftproof.kernels.sift import sift
from draftproof.kernels.token import token
from draftproof.kernels.traits import SHORT, constant, traits_of
from draftproof.kernels.workspace import NUMBERS, PARTS, PER_TILE, ROUNDS, Workspace, chunks, tiles

LARGE: Final = 32
"""Requests from which on a device has enough to read, however long each of them waits."""

PROCESSORS: Final = 132
"""Of an H200. As many programs share the rows whose cutoff lies deep; and as long as there are no more, each has one to
itself, and all its registers."""

LINES: Final = 32
"""Slices that a search for a cutoff asks for at a time."""

CROWDED: Final = 80
"""Registers of a thread of `settle` where several programs share a processor. At most as many in `block_sums`."""

IN_TURN: Final = 2
"""Pieces of float32 logits that a program of `block_sums` reads one behind the other in a large batch; of narrower ones
as many bytes."""

FILL: Final = 1024
"""Programs of `block_sums` that find room on a device, about: in small batches nodes are summed side by side."""

ROOM: Final = 128
"""The same of `token` and `sift`: two programs then share one."""


KERNELS: Final = (scan, settle, sift, settle_deep, token, coupled, block_walk, block_sums, block_close)
"""All that a call may launch."""

for _kernel in KERNELS:
    # Triton 3.6 names a compiled kernel also by those it has looked at before. All are looked at here, in one order, so
    # that what one process has compiled is found on disk by the next
    getattr(_kernel, "cache_key", None)


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
    rows = K + 1 + (K if call.weighs_draft and call.draft_lse is None else 0)
    shape = _scan_shape(call)
    steps = [_step(scan, (tiles(call.V), rows, B), batch, shape.constants, shape.warps, shape.registers)]
    if call.parameters.filtered:
        crowded = B * rows > PROCESSORS
        steps.append(_step(settle, (rows, B), batch, (constant(LINES),), 8, CROWDED if crowded else None))
        if call.parameters.nucleus:
            programs, limit = min(rows * B * PARTS, 2 * PROCESSORS), ROOM if crowded else None
            steps += [_step(sift, (programs,), batch, (constant(n),), 8, limit) for n in range(ROUNDS + 2)]
        steps.append(_step(settle_deep, (min(rows * B, PROCESSORS),), batch, (constant(LINES),), 16))
    if call.rule == "coupled":
        return [*steps, _step(coupled, (B,), batch, (out,), 8)]
    if call.rule == "token" or not call.weighs_draft:  # without a law of the draft the two rules are one
        return [*steps, _step(token, (B,), batch, (out,), 8, ROOM if B > PROCESSORS else None)]
    return [
        *steps,
        _step(block_walk, (B,), batch, (out,), 4 if K < SHORT else 16),  # by the rows it looks at side by side
        _step(block_sums, (*_shares(call), B), batch, (out,), 4, CROWDED),
        _step(block_close, (B,), batch, (out,), 4),
    ]


class Shape(NamedTuple):
    """How a scan is launched."""

    constants: tuple[Any, ...]
    warps: int
    registers: int | None


def _scan_shape(call: Call) -> Shape:
    """Chosen by `benchmarks/tune_gpu.py`. Edits and a mask take more registers: how many, the compiler says."""
    large, narrow = call.B >= LARGE, call.target_logits.element_size() < 4
    plain = call.edits is None and call.allowed is None
    if large and narrow:
        # logits of two bytes come in faster than few warps can add them up: each then works on its own, waits for none
        return Shape((constant(2), constant(0)), 1, 64 if plain else None)
    early = not (large or narrow or call.ragged)
    return Shape((constant(PER_TILE), constant(int(early))), 4, (64 if early else 48) if plain else None)


def _shares(call: Call) -> tuple[int, int]:
    """Into how many parts rows are split, and how many of a request's nodes are summed side by side."""
    pieces = -(-chunks(call.V) // PIECE.value)
    in_turn = max(1, min(call.B // LARGE, IN_TURN * 4 // call.target_logits.element_size()))
    parts = -(-pieces // in_turn)
    return parts, max(1, min(call.K, FILL // (parts * call.B)))


def _step(
    kernel: Any, grid: tuple[int, ...], batch: Batch, others: tuple[Any, ...], warps: int, most: int | None = None
) -> Step:
    return Step(kernel, grid, (batch._replace(traits=batch.traits[kernel.__name__]), *others), warps, most)


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
    """With the traits of all kernels, by name."""
    V, K, parameters, edits = call.V, call.K, call.parameters, call.edits
    draft = call.target_logits if call.draft_logits is None else call.draft_logits
    nothing = parameters.ints  # stands for a pointer that is never followed
    traits = traits_of(
        call.weighs_draft,
        call.draft_lse is None,
        parameters.filtered,
        edits is not None,
        call.allowed is not None,
        call.draft_entries is not None,
        overlap,
        call.target_logits.dtype,
        draft.dtype,
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
        edits=Lists(nothing, nothing, nothing, 0.0)
        if edits is None
        else Lists(edits.first, edits.tokens, edits.values, float(edits.tokens.shape[-1])),
        stats=workspace.stats,
        slices=workspace.slices,
        tiles=workspace.tiles,
        parts=workspace.parts,
        numbers=workspace.numbers,
        work=workspace.work,
        strides=Strides(*_strides(call.target_logits), *_strides(draft), *_strides(call.allowed)),
        sizes=Sizes(float(K), V, call.R),
        traits=traits,
    )


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """From request to request and from position to position; in ragged logits both are one row."""
    if tensor is None:
        return 0, 0
    return tensor.stride(0), tensor.stride(-2)


@lru_cache(maxsize=64)
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
