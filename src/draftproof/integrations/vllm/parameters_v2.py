"""Turn the arrays of vLLM's model runner V2 into the parameters and drafts of `verify_rows`, in one kernel launch.

As single torch operations this took most of the time of a call with few requests, all of it on the host.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.kernels.device.layout import (
    DRAFT_ROW,
    DRAFT_SIDE,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    LENGTH,
    MIN_P,
    SEED,
    START,
    TARGET_ROW,
    TEMPERATURE,
)
from draftproof.kernels.parameters import FLOATS, INTS, Parameters

COLUMNS = tl.constexpr(8)
"""A power of 2, at least the columns of either parameter tensor."""


def arranged(
    draft_sampled: Int[Tensor, " N"],
    cu_num_logits: Int[Tensor, " B1"],
    pos: Int[Tensor, " N"],
    idx_mapping: Int[Tensor, " B"],
    temperature: Float[Tensor, " S"],
    seed: Int[Tensor, " S"],
    *,
    K: int,
    rows_per_state: int,
) -> tuple[Parameters, Int[Tensor, "B K"]]:
    """Return the parameters of each request and its draft tokens, -1 after the end of its draft.

    `rows_per_state`: draft rows that belong to a state. The arrays are contiguous and on the current device, as vLLM's
    own kernels expect them.
    """
    B, device = len(idx_mapping), idx_mapping.device
    parameters = Parameters(
        torch.empty((B, len(FLOATS)), dtype=torch.float64, device=device),
        torch.empty((B, len(INTS)), dtype=torch.int64, device=device),
        filtered=False,
        nucleus=False,
    )
    drafts = torch.empty((B, K), dtype=torch.int64, device=device)
    if B:
        sources = (draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed)
        results = (parameters.floats, parameters.ints, drafts)
        arrange[(B,)](*sources, *results, rows_per_state, K, triton.next_power_of_2(max(K, 1)), num_warps=1)
    return parameters, drafts


@triton.jit(do_not_specialize=["rows_per_state"])
@no_type_check
def arrange(
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    temperature,
    seed,
    floats,
    ints,
    drafts,
    rows_per_state,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """Write one request. Grid: (B,). KP: a power of 2, at least K."""
    b = tl.program_id(0).to(tl.int64)
    first, end = tl.load(cu_num_logits + b).to(tl.int64), tl.load(cu_num_logits + b + 1).to(tl.int64)
    state = tl.load(idx_mapping + b).to(tl.int64)
    k = tl.arange(0, KP)
    inside = (k < K) & (first + 1 + k < end)
    token = tl.load(draft_sampled + first + 1 + k, mask=inside, other=-1).to(tl.int64)
    tl.store(drafts + b * K + k, token, mask=k < K)
    length = tl.min(tl.where(token < 0, k, K), 0)  # a negative token ends the draft

    column = tl.arange(0, COLUMNS)
    T = tl.load(temperature + state).to(tl.float64)
    plain = tl.where((column == MIN_P) | (column == DRAFT_SIDE + MIN_P), 0.0, 1.0).to(tl.float64)
    # the target's logits were divided by the temperature, the draft's were not
    values = tl.where(column == TEMPERATURE, (T > 0).to(tl.float64), plain)
    values = tl.where(column == DRAFT_SIDE + TEMPERATURE, T, values)
    tl.store(floats + b * FLOAT_COLUMNS + column, values, mask=column < FLOAT_COLUMNS)

    numbers = tl.where(column == SEED, tl.load(seed + state).to(tl.int64), tl.zeros((COLUMNS,), tl.int64))
    numbers = tl.where(column == START, tl.load(pos + first).to(tl.int64) + 1, numbers)
    numbers = tl.where(column == LENGTH, length.to(tl.int64), numbers)
    numbers = tl.where(column == TARGET_ROW, first, numbers)
    numbers = tl.where(column == DRAFT_ROW, state * rows_per_state, numbers)
    tl.store(ints + b * INT_COLUMNS + column, numbers, mask=column < INT_COLUMNS)
