"""Register the launch as a custom operator for torch.compile: plain arguments, and the buffers it mutates."""

import torch
from torch import Tensor

from draftproof.kernels.call import Call
from draftproof.kernels.launch import launch
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.penalties import Edits
from draftproof.kernels.workspace import Workspace


def launch_op(call: Call, workspace: Workspace) -> None:
    """Launch a call through the custom operator."""
    edits = call.edits
    _verify(
        [call.target_logits, call.draft_tokens, call.parameters.floats, call.parameters.ints],
        [call.draft_logits, call.allowed, call.draft_entries, call.draft_lse, call.draft_cutoff],
        [] if edits is None else [edits.tokens, edits.values, edits.first],
        call.rule,
        call.parameters.filtered,
        call.parameters.warm,
        call.parameters.nucleus,
        workspace.tokens,
        workspace.accepted,
        workspace.faults,
        workspace.chunk_stats,
        workspace.slice_stats,
        workspace.row_stats,
        workspace.work,
        workspace.tile_stats,
        workspace.part_sums,
    )


@torch.library.custom_op(
    "draftproof::verify_rows",
    mutates_args=(
        "tokens",
        "accepted",
        "faults",
        "chunk_stats",
        "slice_stats",
        "row_stats",
        "work",
        "tile_stats",
        "part_sums",
    ),
)
def _verify(
    required: list[Tensor],
    optional: list[Tensor | None],
    edits: list[Tensor],
    rule: str,
    filtered: bool,
    warm: bool,
    nucleus: bool,
    tokens: Tensor,
    accepted: Tensor,
    faults: Tensor,
    chunk_stats: Tensor,
    slice_stats: Tensor,
    row_stats: Tensor,
    work: Tensor,
    tile_stats: Tensor,
    part_sums: Tensor,
) -> None:
    """Rebuild the call from plain arguments and launch it."""
    target, drafted, floats, ints = required
    draft, allowed, entries, lse, cutoff = optional
    parameters = Parameters(floats, ints, filtered, warm, nucleus)
    edit_lists = Edits(*edits) if edits else None
    call = Call(target, drafted, draft, parameters, rule, edit_lists, allowed, entries, lse, cutoff)
    launch(call, Workspace(tokens, accepted, faults, chunk_stats, slice_stats, row_stats, work, tile_stats, part_sums))


@_verify.register_fake
def _(required, optional, edits, rule, filtered, warm, nucleus, *memory) -> None:  # type: ignore[no-untyped-def]
    """Return nothing: the operator only mutates buffers of the caller."""
