"""Attend to the keys and values of a pool in Triton: short passes over long texts, for every row of a batch at once.

The launches depend on shapes only. How long each row is, is read on the device, so that one CUDA graph serves a growing
text.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from draftproof.core.device import current_device
from draftproof.core.distribution import LOG2_E
from draftproof.kernels.call import DTYPES
from draftproof.kernels.compile import Step, constant, kind_of, overlaps, run
from draftproof.kernels.device.attention import attend, merge
from draftproof.kernels.launch import MULTIPROCESSORS

MOST_WIDTH: Final = 64
"""Tokens of a row in a pass: the bits of a mask of ancestors."""

MOST_SIZE: Final = 256
"""Numbers in a key or value: what a tile has registers and shared memory for."""

LEAST_ROWS: Final = 16
MOST_ROWS: Final = 64
MOST_FLOAT32_ROWS: Final = 32
"""Rows of a query tile: at least those of a tensor core's instruction, and at most those of a Hopper instruction.
float32 is multiplied without tensor cores; with 64 rows, ptxas gives it 7 KB of stack and the kernel fails."""

LEAST_KEYS: Final = 256
"""Keys of a split, at least. Shorter ones are faster for a single row of a thousand tokens and slower for all others:
at 64 query rows, writing and reading the sums of 256 keys takes half as long as reading the keys and values."""

MOST_SPLITS: Final = 256
"""Splits of a row over all its key heads, at most: two programs for each multiprocessor of an H200. It is the same for
all batches, so that the result of a row does not depend on the batch."""

TILE_BYTES: Final = 32768
"""Keys and values loaded at a time by a program: with two of them in flight, two programs fit a multiprocessor."""

STAGES: Final = 3
"""Steps of the software pipeline: two tiles in flight, one in use."""

WARPS: Final = 4
WIDE_WARPS: Final = 8
WIDE: Final = 64 * 128
"""Sums of a query tile (rows · value size), above which 4 warps run out of registers."""

MERGE_WARPS: Final = 1
"""Warps of a program that merges the splits of one token and head."""

PROGRAMS: Final = 8 * MULTIPROCESSORS
"""Programs of a launch, about; large batches have more, as a row has LEAST_PROGRAMS for each key head at least."""

LEAST_PROGRAMS: Final = 4
"""Programs for a row and key head, at least: a long row in a large batch would otherwise be the last to end."""

for _kernel in (attend, merge):
    getattr(_kernel, "cache_key", None)  # after the kernels of `launch`, for the reason given there


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    widths: Tensor | None = None,
    *,
    scale: float,
    capacity: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    ancestors: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the attention of every token of a pass, [B, T, heads, value size], without a device sync.

    query         [B, T, heads, size]; token t of row b has its key in slot starts[b] + lengths[b] + t
    keys, values  [slots, kv heads, size] and [slots, kv heads, value size]: the pool of a layer
    starts        [B]: first slot of each row, whose slots are consecutive
    lengths       [B]: tokens of each row before this pass; token n of them has position n
    widths        [B]: tokens of each row in this pass, at most T; None: T. The attention of padding tokens is 0, and a
                  row of width 0 reads nothing
    scale         factor of the dot products
    capacity      most tokens of any row, this pass included; None: the slots of the pool. Intermediate sums take
                  memory in proportion; the result does not depend on it
    window        attend to the last `window` positions only, the token's own counted in
    chunk         attend to positions of the token's own chunk only: those with the same position // chunk (Llama 4)
    softcap       replace a score x by softcap · tanh(x / softcap) (Gemma 2)
    sinks         [heads]: a score for each head that takes a share of the attention and has no value (GPT-OSS)
    alibi_slopes  [heads]: subtract slope · distance in positions from the scores (the slope of a model that scales its
                  bias like the dot products is to be scaled by the caller)
    ancestors     [B, T, T] bool, or [B, T] int64 bits (`ancestor_bits`): the tokens of this pass that each token
                  attends to, itself included; None: all before it and itself
    positions     [B, T]: positions of the tokens in a tree, for `window`, `chunk` and `alibi_slopes`; None: lengths + t

    The result of a row has the same bits in every run, whatever the other rows and their number. In a pass of another
    width T, a token's last bits may differ.
    """
    if ancestors is not None and ancestors.dtype == torch.bool:
        ancestors = ancestor_bits(ancestors)
    call = AttentionCall(
        query, keys, values, starts, lengths, widths, scale, capacity, window, chunk, softcap, sinks, alibi_slopes,
        ancestors, positions,
    )  # fmt: skip
    call.check()
    B, T, heads, _ = query.shape
    out = torch.empty(B, T, heads, values.shape[-1], dtype=query.dtype, device=query.device)
    if out.numel():
        with current_device(query.device):
            for n, step in enumerate(plan_attention(call, out, overlap=overlaps(query.device))):
                run(step, overlap=n > 0 and overlaps(query.device))
    return out


