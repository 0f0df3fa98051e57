"""Run what is between the products of a layer in compiled calls, on a CPU, in float32: attention, norm, rotation, gate.

A call of torch's attention for every row and layer takes longer to begin than to compute, and a norm is six calls. Here
one call serves all rows of a layer. Every number is computed in one order that depends on its own row alone. Needs
numba (`draftproof[cpu]`); without it torch is called (packed.py, layer_steps.py).
"""

import math
from typing import Any, Final

import numba
from numba import types

from draftproof.core import simd
from draftproof.core.simd import (
    REASSOCIATED,
    address_of,
    compiled,
    exponential,
    floats,
    longs,
    thread_number,
    threads_running,
)
from draftproof.models.compiled import attention, attention_few, exponentials
from draftproof.models.compiled.attention import attend_span, vectors_of
from draftproof.models.compiled.attention_few import NEVER, score, softmax, weighted_sum

FIELDS: Final = 6
"""Numbers of a piece of few queries: first token, tokens, first slot, slots, the address of a bias or 0, and the window
or 0. Without a bias, each token attends to the slots up to its own: the last token's is the last slot."""

MANY_FIELDS: Final = 6
"""Numbers of a piece of many queries: first token, tokens, the slot of the row's position 0, tokens before, the window
or 0, and how many vectors the pieces before it have."""


(PIECES, TABLE, QUERIES, QUERY_HEAD, QUERY_TOKEN, KEYS, KEY_HEAD, KEY_SLOT, VALUES, VALUE_HEAD, VALUE_SLOT, OUT, HEADS,
 SHARED, KEY_SIZE, VALUE_SIZE, SCALE, SCRATCH, SCRATCH_BYTES, VECTORS) = range(20)  # fmt: skip
"""Numbers of a call that attends, in order: sizes, addresses, and strides in numbers. Those of other calls follow."""

NORM_ROWS, NORM_X, NORM_STEP, NORM_WEIGHT, NORM_OUT, NORM_SIZE, NORM_EPS, NORM_OFFSET = range(8)
GATE_ROWS, GATE_BOTH, GATE_STEP, GATE_OUT, GATE_SIZE, GATE_TANH = range(6)
(ROTATE_TOKENS, ROTATE_QKV, ROTATE_STEP, ROTATE_COS, ROTATE_SIN, ROTATE_SLOTS, ROTATE_KEYS, ROTATE_KEY_SLOT,
 ROTATE_VALUES, ROTATE_VALUE_SLOT, ROTATE_OUT, ROTATE_HEADS, ROTATE_SHARED, ROTATE_SIZE, ROTATE_ROTARY, ROTATE_Q_WEIGHT,
 ROTATE_K_WEIGHT, ROTATE_EPS, ROTATE_OFFSET) = range(19)  # fmt: skip


