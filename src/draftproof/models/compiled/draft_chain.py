"""Compile a draft head's chain: fuse the target's states, run the head's layer, choose a token, and step again.

The region that is compiled here runs any pass (decoder.py), with or without a chain after it.
"""

import math
from typing import Any, Final

import numba
from numba import types

from draftproof.core import simd
from draftproof.core.simd import (
    address_of,
    compiled,
    doubles,
    floats,
    longs,
    thread_number,
    threads_running,
)
from draftproof.models.compiled import attention, attention_few, decoder, exponentials, products, threads
from draftproof.models.compiled.decoder import (
    BUFFERS,
    GATE,
    HIDDEN,
    LOGITS,
    POSITIONS,
    ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    SETTINGS,
    SPAN_SIZE,
    SPAN_TABLE,
    STATES,
    TOKENS,
    VOCABULARY,
    copy_rows,
    norm_states,
    run_layers,
    run_pass,
    write_product,
)
from draftproof.models.compiled.exponentials import peak_of, write_exponentials
from draftproof.models.compiled.products import (
    add_product,
    rounded_rows,
    scaled_by_rms,
)
from draftproof.models.compiled.threads import (
    share,
    wait_for_others,
)

CHAIN_FIELDS: Final = (
    "fusing", "reading", "stepping", "taps", "tap_table", "tap_norms", "tap_inputs", "fuse_weights", "fuse_scales",
    "fused", "last", "depths", "chooses", "ids", "scales", "uniforms", "weights", "entries", "sums", "paths", "lengths",
    "confidence",
)  # fmt: skip
"""Numbers and addresses of a call, in order. A call that is no draft head's has only `reading`.

fusing    whether the pass `reading` begins with states of the target that are to be fused
reading   the pass; a draft head's is over the target's new states, and may be missing
taps      how many states of the target are fused for `reading`, at the addresses in `tap_table`, with norms at those
          in `tap_norms`; the result is kept in `fused`
stepping  the pass over one drafted token a row; it begins with the states of `reading` at the rows `last`
depths    tokens to draft. If `chooses` is 0, only the logits after the states of `stepping` are computed
ids       the target's token of each entry of the draft vocabulary
scales    one over each row's temperature, in float64; 0: the likeliest token is chosen
uniforms  two random numbers for each token and row
entries   the entries that were drafted, and `sums` their distributions' log-sum-exp: for each token and row
paths     the logarithm of the probability of each row's path; below `confidence` the row ends
lengths   tokens that each row is to get at most, and gets"""


(FUSING, READING, STEPPING, TAPS, TAP_TABLE, TAP_NORMS, TAP_INPUTS, FUSE_WEIGHTS, FUSE_SCALES, FUSED, LAST, DEPTHS,
 CHOOSES, IDS, SCALES, UNIFORMS, WEIGHTS, ENTRIES, SUMS, PATHS, LENGTHS,
 CONFIDENCE) = range(len(CHAIN_FIELDS))  # fmt: skip


CHUNK: Final = 512
"""Tokens in a chunk of a draw: that of core/draw.py, which says why it must not be another."""


@compiled()
def fuse_states(chain: Any, this: Any, thread: Any, threads: Any) -> None:
    """Combine the target's states after each tap into the states of a pass."""
    rows, hidden, taps, eps = this[ROWS], this[HIDDEN], chain[TAPS], floats(this[SETTINGS])[0]
    tile, wide = this[SCRATCH] + thread * this[SCRATCH_BYTES], taps * hidden
    first, last = share(rows, thread, threads)
    for row in range(first, last):
        for tap in range(taps):
            source = longs(chain[TAP_TABLE])[tap] + row * hidden * 4
            scaled_by_rms(floats(source), floats(longs(chain[TAP_NORMS])[tap]),
                          floats(chain[TAP_INPUTS] + (row * taps + tap) * hidden * 4), hidden, eps)  # fmt: skip
    wait_for_others(this[GATE], threads)
    codes, sums, steps = rounded_rows(chain[TAP_INPUTS], 0, this[BUFFERS], rows, wide, eps, this[GATE], thread, threads)
    add_product(chain[FUSE_WEIGHTS], chain[FUSE_SCALES], codes, sums, steps, wide, rows, hidden, chain[FUSED], False,
                tile, thread, threads)  # fmt: skip
    wait_for_others(this[GATE], threads)
    copy_rows(chain[FUSED], this[STATES], rows * hidden, thread, threads)
    wait_for_others(this[GATE], threads)


@compiled()
def first_index(x: Any, value: Any, size: Any) -> Any:
    """Return the first index of a value; the last index if there is none (NaN)."""
    index = 0
    while index < size - 1 and x[index] != value:
        index += 1
    return index


