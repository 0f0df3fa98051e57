"""Compile the passes of a Llama-like decoder for a CPU with AVX-512 and VNNI, without Python between products.

A pass is one parallel region of torch's own OpenMP threads. Each stage of a layer is divided among them, and every
number is computed by one thread in one order, so a row's bits depend neither on the number of threads nor on others.
Addresses are integers: stages read and write tensors that the caller keeps alive.
"""

from typing import Any, Final

import numba
from numba import types

from draftproof.core.simd import (
    compiled,
    flags,
    floats,
    longs,
    shorts,
    words,
)
from draftproof.models.compiled.attention import FEWEST, attend_span, vectors_of
from draftproof.models.compiled.attention_few import NEVER, score, softmax, weighted_sum
from draftproof.models.compiled.products import (
    add_product,
    gated_product,
    request_share,
    rounded_rows,
    scaled_by_rms,
)
from draftproof.models.compiled.threads import share, wait_for_others

LAYER_FIELDS: Final = (
    "input_norm", "qkv", "out", "mlp_norm", "gate_up", "down", "keys", "values", "captured", "qkv_scales",
    "out_scales", "gate_up_scales", "down_scales",
)  # fmt: skip
"""Addresses of a layer in a pass, in order; `captured` is where its states are copied to, or 0. Scales are those of
eight-bit weights; 0: weights have four bits."""


LAYER_SIZE: Final = len(LAYER_FIELDS)


SPAN_FIELDS: Final = ("first_token", "width", "start", "before", "lineage", "common", "nodes")
"""Numbers of a span in a pass, in order. For a tree, `lineage` is the address of what each token sees of the `nodes`
slots after the first `common`; otherwise it is 0."""


SPAN_SIZE: Final = len(SPAN_FIELDS)


@compiled(fastmath={"contract"})
def rotate(x: Any, out: Any, cosines: Any, sines: Any, half: Any) -> None:
    """Rotate pairs half a head apart."""
    for i in range(half):
        first, second = x[i], x[half + i]
        out[i] = first * cosines[i] - second * sines[i]
        out[half + i] = second * cosines[i] + first * sines[i]


@compiled(fastmath={"contract"})
def attend(
    query: Any, keys: Any, values: Any, token: Any, span: Any, index: Any, head_dim: Any, scale: Any, room: Any,
    out: Any,
) -> None:  # fmt: skip
    """Write what one head of one token attends to; `token` is the bytes of a slot, `room` is for its scores."""
    scores = floats(room)
    before, lineage, common, nodes = span[3], span[4], span[5], span[6]
    count = before + index + 1 if lineage == 0 else common + nodes
    score(query, keys, token, count, head_dim, room)
    if lineage != 0:
        seen = flags(lineage + index * nodes)
        for i in range(nodes):
            if not seen[i]:
                scores[common + i] = NEVER
    weighted_sum(room, values, token, count, softmax(room, count, scale), head_dim, out)


PASS_FIELDS: Final = (
    "rows", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "layers", "spans", "layer_table", "span_table",
    "states", "positions", "cosines", "sines", "buffers", "projected", "attended", "gated", "scratch", "scratch_bytes",
    "settings", "final_norm", "normed", "head", "head_scales", "vocabulary", "wanted", "wanted_rows", "logits",
    "inputs", "input_width", "table", "table_bytes", "tokens", "embedding_norm", "state_norm", "gate", "keys_only",
)  # fmt: skip
"""Numbers and addresses of a pass, in order. `settings` are the address of the epsilon and the scale of attention;
`cosines` and `sines` have a row for each position. `head` is the matrix of the output layer, or 0; `head_scales` are as
those of LAYER_FIELDS. In a draft head, the first layer's `inputs` are the normed embeddings of `tokens` (rows of
`table`, in float32 or bfloat16) beside the normed states; otherwise they are states, and `table` is 0. `gate` is a
counter that begins with 0. If `keys_only` is not 0, a layer ends when its keys and values are written: nothing comes
after it."""


(ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, SPANS, LAYER_TABLE, SPAN_TABLE, STATES, POSITIONS,
 COSINES, SINES, BUFFERS, PROJECTED, ATTENDED, GATED, SCRATCH, SCRATCH_BYTES, SETTINGS, FINAL_NORM, NORMED, HEAD,
 HEAD_SCALES, VOCABULARY, WANTED, WANTED_ROWS, LOGITS, INPUTS, INPUT_WIDTH, TABLE, TABLE_BYTES, TOKENS,
 EMBEDDING_NORM, STATE_NORM, GATE, KEYS_ONLY) = range(len(PASS_FIELDS))  # fmt: skip