@compiled(fastmath={"contract"})
def attend_share(this: Any, thread: Any, threads: Any) -> None:
    """Attend with a thread's share of the heads of every piece; `this` are the call's numbers."""
    heads, size, scale = this[HEADS], this[KEY_SIZE], floats(this[SCALE])[0]
    room = this[SCRATCH] + thread * this[SCRATCH_BYTES]
    scores = floats(room)
    for item in range(this[PIECES] * heads * thread // threads, this[PIECES] * heads * (thread + 1) // threads):
        piece, head = longs(this[TABLE] + item // heads * FIELDS * 8), item % heads
        shared = head // (heads // this[SHARED])
        k = this[KEYS] + (shared * this[KEY_HEAD] + piece[2] * this[KEY_SLOT]) * 4
        v = this[VALUES] + (shared * this[VALUE_HEAD] + piece[2] * this[VALUE_SLOT]) * 4
        for token in range(piece[1]):
            first, last = types.int64(0), piece[3]
            if piece[4] == 0:
                last += token + 1 - piece[1]
                first = max(first, last - piece[5]) if piece[5] > 0 else first
            count = last - first
            query = this[QUERIES] + (head * this[QUERY_HEAD] + (piece[0] + token) * this[QUERY_TOKEN]) * 4
            score(query, k + first * this[KEY_SLOT] * 4, this[KEY_SLOT] * 4, count, size, room)
            if piece[4] != 0:  # zeros and minus infinity: which slots the token attends to
                bias = floats(piece[4] + token * piece[3] * 4)
                for i in range(count):
                    scores[i] = max(scores[i] + bias[i], NEVER)
            factor, place = softmax(room, count, scale), ((piece[0] + token) * heads + head) * this[VALUE_SIZE] * 4
            start = v + first * this[VALUE_SLOT] * 4
            weighted_sum(room, start, this[VALUE_SLOT] * 4, count, factor, this[VALUE_SIZE], this[OUT] + place)


@compiled()
def attend_many_share(this: Any, thread: Any, threads: Any) -> None:
    """Attend with a thread's share of the vectors of pieces of many queries; `this` are the call's numbers."""
    heads, shared, scale = this[HEADS], this[SHARED], floats(this[SCALE])[0]
    group, room = heads // shared, this[SCRATCH] + thread * this[SCRATCH_BYTES]
    first, last = this[VECTORS] * thread // threads, this[VECTORS] * (thread + 1) // threads
    for p in range(this[PIECES]):
        piece = longs(this[TABLE] + p * MANY_FIELDS * 8)
        begin = max(first - piece[5], types.int64(0))
        end = min(last - piece[5], shared * vectors_of(group * piece[1]))
        attend_span(
            begin, end, room, this[QUERIES] + piece[0] * this[QUERY_TOKEN] * 4, this[QUERY_TOKEN] * 4,
            this[QUERY_HEAD] * 4, scale, this[KEYS] + piece[2] * this[KEY_SLOT] * 4, this[KEY_HEAD] * 4,
            this[KEY_SLOT] * 4, this[VALUES] + piece[2] * this[VALUE_SLOT] * 4, this[VALUE_HEAD] * 4,
            this[VALUE_SLOT] * 4, this[OUT] + piece[0] * heads * this[VALUE_SIZE] * 4, heads * this[VALUE_SIZE] * 4,
            this[VALUE_SIZE] * 4, group, piece[1], piece[3], piece[4], this[KEY_SIZE], this[VALUE_SIZE],
        )  # fmt: skip


@compiled(fastmath=REASSOCIATED)
def inverse_root(x: Any, size: Any, eps: Any) -> Any:
    """Return the inverse of the root of the mean square of some numbers."""
    total = numba.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    return numba.float32(1) / math.sqrt(total / numba.float32(size) + eps)


@compiled(fastmath={"contract"})
def norm_share(this: Any, thread: Any, threads: Any) -> None:
    """Write a thread's share of rows, normalised; `this` are numbers by NORM."""
    size, weight, eps, offset = this[NORM_SIZE], floats(this[NORM_WEIGHT]), floats(this[NORM_EPS]), this[NORM_OFFSET]
    for row in range(this[NORM_ROWS] * thread // threads, this[NORM_ROWS] * (thread + 1) // threads):
        x, out = floats(this[NORM_X] + row * this[NORM_STEP] * 4), floats(this[NORM_OUT] + row * size * 4)
        factor = inverse_root(x, size, eps[0])
        if offset:
            for i in range(size):
                out[i] = x[i] * factor * (numba.float32(1) + weight[i])
        else:
            for i in range(size):
                out[i] = x[i] * factor * weight[i]


@compiled(fastmath={"contract", "nsz"})
def gate_share(this: Any, thread: Any, threads: Any) -> None:
    """Write a thread's share of rows: the activation of their first half times their second; numbers by GATE."""
    size, one = this[GATE_SIZE], numba.float32(1)
    for row in range(this[GATE_ROWS] * thread // threads, this[GATE_ROWS] * (thread + 1) // threads):
        gate = floats(this[GATE_BOTH] + row * this[GATE_STEP] * 4)
        up, out = floats(this[GATE_BOTH] + (row * this[GATE_STEP] + size) * 4), floats(this[GATE_OUT] + row * size * 4)
        if this[GATE_TANH]:  # (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
            for i in range(size):
                cubic = gate[i] + numba.float32(0.044715) * gate[i] * gate[i] * gate[i]
                out[i] = gate[i] * up[i] / (one + exponential(numba.float32(-1.5957691216057308) * cubic))
        else:
            for i in range(size):
                out[i] = gate[i] * up[i] / (one + exponential(-gate[i]))


@compiled(fastmath={"contract"})
def normalise(x: Any, weight: Any, size: Any, eps: Any, offset: Any) -> None:
    """Normalise a head in place."""
    factor, one = inverse_root(x, size, eps), numba.float32(1)
    for i in range(size):
        x[i] = x[i] * factor * (one + weight[i] if offset else weight[i])


@compiled(fastmath={"contract"})
def rotate(x: Any, out: Any, cos: Any, sin: Any, rotary: Any, size: Any) -> None:
    """Write a head, of which the first `rotary` numbers are rotated: number i together with i + rotary / 2."""
    half = rotary // 2
    for i in range(half):
        first, second = x[i], x[i + half]
        out[i] = first * cos[i] - second * sin[i]
        out[i + half] = second * cos[i + half] + first * sin[i + half]
    for i in range(rotary, size):
        out[i] = x[i]


@compiled(fastmath={"contract"})
def rotate_share(this: Any, thread: Any, threads: Any) -> None:
    """Write queries, keys and values of a thread's share of tokens; `this` are numbers by ROTATE."""
    heads, shared, size, rotary = this[ROTATE_HEADS], this[ROTATE_SHARED], this[ROTATE_SIZE], this[ROTATE_ROTARY]
    tokens, slots, eps = this[ROTATE_TOKENS], longs(this[ROTATE_SLOTS]), floats(this[ROTATE_EPS])[0]
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        source = this[ROTATE_QKV] + token * this[ROTATE_STEP] * 4
        cos, sin = floats(this[ROTATE_COS] + token * rotary * 4), floats(this[ROTATE_SIN] + token * rotary * 4)
        keys = this[ROTATE_KEYS] + slots[token] * this[ROTATE_KEY_SLOT] * 4
        values = this[ROTATE_VALUES] + slots[token] * this[ROTATE_VALUE_SLOT] * 4
        for head in range(heads + shared):
            x = floats(source + head * size * 4)
            weight = this[ROTATE_Q_WEIGHT] if head < heads else this[ROTATE_K_WEIGHT]
            if weight != 0:
                normalise(x, floats(weight), size, eps, this[ROTATE_OFFSET])
            to = (
                keys + (head - heads) * size * 4
                if head >= heads
                else this[ROTATE_OUT] + (token * heads + head) * size * 4
            )
            rotate(x, floats(to), cos, sin, rotary, size)
        value, out = floats(source + (heads + shared) * size * 4), floats(values)
        for i in range(shared * size):
            out[i] = value[i]


def _regions() -> tuple[Any, ...]:
    """Return the bodies of the regions; their closures have the stamp of all that they are compiled from."""
    stamp = simd.stamp_of(__file__, attention.__file__, attention_few.__file__, exponentials.__file__, simd.__file__)

    def attend(data: Any) -> None:
        if stamp >= 0:  # always
            attend_share(longs(address_of(data)), types.int64(thread_number()), types.int64(threads_running()))

    def attend_many(data: Any) -> None:
        if stamp >= 0:
            attend_many_share(longs(address_of(data)), types.int64(thread_number()), types.int64(threads_running()))

    def norm(data: Any) -> None:
        if stamp >= 0:
            norm_share(longs(address_of(data)), types.int64(thread_number()), types.int64(threads_running()))

    def gate(data: Any) -> None:
        if stamp >= 0:
            gate_share(longs(address_of(data)), types.int64(thread_number()), types.int64(threads_running()))

    def rotate(data: Any) -> None:
        if stamp >= 0:
            rotate_share(longs(address_of(data)), types.int64(thread_number()), types.int64(threads_running()))

    return attend, attend_many, norm, gate, rotate


REGIONS: Final = tuple(map(simd.region, _regions()))
"""What is compiled, kept for its addresses."""

ATTEND, ATTEND_MANY, NORM, GATE, ROTATE = (int(region.address) for region in REGIONS)
