"""A request's parameters on the device, loaded in one go: loads that wait for each other cost more than the work."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.layout import (
    DRAFT_ROW,
    DRAFT_SIDE,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    LENGTH,
    SEED,
    START,
    TARGET_ROW,
    TEMPERATURE,
)


class Request(NamedTuple):
    """Index in the batch, then what `Parameters` says of it. A temperature of 0 is greedy."""

    b: Any
    seed: Any
    start: Any
    length: Any
    target_row: Any
    draft_row: Any
    temperature: Any
    draft_temperature: Any


@triton.jit
@no_type_check
def request(batch, b):
    ints = batch.ints + b * INT_COLUMNS
    floats = batch.floats + b * FLOAT_COLUMNS
    return Request(
        b=b,
        seed=tl.load(ints + SEED),
        start=tl.load(ints + START),
        length=tl.load(ints + LENGTH).to(tl.int32),
        target_row=tl.load(ints + TARGET_ROW),
        draft_row=tl.load(ints + DRAFT_ROW),
        temperature=tl.load(floats + TEMPERATURE),
        draft_temperature=tl.load(floats + DRAFT_SIDE + TEMPERATURE),
    )


@triton.jit
@no_type_check
def law_row(batch, req, row):
    """The index of a law row: where what is remembered of it stands."""
    return req.b * (batch.sizes.J + batch.sizes.K) + row


@triton.jit
@no_type_check
def wanted(batch, req, row):
    """Whether the verdict may depend on the logits of a law row, or of each of several.

    A greedy target keeps what equals its argmax, whatever the drafter's law; a greedy drafter's law is a point mass
    on what it drafted. Neither needs the draft's rows.
    """
    J = batch.sizes.J
    needed = (row < J) & (row <= req.length)
    if batch.traits.READ_DRAFT:
        warm = (req.temperature > 0) & (req.draft_temperature > 0)
        needed = needed | ((row >= J) & (row < tl.where(warm, J + req.length, J)))
    return needed
