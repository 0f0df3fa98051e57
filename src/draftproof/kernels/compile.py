"""What a call hands to its kernels: all its tensors in one bundle, and what kernels are compiled for."""

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
    """One launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int
    kind: Hashable
    """The same where Triton would compile the kernel alike, but for constants, warps and registers."""
    registers: int | None = None
    """Of a thread, at most; None leaves it to the compiler."""


def overlaps(device: torch.device) -> bool:
    """Whether a launch may start there while the one before it ends."""
    return device.type == "cuda" and _hopper(device)


@lru_cache(maxsize=64)
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def run_all(steps: Iterable[Step], device: torch.device) -> None:
    """Launch these on a device, which need not be the current one. All but the first may start while the one before
    them ends, if their kernels were planned to wait for that themselves."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        for n, step in enumerate(steps):
            run(step, overlap=n > 0 and bool(step.arguments[0].traits.OVERLAP.value))


def run(step: Step, *, overlap: bool) -> None:
    """Launch one step; `overlap`: it may start while the one before it ends."""
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
    """The kernel, compiled now or before."""
    limit = {} if step.registers is None else {"maxnreg": step.registers}
    options = {"num_warps": step.warps, "launch_pdl": overlap, **limit}
    return step.kernel.warmup(*step.arguments, grid=step.grid, **options)


def kind_of(traits: Hashable, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> Hashable:
    """What Triton looks at: of a pointer its type and whether 16 divides it, of a whole number whether it is 1, whether
    16 divides it and how long it is. The numbers themselves tell all of that, and most calls share them. `traits`: what
    the kernels' constants follow from."""
    kinds = tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)
    return traits, tensors[0].device.index, kinds, numbers


class Sizes(NamedTuple):
    """K, V as everywhere; R entries in a draft row. The others follow (`draftproof.kernels.device.rows`).

    K is a float: Triton would compile a kernel anew for a whole number that is 1, and for one that 16 divides.
    """

    K: Any
    V: Any
    R: Any


class Strides(NamedTuple):
    """In elements: from request to request, and from position to position."""

    target: Any
    target_row: Any
    draft: Any
    draft_row: Any
    allowed: Any
    allowed_row: Any


class Lists(NamedTuple):
    """The edits (`draftproof.kernels.penalties.Edits`), target side and draft side, E places each."""

    first: Any  # [B, 2, C + 1]
    tokens: Any  # [B, 2, E]
    amounts: Any  # [B, J + K, E, 4]
    E: Any  # a float, like K


class Traits(NamedTuple):
    """What is known when a kernel is compiled, each a constexpr. What is off costs nothing."""

    DRAWN: Any  # the draft has logits; otherwise its tokens were chosen
    READ_DRAFT: Any  # the draft's rows are scanned: they are there, the rule needs them, their lse was not handed over
    FILTERED: Any
    WARM: Any  # some request may have a temperature above 0
    EDITED: Any
    MASKED: Any
    MAPPED: Any  # the draft vocabulary is part of the target's
    ALIKE: Any  # target and draft logits are of one type
    OVERLAP: Any  # a kernel may start while the one before it ends (Hopper and later)
    SEGMENT: Any  # tokens in 128 bytes of target logits
    KP: Any  # a power of 2, more than K
    NP: Any  # a power of 2, at least the chunks in a row
    TP: Any  # the same of tiles
    NS: Any  # the same of slices


class Batch(NamedTuple):
    """Pointers to everything, and the three above. Layouts: `draftproof.kernels.device.layout`."""

    target: Any
    draft: Any
    drafted: Any  # [B, K]
    entries: Any  # [V], the draft vocabulary's entry of each token
    allowed: Any  # packed bits, 32 a word
    floats: Any
    ints: Any
    edits: Any
    stats: Any  # [B · (J + K), 2, C]: of each chunk the largest logit and the mass relative to it
    slices: Any  # the same of each slice
    tiles: Any  # and of each tile
    numbers: Any  # [B · (J + K), NUMBERS]
    work: Any  # where `settle` writes down slices and logits
    parts: Any  # [B · (J + K), MEASURED]
    strides: Any
    sizes: Any
    traits: Any


class Out(NamedTuple):
    tokens: Any  # [B, J]
    accepted: Any  # [B]
    faults: Any  # [B]


