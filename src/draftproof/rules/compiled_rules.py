"""Compile the chain rules for rows of float32 logits that are greedy, or drawn from their softmax at a temperature.

A call has two parallel regions of torch's own OpenMP threads: `measure` goes over all scored positions, `decide` over
all rows. Each number is computed by one thread in one order that depends on its own row alone, so a row's bits depend
neither on the number of threads nor on others. Random numbers, chunks and the order of trials are those of the
reference (core/rng.py, core/draw.py, rules/token.py, rules/block.py, rules/coupled.py): both decide the same but for
rounding.
"""

import math
from typing import Any, Final

import numba
from numba import types

from draftproof.core import simd
from draftproof.core.draw import CHUNK, TRIALS
from draftproof.core.filters import COARSE
from draftproof.core.rng import MASK, Purpose
from draftproof.core.simd import (
    F32,
    REASSOCIATED,
    Emit,
    address_of,
    compiled,
    doubles,
    emitted,
    flags,
    floats,
    longs,
    thread_number,
    threads_running,
)
from draftproof.rules.checks import ROUNDING

FIELDS: Final = (
    "rows", "slots", "vocabulary", "logits", "logit_row", "logit_position", "scales", "tokens", "lengths", "drawn",
    "has_q", "entries", "q_logits", "q_row", "q_slot", "q_scales", "q_sums", "q_cutoffs", "q_points", "ids", "entry_of",
    "seeds", "starts", "rule", "served", "peaks", "totals", "walk", "out", "accepted", "scratch", "scratch_bytes",
)  # fmt: skip
"""Numbers of a call, in order: sizes, addresses, and strides in numbers."""

(ROWS, SLOTS, VOCABULARY, LOGITS, LOGIT_ROW, LOGIT_POSITION, SCALES, TOKENS, LENGTHS, DRAWN, HAS_Q, ENTRIES, Q_LOGITS,
 Q_ROW, Q_SLOT, Q_SCALES, Q_SUMS, Q_CUTOFFS, Q_POINTS, IDS, ENTRY_OF, SEEDS, STARTS, RULE, SERVED, PEAKS, TOTALS, WALK,
 OUT, ACCEPTED, SCRATCH, SCRATCH_BYTES) = range(len(FIELDS))  # fmt: skip

RULES: Final = ("token", "block", "coupled")
TOKEN, BLOCK, COUPLED = range(len(RULES))

ACCEPT, CLOSE, THIN, POSITION = (int(p) for p in (Purpose.ACCEPT, Purpose.CLOSE, Purpose.THIN, Purpose.POSITION))

EPS: Final = 2.0**-23
"""The distance from 1 to the next float32."""


