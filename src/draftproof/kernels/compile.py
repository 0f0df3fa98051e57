"""Compile and launch kernels, and bundle the tensors of a call into their arguments.

Kernels take all tensors as one nested tuple (`Batch`) whose `traits` are compile-time constants. Compiled kernels are
remembered here by what Triton would specialise them for, because Triton's own look-up takes longer than a small batch.
"""

from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.core.draw import CHUNK
from draftproof.kernels.call import MOST_DRAFTED, Call
from draftproof.kernels.workspace import PER_CHUNK, PER_TILE, Workspace


class Step(NamedTuple):
    """One kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int
    kind: Hashable
    """Key of what Triton would specialise the kernel for, besides constants, warps and registers (`kind_of`)."""
    registers: int | None = None
    """Registers per thread, at most; None leaves it to the compiler."""


def overlaps(device: torch.device) -> bool:
    """Return whether a launch on this device may start while the one before it ends (Hopper and later)."""
    return device.type == "cuda" and _is_hopper(device)


@lru_cache(maxsize=64)
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def run_all(steps: Iterable[Step], device: torch.device) -> None:
    """Launch these on a device, which need not be the current one.

    All but the first may start while the one before them ends, if their kernels were planned with the grid-dependency
    wait.
    """
    other_device = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if other_device else nullcontext():
        for n, step in enumerate(steps):
            run(step, overlap=n > 0 and bool(step.arguments[0].traits.OVERLAP.value))


def run(step: Step, *, overlap: bool) -> None:
    """Launch one step. `overlap`: it may start while the one before it ends."""
    if triton.knobs.runtime.interpret:
        step.kernel[step.grid](*step.arguments)
        return
    constants = tuple(getattr(value, "value", None) for value in step.arguments[1:])
    name = step.kernel.__name__, constants, step.warps, step.registers, overlap, step.kind
    if (compiled := _compiled.get(name)) is None:
        compiled = _compiled[name] = compile_step(step, overlap=overlap)
    compiled[(*step.grid, 1, 1)[:3]](*step.arguments)


_compiled: dict[Hashable, Any] = {}


def compile_step(step: Step, *, overlap: bool) -> Any:
    """Return the compiled kernel, from Triton's cache if it is there."""
    limit = {} if step.registers is None else {"maxnreg": step.registers}
    options = {"num_warps": step.warps, "launch_pdl": overlap, **limit}
    return step.kernel.warmup(*step.arguments, grid=step.grid, **options)