SHORT: Final = 8
"""Drafts below this length, and all others: two ways to compile what looks at a request's rows side by side."""

VOCABULARIES: Final = (8, 64, 256, 512)
"""Chunks in a row, at most: as many ways to compile what looks at them side by side."""

LINE_OF_MEMORY: Final = 128
"""Bytes."""

_REQUEST: Final = ("DRAWN", "READ_DRAFT", "MAPPED", "KP")
UNSEEN: Final = {
    "scan": (*_REQUEST, "NP", "TP", "NS"),
    "settle": (*_REQUEST, "FILTERED", "WARM"),
    "settle_deep": (*_REQUEST, "FILTERED", "WARM"),
    "sift": (*_REQUEST, "FILTERED", "WARM"),
    "token": ("NS",),
    "coupled": ("DRAWN", "READ_DRAFT", "MAPPED", "WARM", "NS"),
    "block_walk": ("WARM", "NS"),
    "block_sums": ("WARM", "NS"),
    "block_close": ("WARM", "NS"),
}
"""Traits that a kernel does not look at, and is not compiled anew for: they are 0 for it."""


@lru_cache(maxsize=64)
def constant(value: int) -> tl.constexpr:
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
    """By kernel. Remembered: the host spends longer on them than the device on a small batch."""
    slice_size = CHUNK // PER_CHUNK
    most = next(size for size in VOCABULARIES if size * CHUNK >= V)
    as_slices = edited or masked  # edits are put in slice by slice
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
        SEGMENT=slice_size if as_slices else LINE_OF_MEMORY // dtype.itemsize,
        KP=SHORT if K < SHORT else 2 * MOST_DRAFTED,
        NP=most,
        TP=max(most // PER_TILE, 1),
        NS=most * PER_CHUNK,
    )
    traits = Traits(*(constant(int(value)) for value in values))
    return {kernel: traits._replace(**dict.fromkeys(unseen, constant(0))) for kernel, unseen in UNSEEN.items()}


class Bundle(NamedTuple):
    """The batch, but for its traits, which each kernel has of its own; where results go."""

    batch: Batch
    out: Out
    traits: dict[str, Traits]
    kind: Hashable

    def step(
        self, kernel: Any, grid: tuple[int, ...], others: tuple[Any, ...], warps: int, registers: int | None = None
    ) -> Step:
        batch = self.batch._replace(traits=self.traits[kernel.__name__])
        return Step(kernel, grid, (batch, *others), warps, self.kind, registers)


def bundled(call: Call, workspace: Workspace, *, overlap: bool) -> Bundle:
    draft = call.target_logits if call.draft_logits is None else call.draft_logits
    nothing = call.parameters.ints  # stands for a pointer that is never followed
    edits, E = (nothing, nothing, nothing), 0
    if call.edits is not None:
        edits, E = (call.edits.first, call.edits.tokens, call.edits.values), call.edits.tokens.shape[-1]
    pointers = {
        "target": call.target_logits,
        "draft": draft,
        "drafted": call.draft_tokens,
        "entries": nothing if call.draft_entries is None else call.draft_entries,
        "allowed": nothing if call.allowed is None else call.allowed,
        "floats": call.parameters.floats,
        "ints": call.parameters.ints,
        "stats": workspace.stats,
        "slices": workspace.slices,
        "tiles": workspace.tiles,
        "numbers": workspace.numbers,
        "work": workspace.work,
        "parts": workspace.parts,
    }
    out = Out(workspace.tokens, workspace.accepted, workspace.faults)
    strides = Strides(*_strides(call.target_logits), *_strides(draft), *_strides(call.allowed))
    traits = _traits(call, draft, overlap)
    batch = Batch(
        **pointers,
        edits=Lists(*edits, float(E)),
        strides=strides,
        sizes=Sizes(float(call.K), call.V, call.R),
        traits=None,
    )
    kind = kind_of(traits, (*pointers.values(), *edits, *out), (*strides, call.V, call.R))
    return Bundle(batch, out, traits_of(*traits), kind)


def _traits(call: Call, draft: Tensor, overlap: bool) -> tuple[Any, ...]:
    """Arguments of `traits_of`."""
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
    """From request to request and from position to position; in ragged logits both are one row."""
    if tensor is None:
        return 0, 0
    return tensor.stride(0), tensor.stride(-2)