@emitted
def larger(typingctx, x, y):  # type: ignore[no-untyped-def]
    """Return the larger of two float32, NaN if one of them is."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Emit(builder).call("llvm.maximum.f32", F32, *arguments)

    return types.float32(types.float32, types.float32), codegen


# ---------------------------------------------------------------------------------------------------- random numbers


@compiled(inline="always")
def philox(lane: Any, j: Any, start: Any, purpose: Any, seed: Any) -> Any:
    """Return the two numbers of an address, uniform on [0, 1). Reference: core/rng.philox_words."""
    a, b, c, d = lane & MASK, j & MASK, start & MASK, purpose & MASK
    low, high = seed & MASK, (seed >> 32) & MASK
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # they wrap around; the masks remove the sign
        a, b, c, d = ((second >> 32) & MASK) ^ b ^ low, second & MASK, ((first >> 32) & MASK) ^ d ^ high, first & MASK
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return ((a >> 5) * 67108864.0 + (b >> 6)) * 2.0**-53, ((c >> 5) * 67108864.0 + (d >> 6)) * 2.0**-53


@compiled(inline="always")
def log_of(coin: Any) -> Any:
    """Return log of a number in [0, 1)."""
    return -math.inf if coin == 0 else math.log(coin)


# ----------------------------------------------------------------------------------------------------------- weights


@compiled(inline="always")
def exponential(x: Any) -> Any:
    """Return eˣ to a relative 2⁻²² or so for x up to 87, and 0 below -87: a weight so small is none."""
    return simd.exponential(x) if x >= numba.float32(-87.0) else numba.float32(0.0)


@compiled(fastmath=REASSOCIATED)
def peak_of(x: Any, size: Any) -> Any:
    """Return the largest of some logits; NaN if one of them is."""
    largest = numba.float32(-math.inf)
    for i in range(size):
        largest = larger(largest, x[i])
    return largest


@compiled()
def first_largest(x: Any, size: Any) -> Any:
    """Return the largest of some logits and its first index; NaN and 0 if one of them is NaN."""
    largest, begin, index = numba.float32(-math.inf), 0, 0
    for start in range(0, size, CHUNK):
        peak = peak_of(floats(x + start * 4), min(CHUNK, size - start))
        if not peak <= largest:
            largest, begin = peak, start
            if math.isnan(peak):
                return peak, 0
    index = begin
    while index < min(begin + CHUNK, size) - 1 and floats(x)[index] != largest:
        index += 1
    return largest, index


@compiled(fastmath=REASSOCIATED)
def sum_of(x: Any, size: Any) -> Any:
    """Return the sum of some numbers."""
    total = numba.float32(0)
    for i in range(size):
        total += x[i]
    return total


@compiled(fastmath=REASSOCIATED)
def sum_exponentials(x: Any, centre: Any, slope: Any, size: Any) -> Any:
    """Return the sum of exp(slope · (x - centre))."""
    total = numba.float32(0)
    for i in range(size):
        total += exponential((x[i] - centre) * slope)
    return total


@compiled(fastmath=REASSOCIATED)
def write_exponentials(x: Any, centre: Any, slope: Any, factor: Any, size: Any, out: Any) -> Any:
    """Write factor · exp(slope · (x - centre)), and return the sum."""
    total = numba.float32(0)
    for i in range(size):
        weight = exponential((x[i] - centre) * slope) * factor
        out[i] = weight
        total += weight
    return total


@compiled(fastmath={"contract", "nsz"})
def subtract(weights: Any, q: Any, size: Any) -> None:
    """Subtract q from weights, down to 0."""
    for i in range(size):
        weights[i] = max(weights[i] - q[i], numba.float32(0))


@compiled()
def logits_at(this: Any, row: Any, position: Any) -> Any:
    """Return the address of the target's logits at a position of a row."""
    return this[LOGITS] + (row * this[LOGIT_ROW] + position * this[LOGIT_POSITION]) * 4


