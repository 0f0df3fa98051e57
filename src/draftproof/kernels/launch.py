"""From a call to launches: which kernels it needs, in which order, in which shape."""

from typing import Final

import torch
from torch import Tensor

from draftproof.kernels.call import Call
from draftproof.kernels.compile import SHORT, Bundle, Step, bundled, constant, overlaps, run_all
from draftproof.kernels.device.block import PIECE, block_close, block_sums, block_walk
from draftproof.kernels.device.coupled import coupled
from draftproof.kernels.device.nucleus_search import sift
from draftproof.kernels.device.scan import scan
from draftproof.kernels.device.token import token
from draftproof.kernels.device.topk_topp import settle, settle_deep
from draftproof.kernels.workspace import NUMBERS, PARTS, PER_TILE, ROUNDS, Workspace, chunks, tiles

LARGE: Final = 32
"""Requests from which on a device has enough to read, however long each of them waits."""

PROCESSORS: Final = 132
"""Of an H200. As many programs share the rows whose cutoff lies deep; and as long as there are no more, each has one to
itself, and all its registers."""

CROWDED: Final = 80
"""Registers of a thread of `settle` where several programs share a processor. At most as many in `block_sums`."""

ROOM: Final = 128
"""The same of `token`, where two do."""

FILL: Final = 1024
"""Programs of `block_sums` that find room on a device, about: in small batches nodes are summed side by side."""

KERNELS: Final = (scan, settle, sift, settle_deep, token, coupled, block_walk, block_sums, block_close)
"""All that a call may launch."""

for _kernel in KERNELS:
    # Triton 3.6 names a compiled kernel also by those it has looked at before. All are looked at here, in one order, so
    # that what one process has compiled is found on disk by the next
    getattr(_kernel, "cache_key", None)


def launch(call: Call, workspace: Workspace) -> None:
    """Verify `call` into `workspace`. Nothing is allocated and nothing is waited for."""
    if call.draft_lse is not None:
        _hand_over(call, call.draft_lse, workspace)
    device = call.target_logits.device
    run_all(plan(call, workspace, overlap=overlaps(device)), device)


def plan(call: Call, workspace: Workspace, *, overlap: bool) -> list[Step]:
    """The launches of a call, in order, each in the shape that `benchmarks/tune_gpu.py` found best."""
    bundle, B, K = bundled(call, workspace, overlap=overlap), call.B, call.K
    rows = K + 1 + (K if call.weighs_draft and call.draft_lse is None else 0)
    steps = [_scan(call, rows, bundle)]
    if call.parameters.filtered:
        limit = CROWDED if B * rows > PROCESSORS else None
        steps.append(bundle.step(settle, (rows, B), (), 8, limit))
        if call.parameters.nucleus:
            programs = (min(rows * B * PARTS, PROCESSORS),)
            steps += [bundle.step(sift, programs, (constant(n),), 16) for n in range(ROUNDS + 2)]
        else:
            steps.append(bundle.step(settle_deep, (min(rows * B, PROCESSORS),), (), 16))
    out = (bundle.out,)
    if call.rule == "coupled" and call.parameters.warm:
        return [*steps, bundle.step(coupled, (B,), out, 8)]
    if call.rule != "block" or not call.weighs_draft:  # without a distribution of the draft the rules are one
        warps = 8 if call.parameters.warm else 4  # of greedy requests there is little to look at
        return [*steps, bundle.step(token, (B,), out, warps, ROOM if B > PROCESSORS else None)]
    return [
        *steps,
        bundle.step(block_walk, (B,), out, 4 if K < SHORT else 16),  # by the rows it looks at side by side
        bundle.step(block_sums, (*_shares(call), B), out, 4, CROWDED),
        bundle.step(block_close, (B,), out, 4),
    ]


def _scan(call: Call, rows: int, bundle: Bundle) -> Step:
    """Registers are limited where more programs find room then: not with edits or a mask, which take more of them."""
    grid = tiles(call.V), rows, call.B
    large, narrow, warm = call.B >= LARGE, call.target_logits.element_size() < 4, call.parameters.warm
    plain = call.edits is None and call.allowed is None
    if large and narrow:
        # logits of two bytes come in faster than few warps can add them up: each then works on its own, waits for none
        return bundle.step(scan, grid, (constant(2), constant(0)), 1)
    if call.ragged or (narrow and warm):
        return bundle.step(scan, grid, (constant(PER_TILE), constant(0)), 4, (48 if narrow else 56) if plain else None)
    # in two steps a greedy row takes registers so few that all programs of some requests find room at once
    step = PER_TILE if warm or call.B == 1 else PER_TILE // 2
    limit = 64 if warm and large and plain else None
    return bundle.step(scan, (grid[0], call.B, rows), (constant(step), constant(1)), 4, limit)


def _shares(call: Call) -> tuple[int, int]:
    """Into how many parts rows are split, and how many of a request's nodes are summed side by side."""
    pieces = -(-chunks(call.V) // PIECE.value)
    in_turn = 1 if call.B < LARGE else 4 // call.target_logits.element_size()  # pieces that one program reads
    parts = -(-pieces // in_turn)
    return parts, max(1, min(call.K, FILL // (parts * call.B)))


def _hand_over(call: Call, draft_lse: Tensor, workspace: Workspace) -> None:
    """Put the drafter's own numbers where the kernels look for them (`draftproof.kernels.device.layout`)."""
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