def kind_of(traits: Hashable, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> Hashable:
    """Return a key that is equal only for calls that Triton would compile alike.

    Triton specialises a pointer by its dtype and by divisibility of its address by 16; an integer by being 1, by
    divisibility by 16 and by its width. The integers themselves are the key: most calls share them. `traits`: arguments
    of `traits_of`.
    """
    kinds = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
    return traits, tensors[0].device.index, kinds, numbers


class Sizes(NamedTuple):
    """K, V and R, the entries in a draft row; all other sizes follow (`draftproof.kernels.device.rows`).

    K is a float: Triton would compile a kernel anew for an integer that is 1, and for one divisible by 16.
    """

    K: Any
    V: Any
    R: Any


class Strides(NamedTuple):
    """Strides in elements: from request to request, and from position to position."""

    target: Any
    target_row: Any
    draft: Any
    draft_row: Any
    allowed: Any
    allowed_row: Any


class EditLists(NamedTuple):
    """The edits (`draftproof.kernels.penalties.Edits`), target side and draft side, E entries each."""

    first: Any  # [B, 2, C + 1]
    tokens: Any  # [B, 2, E]
    amounts: Any  # [B, J + K, E, 4]
    E: Any  # a float, like K


class Traits(NamedTuple):
    """Compile-time constants of a kernel, each a constexpr. What is off costs nothing."""

    DRAWN: Any  # the draft has logits that matter; otherwise its tokens were chosen
    READ_DRAFT: Any  # the draft's rows are scanned: they exist, the rule needs them, draft_lse was not passed
    FILTERED: Any
    WARM: Any  # some request may have a temperature above 0
    EDITED: Any
    MASKED: Any
    MAPPED: Any  # the draft vocabulary is part of the target's
    ALIKE: Any  # target and draft logits have the same dtype
    OVERLAP: Any  # a kernel may start while the one before it ends (Hopper and later)
    SEGMENT: Any  # tokens in 128 bytes of target logits
    KP: Any  # a power of 2, more than K
    NP: Any  # a power of 2, at least the chunks in a row
    TP: Any  # a power of 2, at least the tiles in a row
    NS: Any  # a power of 2, at least the slices in a row


class Batch(NamedTuple):
    """Pointers to all tensors of a call, and its sizes. Layouts: `draftproof.kernels.device.layout`."""

    target: Any
    draft: Any
    drafted: Any  # [B, K]
    entries: Any  # [V], the draft vocabulary's entry of each token
    allowed: Any  # packed bits, 32 a word
    floats: Any
    ints: Any
    edits: Any
    chunk_stats: Any  # [B · (J + K), 2, C]: largest logit of each chunk, and its mass relative to that
    slice_stats: Any  # [B · (J + K), 2, PER_CHUNK · C], by slice
    tile_stats: Any  # [B · (J + K), 2, T], by tile
    row_stats: Any  # [B · (J + K), ROW_STATS]
    work: Any  # lists of slices and logits of `settle`, and its queue
    part_sums: Any  # [B · (J + K), PART_SUMS]
    strides: Any
    sizes: Any
    traits: Any


class Out(NamedTuple):
    """Pointers to the results."""

    tokens: Any  # [B, J]
    accepted: Any  # [B]; between kernels a count, or what is left to do (`block.block_walk`, `token.token_residual`)
    faults: Any  # [B]


SHORT_DRAFT: Final = 8
"""Draft tokens: kernels that hold a request's rows side by side are compiled for shorter drafts, and for others."""

CHUNK_LIMITS: Final = (8, 64, 256, 512)
"""Chunks in a row, at most: kernels that hold them side by side are compiled once for each of these limits."""

CACHE_LINE: Final = 128
"""Bytes of a GPU cache line, which a segment of a slice fills."""

_REQUEST_TRAITS: Final = ("DRAWN", "READ_DRAFT", "MAPPED", "KP")
UNUSED_TRAITS: Final = {
    "scan": (*_REQUEST_TRAITS, "NP", "TP", "NS"),
    "settle": (*_REQUEST_TRAITS, "FILTERED", "WARM"),
    "settle_deep": (*_REQUEST_TRAITS, "FILTERED", "WARM"),
    "sift": (*_REQUEST_TRAITS, "FILTERED", "WARM"),
    "token": ("NS",),
    "token_residual": ("WARM", "KP", "TP", "NS"),
    "coupled": ("DRAWN", "READ_DRAFT", "MAPPED", "WARM", "NS"),
    "block_walk": ("WARM", "NS"),
    "block_sums": ("WARM", "NS"),
    "block_close": ("WARM", "NS"),
}
"""Traits that a kernel does not use: set to 0, so that it is not compiled anew for them."""


@lru_cache(maxsize=64)
def constant(value: int) -> tl.constexpr:
    """Return a cached constexpr."""
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
    """Return the traits by kernel name. Cached: building them takes longer than a small batch on the device."""
    slice_size = CHUNK // PER_CHUNK
    most = next(size for size in CHUNK_LIMITS if size * CHUNK >= V)
    as_slices = edited or masked  # edits are applied slice by slice
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
        SEGMENT=slice_size if as_slices else CACHE_LINE // dtype.itemsize,
        KP=SHORT_DRAFT if K < SHORT_DRAFT else 2 * MOST_DRAFTED,
        NP=most,
        TP=max(most // PER_TILE, 1),
        NS=most * PER_CHUNK,
    )
    traits = Traits(*(constant(int(value)) for value in values))
    return {kernel: traits._replace(**dict.fromkeys(unused, constant(0))) for kernel, unused in UNUSED_TRAITS.items()}


class Bundle(NamedTuple):
    """A call's kernel arguments: the batch without traits, the results, the traits of each kernel, and
    the `kind_of`."""

    batch: Batch
    out: Out
    traits: dict[str, Traits]
    kind: Hashable

    def step(
        self, kernel: Any, grid: tuple[int, ...], others: tuple[Any, ...], warps: int, registers: int | None = None
    ) -> Step:
        """Return a launch of a kernel on this batch."""
        batch = self.batch._replace(traits=self.traits[kernel.__name__])
        return Step(kernel, grid, (batch, *others), warps, self.kind, registers)


def make_bundle(call: Call, workspace: Workspace, *, overlap: bool) -> Bundle:
    """Bundle the tensors of a call and a workspace into kernel arguments."""
    draft = call.target_logits if call.draft_logits is None else call.draft_logits
    unused = call.parameters.ints  # placeholder for a pointer that is never dereferenced
    edits, E = (unused, unused, unused), 0
    if call.edits is not None:
        edits, E = (call.edits.first, call.edits.tokens, call.edits.values), call.edits.tokens.shape[-1]
    pointers = {
        "target": call.target_logits,
        "draft": draft,
        "drafted": call.draft_tokens,
        "entries": unused if call.draft_entries is None else call.draft_entries,
        "allowed": unused if call.allowed is None else call.allowed,
        "floats": call.parameters.floats,
        "ints": call.parameters.ints,
        "chunk_stats": workspace.chunk_stats,
        "slice_stats": workspace.slice_stats,
        "tile_stats": workspace.tile_stats,
        "row_stats": workspace.row_stats,
        "work": workspace.work,
        "part_sums": workspace.part_sums,
    }
    out = Out(workspace.tokens, workspace.accepted, workspace.faults)
    strides = Strides(*_strides(call.target_logits), *_strides(draft), *_strides(call.allowed))
    traits = _traits(call, draft, overlap)
    batch = Batch(
        **pointers,
        edits=EditLists(*edits, float(E)),
        strides=strides,
        sizes=Sizes(float(call.K), call.V, call.R),
        traits=None,
    )
    kind = kind_of(traits, (*pointers.values(), *edits, *out), (*strides, call.V, call.R))
    return Bundle(batch, out, traits_of(*traits), kind)


def _traits(call: Call, draft: Tensor, overlap: bool) -> tuple[Any, ...]:
    """Return the arguments of `traits_of`."""
    return (
        call.weighs_draft,
        call.draft_lse is None,
        call.parameters.filtered,
        call.parameters.warm,
        call.edits is not None,
        call.allowed is not None,
        call.draft_entries is not None,
        overlap,
        call.target_logits.dtype,
        draft.dtype,
        call.K,
        call.V,
    )


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Return the strides from request to request and from position to position; both are one row if ragged."""
    if tensor is None:
        return 0, 0
    return tensor.stride(0), tensor.stride(-2)
