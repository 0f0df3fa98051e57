"""Draw a drafter's tokens on the device: one token per row, and the statistics of its distribution."""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from draftproof.kernels.call import Call
from draftproof.kernels.compile import Step, overlaps, run_all
from draftproof.kernels.device.distribution import dist_at, dists_of, target_probs
from draftproof.kernels.device.draw import chunk_masses, invert, slice_of, token_of, tokens_of
from draftproof.kernels.device.layout import BAD_TARGET, SLICE
from draftproof.kernels.device.load_stats import load_target_stats, pick, saved_target_stats
from draftproof.kernels.device.philox import DRAFT, pair
from draftproof.kernels.device.rows import request
from draftproof.kernels.device.verdict import drafted_tokens, write_verdict
from draftproof.kernels.launch import plan
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import ROW_STATS, Workspace


class Drawn(NamedTuple):
    """Tokens drawn from a batch of rows, with the statistics of their distributions.

    tokens      entries of the drawn tokens, int64 [B]; PAD if a row is not a distribution
    cutoff      float64 [B]; for a greedy row its argmax token
    base, mass  float64 [B]: the log-sum-exp is base + log(mass); NaN if a row is not a distribution
    """

    tokens: Tensor
    cutoff: Tensor
    base: Tensor
    mass: Tensor


def draw_rows(logits: Tensor, parameters: Parameters, j: int, *, shared: bool, workspace: Workspace) -> Drawn:
    """Draw the j-th token of a draft from raw logits [B, R] without edits.

    Reference: core.sampling.warp and core.distribution.propose. `parameters`: how each row is drawn, in the target's
    columns; `shared`: with the target's own random numbers, at a position that the caller has advanced by j. The
    results are views of the workspace.
    """
    B = len(logits)
    no_tokens = torch.empty((B, 0), dtype=torch.int64, device=logits.device)
    call = Call(logits[:, None], no_tokens, None, parameters, "coupled" if shared else "token")
    call.check()
    workspace.check(B, 0, call.V, filtered=parameters.filtered)
    run_all(plan_draw(call, workspace, j, overlap=overlaps(logits.device)), logits.device)
    cutoff, base, mass, *_ = workspace.row_stats[: B * ROW_STATS].view(B, ROW_STATS).unbind(-1)
    return Drawn(workspace.tokens[:B], cutoff, base, mass)


def plan_draw(call: Call, workspace: Workspace, j: int, *, overlap: bool) -> list[Step]:
    """Return the launches of a draw: those of a verdict on an empty draft, with the drafter's random numbers."""
    *steps, last = plan(call, workspace, overlap=overlap)
    if call.rule == "coupled":
        return [*steps, last]
    return [*steps, Step(draw, last.grid, (*last.arguments, j), 4, last.kind)]


@triton.jit(do_not_specialize=["j"])
@no_type_check
def draw(batch, out, j):
    """Draw one token with the drafter's own random numbers. Reference: Distribution.draw. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    first, second = pair(req.seed, req.start, DRAFT, tl.arange(0, 1), j)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    stats = saved_target_stats(batch, req, load_target_stats(batch, req))
    mass = pick(stats.mass, 0)
    valid = mass == mass
    token = pick(stats.cutoff, 0).to(tl.int32)
    if (req.temperature > 0) & valid:
        dist = dist_at(dists_of(stats, req.temperature), 0, req.temperature)
        chunk = invert(chunk_masses(batch, req, 0, dist), first)
        where, rest = slice_of(batch, req, 0, dist, chunk, second)
        x, _ = token_of(where * SLICE, target_probs(batch, req, 0, dist, tokens_of(where)), rest)
        token = tl.sum(x, 0)
    fault = tl.where(valid, 0, BAD_TARGET)
    no_tokens = drafted_tokens(batch, req)
    write_verdict(batch, out, req, no_tokens, tl.zeros((), tl.int32), tl.where(valid, token, -1), fault)
