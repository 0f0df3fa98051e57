"""Draw a drafter's tokens on the device: one token a row, and the statistics of the distribution it was drawn from."""

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
from draftproof.kernels.device.philox import DRAFT, pair
from draftproof.kernels.device.rows import request
from draftproof.kernels.device.stats import pick, target_known, target_settled
from draftproof.kernels.device.verdict import drafted_tokens, write
from draftproof.kernels.launch import plan
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import NUMBERS, Workspace


class Drawn(NamedTuple):
    """tokens  entries of the drawn tokens, int64 [B]; PAD where a row is no distribution
    cutoff  float64 [B]; of a greedy row, the token it stands for
    base, mass  float64 [B]: the log-sum-exp is base + log(mass); NaN where a row is no distribution
    """

    tokens: Tensor
    cutoff: Tensor
    base: Tensor
    mass: Tensor


def draw_rows(logits: Tensor, parameters: Parameters, j: int, *, shared: bool, workspace: Workspace) -> Drawn:
    """Twin: `warp` and `race.propose`: the j-th token of a draft, from raw logits [B, R] without edits.

    `parameters`: how each row is drawn, under the target's names; `shared`: with the target's own noise, whose position
    the caller has moved on by j. The results are views of the workspace.
    """
    B = len(logits)
    none = torch.empty((B, 0), dtype=torch.int64, device=logits.device)
    call = Call(logits[:, None], none, None, parameters, "coupled" if shared else "token")
    call.check()
    workspace.check(B, 0, call.V, filtered=parameters.filtered)
    run_all(plan_draw(call, workspace, j, overlap=overlaps(logits.device)), logits.device)
    cutoff, base, mass, *_ = workspace.numbers[: B * NUMBERS].view(B, NUMBERS).unbind(-1)
    return Drawn(workspace.tokens[:B], cutoff, base, mass)


def plan_draw(call: Call, workspace: Workspace, j: int, *, overlap: bool) -> list[Step]:
    """The launches of a draw: those of a verdict on an empty draft, which is a race or a draw with other noise."""
    *steps, last = plan(call, workspace, overlap=overlap)
    if call.rule == "coupled":
        return [*steps, last]
    return [*steps, Step(draw, last.grid, (*last.arguments, j), 4, last.kind)]


@triton.jit(do_not_specialize=["j"])
@no_type_check
def draw(batch, out, j):
    """Twin: `Distribution.draw` with the drafter's own noise. Grid: (B,)."""
    req = request(batch, tl.program_id(0).to(tl.int64))
    first, second = pair(req.seed, req.start, DRAFT, tl.arange(0, 1), j)
    if batch.traits.OVERLAP:
        cuda.gdc_wait()
    settled = target_settled(batch, req, target_known(batch, req))
    mass = pick(settled.mass, 0)
    sound = mass == mass
    token = pick(settled.cutoff, 0).to(tl.int32)
    if (req.temperature > 0) & sound:
        dist = dist_at(dists_of(settled, req.temperature), 0, req.temperature)
        chunk = invert(chunk_masses(batch, req, 0, dist), first)
        where, rest = slice_of(batch, req, 0, dist, chunk, second)
        x, _ = token_of(where * SLICE, target_probs(batch, req, 0, dist, tokens_of(where)), rest)
        token = tl.sum(x, 0)
    fault = tl.where(sound, 0, BAD_TARGET)
    none = drafted_tokens(batch, req)
    write(batch, out, req, none, tl.zeros((), tl.int32), tl.where(sound, token, -1), fault)
