"""What lies between the passes of a round that stays on a device, each one kernel: whole numbers, a program a row."""

from typing import no_type_check

import triton
import triton.language as tl

from draftproof.core.types import PAD as _PAD
from draftproof.kernels import round_table as _table

PAD = tl.constexpr(_PAD)
TARGET = tl.constexpr(_table.TARGET)
DRAFT = tl.constexpr(_table.DRAFT)
LENGTH = tl.constexpr(_table.LENGTH)
LAST = tl.constexpr(_table.LAST)
PREVIOUS = tl.constexpr(_table.PREVIOUS)
BEHIND = tl.constexpr(_table.BEHIND)
END = tl.constexpr(_table.END)
MOST = tl.constexpr(_table.MOST)
LIMIT = tl.constexpr(_table.LIMIT)

# When a drafter reads what a round emitted (`round_steps.Reads`), and so how far it is behind its text then
READS_LATER = tl.constexpr(0)  # by all that was emitted: nothing was drafted
READS_AT_ONCE = tl.constexpr(1)  # as before: a head reads in the round itself
READS_DRAFTING = tl.constexpr(2)  # by the last token, and by the one before if it drew that one


@triton.jit(do_not_specialize=["scratch", "last_position", "T"])
@no_type_check
def lay_out(places, positions, slots, ends, scratch, last_position, T, BLOCK: tl.constexpr):
    """Write the positions and slots of a row's tokens, and where its last one is in the pass. Grid: (B,)."""
    b, B = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    t = tl.arange(0, BLOCK)
    inside = t < T
    start, length, width = tl.load(places + b), tl.load(places + B + b), tl.load(places + 2 * B + b)
    position = length + t
    tl.store(positions + b * T + t, tl.minimum(position, last_position), mask=inside)
    tl.store(slots + b * T + t, tl.where(t < width, start + position, scratch), mask=inside)
    tl.store(ends + b, b * T + tl.maximum(width - 1, 0))


@triton.jit(do_not_specialize=["N", "K", "R", "behind_text"])
@no_type_check
def begin_draft(
    table, ready, N, K, R, behind_text, most, tokens, places, BLOCK: tl.constexpr, SOME_READY: tl.constexpr
):
    """Write how much a row may draft, what its drafter reads first, and the places of all steps. Grid: (B,)."""
    b, B = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    length, end = tl.load(table + LENGTH * N + b), tl.load(table + END * N + b)
    alive = length < end
    limit, reach = tl.load(table + LIMIT * N + b), tl.load(table + MOST * N + b) - length
    longest = tl.minimum(tl.maximum(tl.minimum(limit, reach), 0), K)
    longest = tl.where(alive, longest, 0)
    if SOME_READY:
        longest = tl.where(tl.load(ready + b) != 0, longest, 0)
    tl.store(most + b, longest)

    # the last token, and the one before where a whole draft was accepted: its last token was never read
    behind = tl.where(alive, tl.load(table + BEHIND * N + b), 0)
    last, previous = tl.load(table + LAST * N + b), tl.load(table + PREVIOUS * N + b)
    first = tl.where(behind == 2, previous, last)
    tl.store(tokens + 2 * b, tl.where(first < R, first, 0))  # an unknown token only worsens the guess
    tl.store(tokens + 2 * b + 1, tl.where(last < R, last, 0))

    j = tl.arange(0, BLOCK)
    inside, line = j < K, places + j * 4 * B + b
    start = tl.load(table + DRAFT * N + b)
    tl.store(line, start + tl.zeros([BLOCK], tl.int64), mask=inside)
    tl.store(line + B, tl.where(j == 0, length - behind, length - behind_text + j), mask=inside)
    tl.store(line + 2 * B, tl.where(j == 0, behind, (longest > j).to(tl.int64)), mask=inside)


