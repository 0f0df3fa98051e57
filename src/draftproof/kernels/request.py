"""A request's parameters on the device, loaded in one go: loads that wait for each other cost more than the work."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from draftproof.kernels.layout import (
    CHUNK,
    DRAFT_ROW,
    DRAFT_SIDE,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    LENGTH,
    PER_TILE,
    SEED,
    START,
    TARGET_ROW,
    TEMPERATURE,
)


class Request(NamedTuple):
    """Index in the batch, then what `Parameters` says of it. A temperature of 0 is greedy. Then the sizes all share.

    J = K + 1 target rows; C chunks and T tiles in a row.
    """

    b: Any
    seed: Any
    start: Any
    length: Any
    target_row: Any
    draft_row: Any
    temperature: Any
    draft_temperature: Any
    J: Any
    K: Any
    C: Any
    T: Any


@triton.jit
@no_type_check
def request(batch, b):
    K = whole(batch.sizes.K)
    C = chunks_of(batch)
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
        J=K + 1,
        K=K,
        C=C,
        T=tl.cdiv(C, PER_TILE),
    )


@triton.jit
@no_type_check
def whole(size):
    """A size that is passed as a float (`draftproof.kernels.batch`)."""
    return tl.full((), size, tl.int32)


@triton.jit
@no_type_check
def chunks_of(batch):
    return tl.cdiv(batch.sizes.V, CHUNK)


@triton.jit
@no_type_check
def law_row(req, row):
    """The index of a law row: where what is remembered of it stands."""
    return req.b * (req.J + req.K) + row


@triton.jit
@no_type_check
def wanted(req, row):
    """Whether the verdict may depend on the logits of a law row, or of each of several, as far as their law is needed.

    A greedy target keeps what equals its argmax, whatever the drafter's law; a greedy drafter's law is a point mass
    on what it drafted. Neither needs the draft's rows.
    """
    warm = (req.temperature > 0) & (req.draft_temperature > 0)
    return ((row < req.J) & (row <= req.length)) | ((row >= req.J) & (row < tl.where(warm, req.J + req.length, req.J)))


@triton.jit
@no_type_check
def warm(temperature):
    """A temperature that can be divided by: greedy rows are never weighed, and to divide by 0 takes twice as long."""
    return tl.where(temperature > 0, temperature, 1.0)