@compiled()
def inverted(weights: Any, count: Any, uniform: Any) -> Any:
    """Return the first index whose running sum exceeds uniform · total; see core/draw.invert."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    wanted, running, found = uniform * total, 0.0, 0
    for i in range(count):
        running += weights[i]
        if weights[i] > 0:
            found = i
            if running > wanted:
                break
    return found


@compiled()
def choose_entry(x: Any, weights: Any, size: Any, scale: Any, first: Any, second: Any) -> Any:
    """Draw an entry from the softmax of scale · x, or take the first largest if scale is 0.

    Return it, the log-sum-exp of its distribution, and its log-probability. A greedy row's are those of scale 1: how
    sure a drafter is. The draw is that of core/draw.pick.
    """
    greedy, peak = scale == 0, peak_of(x, size)
    scale = 1.0 if greedy else scale
    chunks, total = -(-size // CHUNK), 0.0
    sums = weights + size * 4
    for chunk in range(chunks):
        place, count = chunk * CHUNK * 4, min(CHUNK, size - chunk * CHUNK)
        made = write_exponentials(x + place, peak, numba.float32(scale), weights + place, count)
        floats(sums)[chunk] = made
        total += made
    if greedy:
        entry = first_index(floats(x), peak, size)
    else:
        chunk = inverted(floats(sums), chunks, first)
        begin = chunk * CHUNK
        entry = begin + inverted(floats(weights + begin * 4), min(CHUNK, size - begin), second)
    sum_log = scale * peak + math.log(total)
    return entry, sum_log, scale * floats(x)[entry] - sum_log


@compiled()
def choose_tokens(chain: Any, this: Any, depth: Any, thread: Any, threads: Any) -> None:
    """Draft one token in this thread's share of the rows, and move them one slot on."""
    rows, size = this[ROWS], this[VOCABULARY]
    first, last = share(rows, thread, threads)
    for row in range(first, last):
        place = depth * rows + row
        uniforms = doubles(chain[UNIFORMS] + place * 16)
        entry, total, log_prob = choose_entry(
            this[LOGITS] + row * size * 4, chain[WEIGHTS] + row * (size + size // 16) * 4, size,
            doubles(chain[SCALES])[row], uniforms[0], uniforms[1],
        )  # fmt: skip
        longs(chain[ENTRIES])[place], doubles(chain[SUMS])[place] = entry, total
        doubles(chain[PATHS])[row] += log_prob
        longs(this[TOKENS])[row] = longs(chain[IDS])[entry]
        longs(this[POSITIONS])[row] += depth > 0  # the first step's are given
        longs(this[SPAN_TABLE] + row * SPAN_SIZE * 8)[3] += depth > 0
        lengths = longs(chain[LENGTHS])
        if not math.isfinite(total):
            lengths[row] = min(lengths[row], depth)
        elif math.exp(doubles(chain[PATHS])[row]) < doubles(chain[CONFIDENCE])[0]:
            lengths[row] = min(lengths[row], depth + 1)


@compiled()
def has_more(chain: Any, rows: Any, depth: Any) -> Any:
    """Return whether some row is to get more than `depth` tokens."""
    longest = types.int64(0)
    for row in range(rows):
        longest = max(longest, longs(chain[LENGTHS])[row])
    return longest > depth


@compiled()
def take_last_states(chain: Any, reading: Any, this: Any, thread: Any, threads: Any) -> None:
    """Begin each row's draft with the state after its last token."""
    hidden = this[HIDDEN]
    for row in range(this[ROWS]):
        source = reading[STATES] + longs(chain[LAST])[row] * hidden * 4
        copy_rows(source, this[STATES] + row * hidden * 4, hidden, thread, threads)
    wait_for_others(this[GATE], threads)


@compiled()
def work(chain: Any) -> None:
    """Run a pass; for a draft head, fuse the target's new states before it, and draft tokens after it."""
    thread, threads = types.int64(thread_number()), types.int64(threads_running())
    this, reading = longs(chain[STEPPING]), longs(chain[READING])
    if chain[FUSING] != 0:
        fuse_states(chain, reading, thread, threads)
    if chain[READING] != 0:
        run_pass(reading, thread, threads)
    if chain[STEPPING] == 0:
        return
    if chain[READING] != 0:
        take_last_states(chain, reading, this, thread, threads)
    logits = this[LOGITS]
    for depth in range(chain[DEPTHS]):
        if depth > 0:
            run_layers(this, thread, threads)
        norm_states(this, thread, threads)
        write_product(this, thread, threads)
        wait_for_others(this[GATE], threads)
        if chain[CHOOSES] == 0:
            return
        choose_tokens(chain, this, depth, thread, threads)
        wait_for_others(this[GATE], threads)
        if not has_more(chain, this[ROWS], depth + 1):
            return
        if thread == 0:  # read again after the barriers of the layers
            this[LOGITS] = logits + (depth + 1) * this[ROWS] * this[VOCABULARY] * 4


def _region() -> Any:
    """Return the body of the region; its closure has the stamp of all that it is compiled from."""
    files = (module.__file__ for module in (attention, attention_few, decoder, exponentials, products, threads, simd))
    stamp = simd.stamp_of(__file__, *files)

    def body(data: Any) -> None:
        if stamp >= 0:  # always
            work(longs(address_of(data)))

    return body


# One for all kinds of work: each would have a copy of the products of its own, and take as long to compile.
region: Final = simd.region(_region())
"""The body of a parallel region, which reads the numbers of CHAIN_FIELDS; the machine code is kept on disk."""
