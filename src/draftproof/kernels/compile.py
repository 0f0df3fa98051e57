"""What a call hands to its kernels: all its tensors in one bundle, and what kernels are compiled for."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from draftproof.kernels.batch import Batch, Lists, Out, Sizes, Strides, Traits
from draftproof.kernels.call import Call
from draftproof.kernels.steps import Step, kind_of
from draftproof.kernels.traits import traits_of
from draftproof.kernels.workspace import Workspace


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