@compiled()
def write_keys_and_values(this: Any, layer: Any, thread: Any, threads: Any) -> None:
    """Rotate this thread's share of the pass's queries in place, and write keys, rotated, and values to their slots."""
    size, heads, shared = this[HEAD_DIM], this[HEADS], this[KV_HEADS]
    wide = (heads + 2 * shared) * size * 4
    for s in range(this[SPANS]):
        span = longs(this[SPAN_TABLE] + s * SPAN_SIZE * 8)
        first, last = share(span[1] * (heads + shared), thread, threads)
        for item in range(first, last):
            index, head = item // (heads + shared), item % (heads + shared)
            token, slot = span[0] + index, span[2] + span[3] + index
            source = this[PROJECTED] + token * wide + head * size * 4
            place = (slot * shared + head - heads) * size * 4
            angle = longs(this[POSITIONS])[token] * size // 2 * 4
            rotate(floats(source), floats(source if head < heads else layer[6] + place), floats(this[COSINES] + angle),
                   floats(this[SINES] + angle), size // 2)  # fmt: skip
            if head >= heads:
                kept, value = floats(layer[7] + place), floats(source + shared * size * 4)
                for i in range(size):
                    kept[i] = value[i]


@compiled()
def attend_few(this: Any, layer: Any, span: Any, room: Any, thread: Any, threads: Any) -> None:
    """Attend with this thread's share of a span's heads and tokens, one by one."""
    size, heads, shared, scale = this[HEAD_DIM], this[HEADS], this[KV_HEADS], floats(this[SETTINGS])[1]
    wide = (heads + 2 * shared) * size * 4
    first, last = share(span[1] * heads, thread, threads)
    for item in range(first, last):
        head, index = item // span[1], item % span[1]
        token, start = span[0] + index, (span[2] * shared + head // (heads // shared)) * size * 4
        attend(this[PROJECTED] + token * wide + head * size * 4, layer[6] + start, layer[7] + start,
               shared * size * 4, span, index, size, scale, room,
               this[ATTENDED] + (token * heads + head) * size * 4)  # fmt: skip


@compiled()
def attend_many(this: Any, layer: Any, span: Any, room: Any, thread: Any, threads: Any) -> None:
    """Attend with this thread's share of a span's queries, as lanes of vectors."""
    size, heads, shared, scale = this[HEAD_DIM], this[HEADS], this[KV_HEADS], floats(this[SETTINGS])[1]
    wide, step = (heads + 2 * shared) * size * 4, shared * size * 4
    first, last = share(shared * vectors_of(heads // shared * span[1]), thread, threads)
    attend_span(first, last, room, this[PROJECTED] + span[0] * wide, wide, size * 4, scale, layer[6] + span[2] * step,
                size * 4, step, layer[7] + span[2] * step, size * 4, step, this[ATTENDED] + span[0] * heads * size * 4,
                heads * size * 4, size * 4, heads // shared, span[1], span[3], 0, size, size)  # fmt: skip


@compiled()
def attend_all(this: Any, layer: Any, thread: Any, threads: Any) -> None:
    """Attend with this thread's share of the pass's heads and tokens."""
    room = this[SCRATCH] + thread * this[SCRATCH_BYTES]
    group = this[HEADS] // this[KV_HEADS]
    for s in range(this[SPANS]):
        span = longs(this[SPAN_TABLE] + s * SPAN_SIZE * 8)
        turn = (thread + s) % threads  # whose share is larger changes from span to span
        if span[4] == 0 and group * span[1] >= FEWEST:
            attend_many(this, layer, span, room, turn, threads)
        else:
            attend_few(this, layer, span, room, turn, threads)


@compiled()
def run_layer(this: Any, layer: Any, inputs: Any, width: Any, thread: Any, threads: Any) -> None:
    """Run a layer: `inputs` are normed if the layer has a norm; states are the residual stream."""
    rows, hidden, size, eps = this[ROWS], this[HIDDEN], this[HEAD_DIM], floats(this[SETTINGS])[0]
    outputs, states = (this[HEADS] + 2 * this[KV_HEADS]) * size, this[STATES]
    tile = this[SCRATCH] + thread * this[SCRATCH_BYTES]
    codes, sums, steps = rounded_rows(inputs, layer[0], this[BUFFERS], rows, width, eps, this[GATE], thread, threads)
    add_product(
        layer[1], layer[9], codes, sums, steps, width, rows, outputs, this[PROJECTED], False, tile, thread, threads
    )
    request_share(layer[2], layer[10], this[HEADS] * size, hidden, thread, threads)
    wait_for_others(this[GATE], threads)
    write_keys_and_values(this, layer, thread, threads)
    wait_for_others(this[GATE], threads)
    if this[KEYS_ONLY] != 0:
        return
    attend_all(this, layer, thread, threads)
    wait_for_others(this[GATE], threads)
    width = this[HEADS] * size
    codes, sums, steps = rounded_rows(this[ATTENDED], 0, this[BUFFERS], rows, width, eps, this[GATE], thread, threads)
    add_product(layer[2], layer[10], codes, sums, steps, width, rows, hidden, states, True, tile, thread, threads)
    request_share(layer[4], layer[11], hidden, 2 * this[INTERMEDIATE], thread, threads)
    wait_for_others(this[GATE], threads)
    codes, sums, steps = rounded_rows(states, layer[3], this[BUFFERS], rows, hidden, eps, this[GATE], thread, threads)
    width = this[INTERMEDIATE]
    gated_product(layer[4], layer[11], codes, sums, steps, hidden, rows, width, this[GATED], tile, thread, threads)
    request_share(layer[5], layer[12], width, hidden, thread, threads)
    wait_for_others(this[GATE], threads)
    codes, sums, steps = rounded_rows(this[GATED], 0, this[BUFFERS], rows, width, eps, this[GATE], thread, threads)
    add_product(layer[5], layer[12], codes, sums, steps, width, rows, hidden, states, True, tile, thread, threads)
    wait_for_others(this[GATE], threads)


@compiled()
def copy_rows(source: Any, target: Any, count: Any, thread: Any, threads: Any) -> None:
    first, last = share(count, thread, threads)
    here, there = floats(source), floats(target)
    for i in range(first, last):
        there[i] = here[i]


@compiled()
def embed(this: Any, token: Any, target: Any) -> None:
    """Write the embedding of a token, in float32."""
    hidden, out = this[HIDDEN], words(target)
    if this[TABLE_BYTES] == 2:  # the bits of a bfloat16 are the first half of a float32's
        halves = shorts(this[TABLE] + token * hidden * 2)
        for i in range(hidden):
            out[i] = types.int32(halves[i]) << 16
    else:
        whole = words(this[TABLE] + token * hidden * 4)
        for i in range(hidden):
            out[i] = whole[i]


@compiled()
def join_inputs(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of a draft head's inputs."""
    hidden, eps = this[HIDDEN], floats(this[SETTINGS])[0]
    first, last = share(this[ROWS], thread, threads)
    for row in range(first, last):
        place = this[INPUTS] + row * 2 * hidden * 4
        state = floats(this[STATES] + row * hidden * 4)
        embed(this, longs(this[TOKENS])[row], place)
        scaled_by_rms(floats(place), floats(this[EMBEDDING_NORM]), floats(place), hidden, eps)
        scaled_by_rms(state, floats(this[STATE_NORM]), floats(place + hidden * 4), hidden, eps)
    wait_for_others(this[GATE], threads)


@compiled()
def run_layers(this: Any, thread: Any, threads: Any) -> None:
    """Run the layers of a pass."""
    if this[TABLE] != 0:
        join_inputs(this, thread, threads)
    for index in range(this[LAYERS]):
        layer = longs(this[LAYER_TABLE] + index * LAYER_SIZE * 8)
        run_layer(this, layer, this[INPUTS], this[INPUT_WIDTH], thread, threads)
        if layer[8] != 0:
            copy_rows(this[STATES], layer[8], this[ROWS] * this[HIDDEN], thread, threads)


@compiled()
def norm_states(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of the final norm, and wait for the others."""
    hidden = this[HIDDEN]
    first, last = share(this[ROWS], thread, threads)
    for row in range(first, last):
        scaled_by_rms(floats(this[STATES] + row * hidden * 4), floats(this[FINAL_NORM]),
                      floats(this[NORMED] + row * hidden * 4), hidden, floats(this[SETTINGS])[0])  # fmt: skip
    wait_for_others(this[GATE], threads)


@compiled()
def write_product(this: Any, thread: Any, threads: Any) -> None:
    """Write this thread's share of the product of the wanted rows with one matrix."""
    rows, hidden, tile = this[WANTED_ROWS], this[HIDDEN], this[SCRATCH] + thread * this[SCRATCH_BYTES]
    codes, sums, steps = rounded_rows(
        this[WANTED], 0, this[BUFFERS], rows, hidden, numba.float32(0), this[GATE], thread, threads
    )
    add_product(this[HEAD], this[HEAD_SCALES], codes, sums, steps, hidden, rows, this[VOCABULARY], this[LOGITS], False,
                tile, thread, threads)  # fmt: skip


@compiled()
def run_pass(this: Any, thread: Any, threads: Any) -> None:
    """Run the layers of a pass, the final norm, and the output layer, as far as it has them."""
    run_layers(this, thread, threads)
    if this[FINAL_NORM] != 0:
        norm_states(this, thread, threads)
    if this[HEAD] != 0:
        write_product(this, thread, threads)
