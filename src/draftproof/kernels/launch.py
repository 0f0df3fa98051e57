"""Plan the kernel launches of a call: which kernels, in which order, with which grid and resources."""

from typing import Final

import torch
from torch import Tensor

from draftproof.kernels.call import Call
from draftproof.kernels.compile import SHORT_DRAFT, Bundle, Step, constant, make_bundle, overlaps, run_all
from draftproof.kernels.device.block import PIECE, block_close, block_sums, block_walk
from draftproof.kernels.device.coupled import coupled
from draftproof.kernels.device.nucleus_search import sift
from draftproof.kernels.device.scan_logits import scan
from draftproof.kernels.device.token import RESIDUAL_PIECE, token, token_residual
from draftproof.kernels.device.topk_topp import settle, settle_deep
from draftproof.kernels.workspace import PARTS, PER_TILE, ROUNDS, ROW_STATS, Workspace, chunks, tiles

LARGE_BATCH: Final = 32
"""Requests from which on the loads in flight saturate the memory, whatever the latency of each."""

MULTIPROCESSORS: Final = 132
"""Streaming multiprocessors of an H200. At most as many programs share the queued rows; up to that many, each program
has a multiprocessor and all its registers to itself."""

SHARED_REGISTERS: Final = 80
"""Registers per thread of `settle` when several programs share a multiprocessor, and of `block_sums` always."""

TOKEN_REGISTERS: Final = 128
"""Registers per thread of `token` when two programs share a multiprocessor."""

SUM_PROGRAMS: Final = 1024
"""Programs of `block_sums` that fit on a device, about; small batches fill it by summing nodes side by side."""

RESIDUAL_PROGRAMS: Final = 1024
LEAST_PARTS: Final = 8
"""Programs of `token_residual`, about, and parts of a row, at least: with 8 parts of 128k float32 logits a program
reads for about 4 µs."""

KERNELS: Final = (scan, settle, sift, settle_deep, token, coupled, block_walk, block_sums, block_close, token_residual)
"""All kernels that a call may launch."""

for _kernel in KERNELS:
    # In Triton 3.6 the cache key of a kernel depends on the kernels hashed before it. Hashing all of them here, in one
    # order, lets a process find on disk what another has compiled
    getattr(_kernel, "cache_key", None)


def launch(call: Call, workspace: Workspace) -> None:
    """Verify `call` into `workspace` without allocation or device sync."""
    if call.draft_lse is not None:
        _store_draft_stats(call, call.draft_lse, workspace)
    device = call.target_logits.device
    run_all(plan(call, workspace, overlap=overlaps(device)), device)


def plan(call: Call, workspace: Workspace, *, overlap: bool) -> list[Step]:
    """Return the launches of a call in order, each in the shape that `benchmarks/tune_gpu.py` found best."""
    bundle, B, K = make_bundle(call, workspace, overlap=overlap), call.B, call.K
    rows = K + 1 + (K if call.weighs_draft and call.draft_lse is None else 0)
    steps = [_scan(call, rows, bundle)]
    if call.parameters.filtered:
        limit = SHARED_REGISTERS if B * rows > MULTIPROCESSORS else None
        steps.append(bundle.step(settle, (rows, B), (), 8, limit))
        if call.parameters.nucleus:
            programs = (min(rows * B * PARTS, MULTIPROCESSORS),)
            steps += [bundle.step(sift, programs, (constant(n),), 16) for n in range(ROUNDS + 2)]
        else:
            steps.append(bundle.step(settle_deep, (min(rows * B, MULTIPROCESSORS),), (), 16))
    out = (bundle.out,)
    if call.rule == "coupled" and call.parameters.warm:
        return [*steps, bundle.step(coupled, (B,), out, 8)]
    if call.rule != "block" or not call.weighs_draft:  # without a draft distribution the two rules are the same
        warps = 8 if call.parameters.warm else 4  # greedy requests read little
        steps.append(bundle.step(token, (B,), out, warps, TOKEN_REGISTERS if B > MULTIPROCESSORS else None))
        if call.parameters.warm and K > 0:
            steps.append(bundle.step(token_residual, (_residual_parts(call), B), out, 4, TOKEN_REGISTERS))
        return steps
    return [
        *steps,
        bundle.step(block_walk, (B,), out, 4 if K < SHORT_DRAFT else 16),  # by the number of rows held side by side
        bundle.step(block_sums, (*_shares(call), B), out, 4, SHARED_REGISTERS),
        bundle.step(block_close, (B,), out, 4),
    ]


def _scan(call: Call, rows: int, bundle: Bundle) -> Step:
    """Return the launch of the scan.

    Registers are limited where more programs fit then; not with edits or a mask, which need more of them.
    """
    grid = tiles(call.V), rows, call.B
    large, narrow, warm = call.B >= LARGE_BATCH, call.target_logits.element_size() < 4, call.parameters.warm
    plain = call.edits is None and call.allowed is None
    if large and narrow:
        # two-byte logits arrive faster than few warps can add them up: one warp per program avoids barriers
        return bundle.step(scan, grid, (constant(2), constant(0)), 1)
    if call.ragged or (narrow and warm):
        return bundle.step(scan, grid, (constant(PER_TILE), constant(0)), 4, (48 if narrow else 56) if plain else None)
    # two steps need so few registers on a greedy row that all programs of a small batch are resident at once
    step = PER_TILE if warm or call.B == 1 else PER_TILE // 2
    limit = 64 if warm and large and plain else None
    return bundle.step(scan, (grid[0], call.B, rows), (constant(step), constant(1)), 4, limit)


def _shares(call: Call) -> tuple[int, int]:
    """Return how many parts rows are split into, and how many of a request's nodes are summed side by side."""
    pieces = -(-chunks(call.V) // PIECE.value)
    pieces_per_program = 1 if call.B < LARGE_BATCH else 4 // call.target_logits.element_size()
    parts = -(-pieces // pieces_per_program)
    return parts, max(1, min(call.K, SUM_PROGRAMS // (parts * call.B)))


def _residual_parts(call: Call) -> int:
    """Return how many programs share a residual of the token rule: few requests have one, so most programs end at
    once, and their number is limited."""
    pieces: int = -(-chunks(call.V) // RESIDUAL_PIECE.value)
    return max(1, min(pieces, max(RESIDUAL_PROGRAMS // call.B, LEAST_PARTS)))


def _store_draft_stats(call: Call, draft_lse: Tensor, workspace: Workspace) -> None:
    """Store the drafter's own statistics where the kernels read them (`draftproof.kernels.device.layout`)."""
    J, K = call.K + 1, call.K
    cutoff, base, mass, *_ = (
        workspace.row_stats[: call.B * (J + K) * ROW_STATS].view(call.B, J + K, ROW_STATS)[:, J:].unbind(-1)
    )
    if call.draft_cutoff is None:
        cutoff.fill_(-torch.inf)
    else:
        cutoff.copy_(call.draft_cutoff)
    base.copy_(draft_lse)
    mass.fill_(1.0)