def ancestor_bits(ancestors: Tensor) -> Tensor:
    """Pack a mask of ancestors [B, T, T] into int64 words [B, T]: bit i of word t says that t attends to token i."""
    i = torch.arange(ancestors.shape[-1], device=ancestors.device)
    # bit 63 is the sign bit: as all bits are distinct, the wrapping sum is the word
    words: Tensor = (ancestors.long() << i).sum(-1)
    return words


class AttentionCall(NamedTuple):
    """Arguments of `decode_attention`, documented there; ancestors are bits."""

    query: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    lengths: Tensor
    widths: Tensor | None
    scale: float
    capacity: int | None
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    ancestors: Tensor | None
    positions: Tensor | None

    @property
    def group(self) -> int:
        """Return the number of query heads that share a key head."""
        return self.query.shape[2] // self.keys.shape[1]

    def check(self) -> None:
        """Refuse arguments that the kernels would get wrong, by shapes and dtypes only, without a device sync."""
        self._check_query()
        self._check_pool()
        B, T, heads, _ = self.query.shape
        whole, real = (torch.int32, torch.int64), (*DTYPES,)
        _check_tensor("starts", self.starts, (B,), whole)
        _check_tensor("lengths", self.lengths, (B,), whole)
        _check_tensor("widths", self.widths, (B,), whole)
        _check_tensor("positions", self.positions, (B, T), whole)
        _check_tensor("ancestors", self.ancestors, (B, T), (torch.int64,))
        _check_tensor("sinks", self.sinks, (heads,), real)
        _check_tensor("alibi_slopes", self.alibi_slopes, (heads,), real)
        for name in ("capacity", "window", "chunk", "softcap"):
            if (number := getattr(self, name)) is not None and not number > 0:
                raise ValueError(f"{name} must be above 0, or None for no limit; got {number}")

    def _check_query(self) -> None:
        query = self.query
        if query.ndim != 4 or query.dtype not in DTYPES or query.stride(-1) != 1:
            raise ValueError(
                "query must be [B, T, heads, size], of float32, bfloat16 or float16, with its last axis contiguous; "
                f"got {query.dtype} {list(query.shape)} with strides {query.stride()}"
            )
        if query.shape[1] > MOST_WIDTH or query.shape[3] > MOST_SIZE:
            raise ValueError(
                f"query may have at most {MOST_WIDTH} tokens and {MOST_SIZE} numbers in a head; got "
                f"{query.shape[1]} and {query.shape[3]}: use prefill attention for longer passes"
            )

    def _check_pool(self) -> None:
        query, keys, values = self.query, self.keys, self.values
        for name, x in (("keys", keys), ("values", values)):
            if x.ndim != 3 or x.dtype != query.dtype or x.stride(-1) != 1 or x.shape[:2] != keys.shape[:2]:
                raise ValueError(
                    f"{name} must be [slots, kv heads, size], {query.dtype} like query, with the last axis contiguous, "
                    f"and keys and values of the same slots and heads; got {x.dtype} {list(x.shape)} with strides "
                    f"{x.stride()}"
                )
        if keys.shape[2] != query.shape[3] or not keys.shape[1] or query.shape[2] % keys.shape[1]:
            raise ValueError(
                f"query {list(query.shape)} must have the size of keys {list(keys.shape)} and a multiple of their heads"
            )
        if not 0 < values.shape[2] <= MOST_SIZE:
            raise ValueError(f"values may have at most {MOST_SIZE} numbers in a head; got {values.shape[2]}")


