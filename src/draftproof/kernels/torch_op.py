"""The launch as one operator that torch.compile takes as it is: a name, plain arguments, and what it writes to."""

import torch
from torch import Tensor

from draftproof.kernels.call import Call
from draftproof.kernels.launch import launch
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.penalties import Edits
from draftproof.kernels.workspace import Workspace


def launch_op(call: Call, workspace: Workspace) -> None:
    """`launch` through the operator."""
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
        workspace.stats,
        workspace.slices,
        workspace.numbers,
        workspace.work,
        workspace.tiles,
        workspace.parts,
    )


@torch.library.custom_op(
    "draftproof::verify_rows",
    mutates_args=("tokens", "accepted", "faults", "stats", "slices", "numbers", "work", "tiles", "parts"),
)
def _verify(
    given: list[Tensor],
    optional: list[Tensor | None],
    edits: list[Tensor],
    rule: str,
    filtered: bool,
    warm: bool,
    nucleus: bool,
    tokens: Tensor,
    accepted: Tensor,
    faults: Tensor,
    stats: Tensor,
    slices: Tensor,
    numbers: Tensor,
    work: Tensor,
    tiles: Tensor,
    parts: Tensor,
) -> None:
    target, drafted, floats, ints = given
    draft, allowed, entries, lse, cutoff = optional
    parameters = Parameters(floats, ints, filtered, warm, nucleus)
    some = Edits(*edits) if edits else None
    call = Call(target, drafted, draft, parameters, rule, some, allowed, entries, lse, cutoff)
    launch(call, Workspace(tokens, accepted, faults, stats, slices, numbers, work, tiles, parts))


@_verify.register_fake
def _(given, optional, edits, rule, filtered, warm, nucleus, *memory) -> None:  # type: ignore[no-untyped-def]
    """It returns nothing: what it writes is the caller's own memory."""
