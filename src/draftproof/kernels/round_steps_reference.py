"""What lies between the passes of a round that stays on a device, in plain torch: what the kernels compute.

The functions are those of `draftproof.kernels.round_steps`, which documents them.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from draftproof.core.types import PAD, Draft
from draftproof.kernels import Rows
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.round_steps import Concluded, Described, Layout, Reads, Scoring, Steps
from draftproof.kernels.round_table import BEHIND, DRAFT, END, LAST, LENGTH, LIMIT, MOST, PREVIOUS, TARGET

if TYPE_CHECKING:
    from draftproof.kernels.draw_rows import Drawn


def lay_out(places: Int[Tensor, "3 B"], T: int, *, scratch: int, last_position: int) -> Layout:
    """Return where the tokens of rows of width T are."""
    t = torch.arange(T, device=places.device)
    starts, lengths, widths = places[:, :, None]
    slots = torch.where(t < widths, starts + lengths + t, scratch).flatten()
    ends = torch.arange(places.shape[1], device=places.device) * T + (places[2] - 1).clamp_min(0)
    return Layout((lengths + t).clamp(max=last_position), slots, ends)


def begin_draft(
    table: Int[Tensor, "9 B"], K: int, *, vocab_size: int, behind_text: int, ready: Bool[Tensor, " B"] | None = None
) -> Steps:
    """Return what a drafter needs to draft up to K tokens for each row of the table."""
    length, alive = table[LENGTH], table[LENGTH] < table[END]
    most = torch.minimum(table[LIMIT], table[MOST] - length).clamp(0, K)
    most = torch.where(alive if ready is None else alive & ready, most, 0)
    behind = torch.where(alive, table[BEHIND], 0)
    first = torch.where(behind == 2, table[PREVIOUS], table[LAST])
    tokens = torch.stack([first, table[LAST]], 1)
    j = torch.arange(K, device=table.device)[:, None]
    before = torch.where(j == 0, length - behind, length - behind_text + j)
    places = torch.stack([table[DRAFT].expand(K, -1), before, torch.where(j == 0, behind, (most > j).long())], 1)
    return Steps(most, tokens.masked_fill(tokens >= vocab_size, 0), places)


def describe_draws(drawn: "Drawn", greedy: Bool[Tensor, " B"] | None, ids: Int[Tensor, " R"] | None) -> Described:
    """Return what the kernels drew as a distribution's numbers."""
    tokens, cutoff = drawn.tokens.clamp_min(0), drawn.cutoff.to(torch.float32)
    tokens = tokens if ids is None else ids[tokens]
    point = torch.full_like(tokens, PAD)
    if greedy is not None:
        point, cutoff = torch.where(greedy, tokens, point), cutoff.masked_fill(greedy, -torch.inf)
    return Described(tokens, cutoff, drawn.base + drawn.mass.log(), point)


def begin_scoring(table: Int[Tensor, "9 B"], draft: Draft, vocab_size: int, parameters: Parameters) -> Scoring:
    """Return the target's pass over drafts; write the positions and lengths of the verification's parameters."""
    length, alive = table[LENGTH], table[LENGTH] < table[END]
    tokens = torch.cat([table[LAST][:, None], draft.tokens.clamp(0, vocab_size - 1)], 1)
    parameters["positions"].copy_(length)
    parameters["lengths"].copy_(draft.lengths)
    return Scoring(tokens, torch.stack([table[TARGET], length - 1, torch.where(alive, draft.lengths + 1, 0)]))


def conclude(table: Int[Tensor, "9 B"], verdict: Rows, lengths: Int[Tensor, " B"], reads: Reads) -> Concluded:
    """Write where the next round starts to the table, and return what the host is to know."""
    alive = table[LENGTH] < table[END]
    fault = alive & (verdict.faults != 0)
    count = torch.where(alive & ~fault, verdict.accepted + 1, 0)
    behind = table[BEHIND].clone()
    if reads == "later":
        behind += count
    elif reads == "when it drafts":
        whole = (lengths > 0) & (verdict.accepted == lengths)
        behind = torch.where(count > 0, 1 + whole.long(), behind)
    emitted = torch.cat([verdict.tokens, torch.stack([count, lengths, behind, fault.long()], 1)], 1)
    ends = torch.cat([table[PREVIOUS][:, None], table[LAST][:, None], verdict.tokens], 1)
    table[PREVIOUS].copy_(ends.gather(1, count[:, None])[:, 0])
    table[LAST].copy_(ends.gather(1, count[:, None] + 1)[:, 0])
    table[BEHIND].copy_(behind)
    table[LENGTH].add_(count)
    table[END].masked_fill_(fault, 0)
    return Concluded(emitted, count)