@triton.jit(do_not_specialize=["count", "stride"])
@no_type_check
def describe_draws(drawn, cutoffs, bases, masses, greedy, ids, tokens, kept, lse, points, count, stride,
                   BLOCK: tl.constexpr, SOME_GREEDY: tl.constexpr, MAPPED: tl.constexpr):  # fmt: skip
    """Write the drawn tokens and what is known of their distributions; see `round_steps.Described`."""
    b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = b < count
    token = tl.maximum(tl.load(drawn + b, mask=inside, other=0), 0)
    if MAPPED:
        token = tl.load(ids + token, mask=inside, other=0)
    cutoff = tl.load(cutoffs + b * stride, mask=inside, other=0.0).to(tl.float32)
    point = tl.full([BLOCK], PAD, tl.int64)
    if SOME_GREEDY:
        chosen = tl.load(greedy + b, mask=inside, other=0) != 0
        point = tl.where(chosen, token, point)
        cutoff = tl.where(chosen, float("-inf"), cutoff)
    mass = tl.load(masses + b * stride, mask=inside, other=1.0)
    tl.store(tokens + b, token, mask=inside)
    tl.store(kept + b, cutoff, mask=inside)
    tl.store(lse + b, tl.load(bases + b * stride, mask=inside, other=0.0) + tl.log(mass), mask=inside)
    tl.store(points + b, point, mask=inside)


@triton.jit(do_not_specialize=["N", "K", "V"])
@no_type_check
def begin_scoring(table, drafted, lengths, ints, N, K, V, tokens, places, COLUMNS: tl.constexpr,
                  POSITIONS: tl.constexpr, DRAFTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write a row's tokens and place in the target's pass, and its lines of the verification's parameters."""
    b, B = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    k = tl.arange(0, BLOCK)
    length, end = tl.load(table + LENGTH * N + b), tl.load(table + END * N + b)
    draft = tl.load(drafted + b * K + k, mask=k < K, other=0)
    tl.store(tokens + b * (K + 1) + 1 + k, tl.minimum(tl.maximum(draft, 0), V - 1), mask=k < K)
    tl.store(tokens + b * (K + 1), tl.load(table + LAST * N + b))
    n = tl.load(lengths + b)
    tl.store(places + b, tl.load(table + TARGET * N + b))
    tl.store(places + B + b, length - 1)
    tl.store(places + 2 * B + b, tl.where(length < end, n + 1, 0))
    tl.store(ints + b * COLUMNS + POSITIONS, length)
    tl.store(ints + b * COLUMNS + DRAFTED, n)


@triton.jit(do_not_specialize=["N", "J"])
@no_type_check
def conclude(table, kept, accepted, faults, lengths, N, J, emitted, counts, READS: tl.constexpr, BLOCK: tl.constexpr):
    """Write where the next round of a row starts, and what the host is to know. Grid: (B,)."""
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < J
    length, end = tl.load(table + LENGTH * N + b), tl.load(table + END * N + b)
    last, previous = tl.load(table + LAST * N + b), tl.load(table + PREVIOUS * N + b)
    behind = tl.load(table + BEHIND * N + b)
    drafted, right = tl.load(lengths + b), tl.load(accepted + b)
    alive = length < end
    fault = alive & (tl.load(faults + b) != 0)
    count = tl.where(alive & (fault == 0), right + 1, 0)
    if READS == READS_LATER:
        behind += count
    elif READS == READS_DRAFTING:
        whole = (drafted > 0) & (right == drafted)
        behind = tl.where(count > 0, 1 + whole.to(tl.int64), behind)
    token = tl.load(kept + b * J + i, mask=inside, other=PAD)
    newest = tl.sum(tl.where(i == count - 1, token, 0), 0)
    newest_but_one = tl.sum(tl.where(i == count - 2, token, 0), 0)

    line = emitted + b * (J + 4)
    tl.store(line + i, token, mask=inside)
    tl.store(line + J, count)
    tl.store(line + J + 1, drafted)
    tl.store(line + J + 2, behind)
    tl.store(line + J + 3, fault.to(tl.int64))
    tl.store(counts + b, count)
    tl.store(table + PREVIOUS * N + b, tl.where(count > 1, newest_but_one, tl.where(count == 1, last, previous)))
    tl.store(table + LAST * N + b, tl.where(count > 0, newest, last))
    tl.store(table + BEHIND * N + b, behind)
    tl.store(table + LENGTH * N + b, length + count)
    tl.store(table + END * N + b, tl.where(fault, 0, end))