def _check_tensor(name: str, x: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a tensor of another shape or dtype, or one that is not contiguous."""
    if x is not None and (tuple(x.shape) != shape or x.dtype not in dtypes or not x.is_contiguous()):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be {wanted} {list(shape)} and contiguous; got {x.dtype} {list(x.shape)} with strides "
            f"{x.stride()}"
        )


class Sizes(NamedTuple):
    """Numbers of a call. T and splits are floats: Triton would compile anew for an integer that is 1 or 16 · n."""

    T: Any
    splits: Any
    kv_heads: Any
    size: Any
    value_size: Any
    window: Any
    chunk: Any
    scale: Any  # to units of log 2; with a soft cap, to units of the cap
    softcap: Any


class Strides(NamedTuple):
    """Strides in elements: from row to row, token to token and head to head; of the pool, slot to slot."""

    query: Any
    query_token: Any
    query_head: Any
    key: Any
    key_head: Any
    value: Any
    value_head: Any


class Traits(NamedTuple):
    """Compile-time constants of the kernels. What is off costs nothing."""

    GROUP: Any  # query heads that share a key head
    ROWS: Any  # rows of a query tile
    KEYS: Any  # keys loaded at a time
    LEAST: Any  # keys of a split, at least
    SIZE: Any  # a power of 2, at least the size of a key
    SIZE_PADDED: Any  # it is more
    VALUE_SIZE: Any
    VALUE_PADDED: Any
    STAGES: Any
    RAGGED: Any  # rows have widths
    WINDOWED: Any
    CHUNKED: Any
    CAPPED: Any
    SINKS: Any
    ALIBI: Any
    TREE: Any
    PLACED: Any  # positions are given, and matter
    OVERLAP: Any  # `merge` may start while `attend` ends (Hopper and later)


class Batch(NamedTuple):
    """Pointers to all tensors of a call, and its sizes."""

    query: Any
    key_pool: Any
    value_pool: Any  # not `values`: Triton's tuples have an attribute of that name
    starts: Any
    lengths: Any
    widths: Any
    sinks: Any
    slopes: Any
    ancestors: Any
    positions: Any
    out: Any  # [B, T, heads, value size]
    sums: Any  # [B, kv heads, splits, T · G, value size]: values weighted by exponentials, float32
    stats: Any  # [B, kv heads, splits, T · G, 2]: largest score, sum of exponentials
    strides: Any
    sizes: Any
    traits: Any


def plan_attention(call: AttentionCall, out: Tensor, *, overlap: bool) -> list[Step]:
    """Return the launches of a call."""
    B, T, heads, size = call.query.shape
    kv_heads, value_size = call.values.shape[1:]
    traits = _traits(call, overlap)
    splits = _splits(call)
    lines = B * heads * T * splits if splits > 1 else 1
    sums = torch.empty(lines * value_size, dtype=torch.float32, device=out.device)
    stats = torch.empty(lines * 2, dtype=torch.float32, device=out.device)
    unused = call.lengths  # placeholder for a pointer that is never dereferenced
    optional = (call.widths, call.sinks, call.alibi_slopes, call.ancestors, call.positions)
    pointers = (
        call.query, call.keys, call.values, call.starts, call.lengths,
        *(unused if tensor is None else tensor for tensor in optional), out, sums, stats,
    )  # fmt: skip
    factor = LOG2_E if call.softcap is None else 1 / call.softcap
    numbers = (kv_heads, size, value_size, call.window or 0, call.chunk or 0)
    strides = Strides(*call.query.stride()[:3], *call.keys.stride()[:2], *call.values.stride()[:2])
    sizes = Sizes(float(T), float(splits), *numbers, call.scale * factor, call.softcap or 0.0)
    batch = Batch._make((*pointers, strides, sizes, _constants(traits)))
    kind = kind_of(traits, pointers, (*strides, *numbers))
    tiles = -(-T * call.group // traits.ROWS)
    programs = max(PROGRAMS // (B * kv_heads * tiles), LEAST_PROGRAMS)
    warps = WIDE_WARPS if traits.ROWS * traits.VALUE_SIZE > WIDE else WARPS
    steps = [Step(attend, (kv_heads * tiles, min(programs, splits), B), (batch,), warps, kind)]
    if splits > 1:
        steps.append(Step(merge, (T * call.group, kv_heads, B), (batch,), MERGE_WARPS, kind))
    return steps


def _splits(call: AttentionCall) -> int:
    """Return the splits of a row, at most: a single long row fills the device, whatever the batch."""
    capacity = call.keys.shape[0] if call.capacity is None else min(call.capacity, call.keys.shape[0])
    for limit in (call.window, call.chunk):
        # keys of earlier passes inside the limit of any token of this pass, and the pass
        capacity = capacity if limit is None else min(capacity, limit + call.query.shape[1])
    return max(1, min(MOST_SPLITS // call.keys.shape[1], capacity // LEAST_KEYS))


def _traits(call: AttentionCall, overlap: bool) -> Traits:
    """Return the compile-time constants of a call, as numbers."""
    size, value_size = call.keys.shape[2], call.values.shape[2]
    padded, value_padded = (max(_power_of_2(n), LEAST_ROWS) for n in (size, value_size))
    most = MOST_FLOAT32_ROWS if call.keys.dtype == torch.float32 else MOST_ROWS
    rows = min(max(_power_of_2(call.query.shape[1] * call.group), LEAST_ROWS), most)
    keys = TILE_BYTES // (2 * max(padded, value_padded) * call.keys.element_size())
    by_position = call.window is not None or call.chunk is not None or call.alibi_slopes is not None
    return Traits(
        GROUP=call.group,
        ROWS=rows,
        KEYS=min(max(keys, 16), 128),
        LEAST=LEAST_KEYS,
        SIZE=padded,
        SIZE_PADDED=padded > size,
        VALUE_SIZE=value_padded,
        VALUE_PADDED=value_padded > value_size,
        STAGES=STAGES,
        RAGGED=call.widths is not None,
        WINDOWED=call.window is not None,
        CHUNKED=call.chunk is not None,
        CAPPED=call.softcap is not None,
        SINKS=call.sinks is not None,
        ALIBI=call.alibi_slopes is not None,
        TREE=call.ancestors is not None,
        PLACED=call.positions is not None and by_position,
        OVERLAP=overlap,
    )


@lru_cache(maxsize=256)
def _constants(traits: Traits) -> Traits:
    """Return the traits as constexprs."""
    return Traits(*(constant(int(value)) for value in traits))


def _power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()