@compiled()
def write_weights(this: Any, row: Any, position: Any, factor: Any, weights: Any, sums: Any) -> Any:
    """Write the weights of p at a position, relative to its largest times a factor, and the sum of each chunk."""
    V, x = this[VOCABULARY], logits_at(this, row, position)
    peak, slope = floats(this[PEAKS])[row * (this[SLOTS] + 1) + position], numba.float32(doubles(this[SCALES])[row])
    for chunk in range((V + CHUNK - 1) // CHUNK):
        begin = chunk * CHUNK * 4
        size = min(CHUNK, V - chunk * CHUNK)
        floats(sums)[chunk] = write_exponentials(
            floats(x + begin), peak, slope, numba.float32(factor), size, floats(weights + begin)
        )


@compiled()
def write_sums(weights: Any, size: Any, sums: Any) -> Any:
    """Write the sum of each chunk of weights; return the sum of all."""
    total = 0.0
    for chunk in range((size + CHUNK - 1) // CHUNK):
        part = sum_of(floats(weights + chunk * CHUNK * 4), min(CHUNK, size - chunk * CHUNK))
        floats(sums)[chunk] = part
        total += part
    return total


# -------------------------------------------------------------------------------------------------------------- q


@compiled()
def was_drawn(this: Any, row: Any, slot: Any) -> Any:
    """Return whether a draft token was drawn from q, and not chosen."""
    if this[HAS_Q] == 0:
        return False
    return this[DRAWN] == 0 or flags(this[DRAWN])[row * this[SLOTS] + slot] != 0


@compiled()
def log_q_of(this: Any, row: Any, slot: Any, token: Any) -> Any:
    """Return log q of a token where the slot was drawn."""
    entry = token if this[ENTRY_OF] == 0 else longs(this[ENTRY_OF])[token]
    if entry < 0 or entry >= this[ENTRIES]:
        return -math.inf
    place = row * this[SLOTS] + slot
    logit = floats(this[Q_LOGITS])[row * this[Q_ROW] + slot * this[Q_SLOT] + entry]
    return doubles(this[Q_SCALES])[place] * logit - doubles(this[Q_SUMS])[place]


@compiled()
def q_of(this: Any, row: Any, slot: Any, token: Any) -> Any:
    """Return q of a token: what was declared, or a point mass on the token that was chosen."""
    if was_drawn(this, row, slot):
        return math.exp(log_q_of(this, row, slot, token))
    return 1.0 if token == longs(this[TOKENS])[row * this[SLOTS] + slot] else 0.0


@compiled()
def subtract_q(this: Any, row: Any, slot: Any, weights: Any, q: Any) -> None:
    """Subtract q of a slot from weights over the target's vocabulary, down to 0; `q` is room for its entries."""
    place, out = row * this[SLOTS] + slot, floats(weights)
    if not was_drawn(this, row, slot):
        token = longs(this[TOKENS])[place]
        out[token] = max(out[token] - numba.float32(1), numba.float32(0))
        return
    scale, total = doubles(this[Q_SCALES])[place], doubles(this[Q_SUMS])[place]
    # exp(scale · logit - total), with the rounding of the centre corrected by a factor: core/distribution.powers
    centre = numba.float32(total / scale)
    factor = math.exp(scale * centre - total)
    x, R = this[Q_LOGITS] + (row * this[Q_ROW] + slot * this[Q_SLOT]) * 4, this[ENTRIES]
    write_exponentials(floats(x), centre, numba.float32(scale), numba.float32(factor), R, floats(q))
    if this[ENTRY_OF] == 0:
        subtract(out, floats(q), R)
        return
    ids, each, V = longs(this[IDS]), floats(q), this[VOCABULARY]
    for entry in range(R):
        token = ids[entry]
        if 0 <= token < V:  # ids that a drafter made itself may be wrong
            out[token] = max(out[token] - each[entry], numba.float32(0))


# -------------------------------------------------------------------------------------------------------------- draws


@compiled()
def inverted(weights: Any, count: Any, uniform: Any) -> Any:
    """Return the first index whose running sum exceeds uniform · total. Reference: core/draw.invert."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    wanted, running, last = uniform * total, 0.0, 0
    for i in range(count):
        if running < total:
            last = i
        running += weights[i]
        if running > wanted:
            break
    return last


@compiled()
def picked(this: Any, weights: Any, sums: Any, first: Any, second: Any) -> Any:
    """Draw a token in proportion to its weight. Reference: core/draw.pick."""
    V = this[VOCABULARY]
    chunk = inverted(floats(sums), (V + CHUNK - 1) // CHUNK, first)
    begin = chunk * CHUNK
    return begin + inverted(floats(weights + begin * 4), min(CHUNK, V - begin), second)


@compiled()
def closed(this: Any, row: Any, weights: Any, sums: Any, lane: Any) -> Any:
    """Draw the round's last token. Reference: core/draw.close."""
    first, second = philox(lane, 0, longs(this[STARTS])[row], CLOSE, longs(this[SEEDS])[row])
    return picked(this, weights, sums, first, second)


@compiled()
def first_to_ring(weights: Any, first_lane: Any, count: Any, j: Any, start: Any, seed: Any) -> Any:
    """Return the index of the weight whose exponential clock rings first. Reference: core/draw.race_weights."""
    best, found = -1.0, 0
    for i in range(count):
        if weights[i] > 0:
            uniform, _ = philox(first_lane + i, j, start, POSITION, seed)
            speed = weights[i] / -math.log1p(-(uniform + 2.0**-54))
            if speed > best:
                best, found = speed, i
    return found


@compiled()
def raced(this: Any, row: Any, position: Any, weights: Any, sums: Any) -> Any:
    """Draw the token at a position by a race of the chunks, then of the winning chunk's tokens."""
    V, start, seed = this[VOCABULARY], longs(this[STARTS])[row] + position, longs(this[SEEDS])[row]
    chunk = first_to_ring(floats(sums), 0, (V + CHUNK - 1) // CHUNK, 0, start, seed)
    begin = chunk * CHUNK
    return begin + first_to_ring(floats(weights + begin * 4), begin, min(CHUNK, V - begin), 1, start, seed)


# -------------------------------------------------------------------------------------------------------------- rules


@compiled()
def log_ratio(this: Any, row: Any, slot: Any) -> Any:
    """Return log p(x) - log q(x) of a draft token x. Reference: rules/chain.log_ratios."""
    token, place = longs(this[TOKENS])[row * this[SLOTS] + slot], row * (this[SLOTS] + 1) + slot
    scale = doubles(this[SCALES])[row]
    log_sum = scale * floats(this[PEAKS])[place] + math.log(doubles(this[TOTALS])[place])
    log_p = scale * floats(logits_at(this, row, slot))[token] - log_sum
    if log_p == -math.inf or not was_drawn(this, row, slot):
        return log_p
    return log_p - log_q_of(this, row, slot, token)


@compiled()
def coin_of(this: Any, row: Any, slot: Any) -> Any:
    """Return the coin of a draft token."""
    coin, _ = philox(slot, 0, longs(this[STARTS])[row], ACCEPT, longs(this[SEEDS])[row])
    return coin


@compiled()
def thinned(this: Any, row: Any, slot: Any, weights: Any, sums: Any) -> Any:
    """Draw a residual token by thinning, -1 if all trials failed. Reference: rules/token.thin."""
    start, seed = longs(this[STARTS])[row], longs(this[SEEDS])[row]
    gain = 1.0 / doubles(this[TOTALS])[row * (this[SLOTS] + 1) + slot]
    for trial in range(TRIALS):
        first, second = philox(trial, 0, start, CLOSE, seed)
        coin, _ = philox(trial, 0, start, THIN, seed)
        x = picked(this, weights, sums, first, second)
        p = floats(weights)[x] * gain
        if coin * p < p - q_of(this, row, slot, x):
            return x
    return -1


@compiled()
def token_rule(this: Any, row: Any, weights: Any, sums: Any, q: Any) -> Any:
    """Return how many tokens are kept, and the last one. Reference: rules/token.token."""
    length, accepted = longs(this[LENGTHS])[row], types.int64(0)
    while accepted < length and log_of(coin_of(this, row, accepted)) < log_ratio(this, row, accepted):
        accepted += 1
    write_weights(this, row, accepted, 1.0, weights, sums)
    if accepted == length:
        return accepted, closed(this, row, weights, sums, 0)
    last = thinned(this, row, accepted, weights, sums)
    if last < 0:
        gain = 1.0 / doubles(this[TOTALS])[row * (this[SLOTS] + 1) + accepted]
        write_weights(this, row, accepted, gain, weights, sums)
        subtract_q(this, row, accepted, weights, q)
        if write_sums(weights, this[VOCABULARY], sums) <= 0:  # p = q up to rounding
            write_weights(this, row, accepted, 1.0, weights, sums)
        last = closed(this, row, weights, sums, TRIALS)
    return accepted, last


@compiled()
def block_rule(this: Any, row: Any, weights: Any, sums: Any, q: Any) -> Any:
    """Return how many tokens are kept, and the last one. Reference: rules/block.block."""
    length, walk = longs(this[LENGTHS])[row], doubles(this[WALK] + row * (this[SLOTS] + 1) * 8)
    walk[0] = 0.0
    for slot in range(length):
        walk[slot + 1] = min(walk[slot] + log_ratio(this, row, slot), 0.0)
    at = length
    if at == 0 or log_of(coin_of(this, row, at - 1)) < walk[at]:
        write_weights(this, row, at, 1.0, weights, sums)
        return at, closed(this, row, weights, sums, 0)
    stops = False
    while not stops:
        at -= 1
        factor = math.exp(walk[at]) / doubles(this[TOTALS])[row * (this[SLOTS] + 1) + at]
        write_weights(this, row, at, factor, weights, sums)
        subtract_q(this, row, at, weights, q)
        mass, gap = write_sums(weights, this[VOCABULARY], sums), -math.expm1(walk[at])
        if at == 0:
            stops = True
        elif mass > 0:
            stops = coin_of(this, row, at - 1) < mass / (mass + gap)
        if stops and mass <= 0:  # reached by rounding only, where p = q
            write_weights(this, row, at, 1.0, weights, sums)
    return at, closed(this, row, weights, sums, 0)


@compiled()
def greedy_rule(this: Any, row: Any) -> Any:
    """Return how many tokens are kept, and the last one, where p is a point mass on the first largest logit.

    Under every rule a draft token is kept if it is that token, whatever q is, and no random number matters.
    """
    length, accepted = longs(this[LENGTHS])[row], types.int64(0)
    best, tokens = doubles(this[TOTALS] + row * (this[SLOTS] + 1) * 8), longs(this[TOKENS] + row * this[SLOTS] * 8)
    while accepted < length and tokens[accepted] == types.int64(best[accepted]):
        accepted += 1
    return accepted, types.int64(best[accepted])


@compiled()
def coupled_rule(this: Any, row: Any, weights: Any, sums: Any) -> Any:
    """Return how many tokens are kept, and the last one. Reference: rules/coupled.coupled."""
    length, accepted, last = longs(this[LENGTHS])[row], types.int64(0), types.int64(0)
    tokens = longs(this[TOKENS] + row * this[SLOTS] * 8)
    while True:
        write_weights(this, row, accepted, 1.0, weights, sums)
        last = raced(this, row, accepted, weights, sums)
        if accepted == length or tokens[accepted] != last:
            return accepted, last
        accepted += 1


# ------------------------------------------------------------------------------------------------------------ regions


@compiled()
def measure_share(this: Any, thread: Any, threads: Any) -> None:
    """Write the peak of a thread's share of positions, and the sum of weights where a draft token follows.

    Of greedy rows, whose scale is 0, the token is written instead of the sum.
    """
    J, V, coupled = this[SLOTS] + 1, this[VOCABULARY], this[RULE] == COUPLED
    items = this[ROWS] * J
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        row, position = item // J, item % J
        if longs(this[SERVED])[row] == 0:
            continue
        x, total, scale = logits_at(this, row, position), 0.0, doubles(this[SCALES])[row]
        if scale == 0:
            peak, index = first_largest(x, V)
            total = types.float64(index)
        else:
            peak = peak_of(floats(x), V)
        floats(this[PEAKS])[item] = peak
        if scale != 0 and not coupled and position < longs(this[LENGTHS])[row] and math.isfinite(peak):
            slope = numba.float32(scale)
            for begin in range(0, V, CHUNK):
                total += sum_exponentials(floats(x + begin * 4), peak, slope, min(CHUNK, V - begin))
        doubles(this[TOTALS])[item] = total


@compiled()
def is_sound(this: Any, row: Any) -> Any:
    """Return whether a row can be decided here: its scores are distributions, and its draft can have been drawn."""
    K, length, scale = this[SLOTS], longs(this[LENGTHS])[row], doubles(this[SCALES])[row]
    if length < 0 or length > K:
        return False
    for position in range(K + 1):
        peak = floats(this[PEAKS])[row * (K + 1) + position]
        if not math.isfinite(peak) or abs(peak) * (scale * EPS) > COARSE:
            return False
    for slot in range(length):
        place = row * K + slot
        token = longs(this[TOKENS])[place]
        if token < 0 or token >= this[VOCABULARY]:
            return False
        if was_drawn(this, row, slot):
            plain = floats(this[Q_CUTOFFS])[place] == -math.inf and longs(this[Q_POINTS])[place] < 0
            log_q = log_q_of(this, row, slot, token)
            if not plain or not (log_q > -math.inf and log_q <= ROUNDING):
                return False
    return True


@compiled()
def decide_share(this: Any, thread: Any, threads: Any) -> None:
    """Write the verdicts of a thread's share of rows; `served` becomes 0 where a row is left to the reference."""
    rows, K, V = this[ROWS], this[SLOTS], this[VOCABULARY]
    weights = this[SCRATCH] + thread * this[SCRATCH_BYTES]
    sums = weights + V * 4
    q = sums + (V + CHUNK - 1) // CHUNK * 4
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        if longs(this[SERVED])[row] == 0:
            continue
        if not is_sound(this, row):
            longs(this[SERVED])[row] = 0
            continue
        if doubles(this[SCALES])[row] == 0:
            accepted, last = greedy_rule(this, row)
        elif this[RULE] == COUPLED:
            accepted, last = coupled_rule(this, row, weights, sums)
        elif this[RULE] == BLOCK:
            accepted, last = block_rule(this, row, weights, sums, q)
        else:
            accepted, last = token_rule(this, row, weights, sums, q)
        longs(this[ACCEPTED])[row] = accepted
        out, tokens = longs(this[OUT] + row * (K + 1) * 8), longs(this[TOKENS] + row * K * 8)
        for slot in range(accepted):
            out[slot] = tokens[slot]
        out[accepted] = last


def _regions() -> tuple[Any, Any]:
    """Return the bodies of the regions; their closures have the stamp of all that they are compiled from."""
    stamp = simd.stamp_of(__file__, simd.__file__)

    def measure(data: Any) -> None:
        if stamp >= 0:  # always
            measure_share(longs(address_of(data)), types.int64(thread_number()), types.int64(threads_running()))

    def decide(data: Any) -> None:
        if stamp >= 0:
            decide_share(longs(address_of(data)), types.int64(thread_number()), types.int64(threads_running()))

    return measure, decide


REGIONS: Final = tuple(map(simd.region, _regions()))
"""What is compiled, kept for its addresses."""

MEASURE, DECIDE = (int(region.address) for region in REGIONS)
