"""Pack tokens of many rows, each with its own width, into one pass, and attend row by row over a KV pool.

No row computes padding, and none attends beyond its own length. A row's attention sees its own extent only, so its
bits do not depend on its neighbours.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from draftproof.core.tree import lineage

FEW_SCORES: Final = 6144
"""Scores of a head up to which a span of several tokens is attended to query by query in the compiled call, where its
queries cannot be lanes of vectors (a tree); beyond, torch's attention is faster. A single token always is."""

FEW_QUERIES: Final = 16
"""Queries that share keys, of tokens that attend to all before them, up to which they are attended to one by one, too:
more of them are lanes of vectors (compiled/attention.py), where these have sixteen."""


Table = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one row in a pass.

    start    the row's first slot in the pool
    before   tokens of the row that come before the span, all of them cached
    width    tokens of the span; they are written to the slots after those
    parents  for a tree: the span's first token is the root, and parents[i] is the parent of slot i (-1: the root)
    """

    start: int
    before: int
    width: int
    parents: Int[Tensor, " K"] | None = None

    @property
    def stop(self) -> int:
        """Return the row's length with the span."""
        return self.before + self.width


@dataclass(slots=True)
class Piece:
    """A span as one kind of layer attends to it.

    tokens  where its tokens are in the pass
    keys    the slots that its tokens attend to
    width   how many tokens it has
    bias    what is added to the scores of its tokens, or a function that makes it when it is needed first; None: every
            token attends to every key
    causal  if each token attends to all tokens before it and itself, within a window: those; None for trees
    """

    tokens: slice
    keys: slice
    width: int
    bias: "Float[Tensor, '1 1 G S'] | Callable[[], Float[Tensor, '1 1 G S']] | None"
    causal: "Causal | None" = None

    def made_bias(self) -> Float[Tensor, "1 1 G S"] | None:
        """Return the bias; it is made once."""
        if callable(self.bias):
            self.bias = self.bias()
        return self.bias


class Causal(NamedTuple):
    """The slot of a row's first token, the tokens before a span, and the positions that a token attends to, 0: all."""

    start: int
    before: int
    window: int


@dataclass(slots=True)
class PackedPass:
    """The tokens of a pass, span after span, and what each may attend to.

    `kinds` are the kinds of attention layers in the model, with the window of each (None: full attention).
    """

    tokens: Int[Tensor, " N"]
    spans: Sequence[Span]
    kinds: Sequence[tuple[str, int | None]]
    _pieces: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)
    _divided: dict[tuple[int, int], "Divided"] = field(default_factory=dict)

    @property
    def slots(self) -> Int[Tensor, " N"]:
        """Return where each token's keys and values are written."""
        runs = [np.arange(span.start + span.before, span.start + span.stop) for span in self.spans]
        return torch.from_numpy(np.concatenate(runs)).to(self.tokens.device, non_blocking=True)

    @property
    def positions(self) -> Int[Tensor, " N"]:
        """Return each token's position in its row; in a tree that is its depth."""
        return torch.cat([_positions(span, self.tokens.device) for span in self.spans])

    def placeholders(self) -> dict[str, Tensor]:
        """Return a mask for each kind of layer that only names the kind, by its width: `attention` reads it.

        transformers hands four-dimensional masks through to the attention as they are.
        """
        device = self.tokens.device
        return {
            kind: torch.ones((1, 1, 1, i + 1), dtype=torch.bool, device=device)
            for i, (kind, _) in enumerate(self.kinds)
        }

    def pieces(self, kind: int, group: int, dtype: torch.dtype) -> list[Piece]:
        """Return the spans as layers of a kind attend to them; made once for all layers of the kind.

        `group` is the number of query heads that share keys: they are folded into one longer query.
        """
        if (kind, group) not in self._pieces:
            stops = accumulate(span.width for span in self.spans)
            self._pieces[kind, group] = [
                _piece(span, stop, *self.kinds[kind], group, dtype, self.tokens.device)
                for span, stop in zip(self.spans, stops, strict=True)
            ]
        return self._pieces[kind, group]

    def attention(
        self,
        query: Float[Tensor, "1 h N d"],
        keys: Float[Tensor, "1 g S d"],
        values: Float[Tensor, "1 g S e"],
        mask: Tensor | None,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> Float[Tensor, "1 N h e"]:
        """Attend span by span; each reads its row's extent of the pool."""
        kind, group = 0 if mask is None else mask.shape[-1] - 1, query.shape[1] // keys.shape[1]
        softcap, sinks = extras.get("softcap"), extras.get("s_aux")
        if (kind, group) not in self._divided:
            pieces = self.pieces(kind, group, query.dtype)
            self._divided[kind, group] = divide(pieces, query, keys, values, softcap is None and sinks is None)
        return attend(self._divided[kind, group], query, keys, values, scaling, softcap, sinks)


@runtime_checkable
class PoolPass(Protocol):
    """A pass whose rows lie in a KV pool: a `PackedPass`, a `RectanglePass`, or on a GPU a `DevicePass`."""

    def attention(
        self,
        query: Float[Tensor, "1 h N d"],
        keys: Float[Tensor, "1 g S d"],
        values: Float[Tensor, "1 g S e"],
        mask: Tensor | None,
        scaling: float | None,
        extras: dict[str, Any],
    ) -> Float[Tensor, "1 N h e"]:
        """Attend to each row's keys: `keys` and `values` are a layer's whole pool."""
        ...


running: ContextVar[PoolPass | None] = ContextVar("pass over a pool", default=None)
"""The pass over a pool that this thread runs; None where keys and values are in a slot cache."""


@contextmanager
def attending(this: PoolPass) -> Iterator[None]:
    """Let a pass over a pool answer the attention layers within the context."""
    token = running.set(this)
    try:
        yield
    finally:
        running.reset(token)


def _positions(span: Span, device: torch.device) -> Int[Tensor, " T"]:
    if span.parents is None:
        return torch.arange(span.before, span.stop, device=device)
    return span.before + lineage(span.parents[None])[0].sum(1) - 1


def _piece(
    span: Span, stop: int, kind: str, size: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> Piece:
    first = 0
    if size is not None:  # keys that not even the first token may attend to
        first = span.before // size * size if kind == "chunked_attention" else max(0, span.before - size + 1)
    keys = slice(span.start + first, span.start + span.stop)
    bias = None if span.width == 1 else partial(_bias, span, first, kind, size, group, dtype, device)
    is_causal = span.parents is None and kind != "chunked_attention"
    causal = Causal(span.start, span.before, size or 0) if is_causal else None
    return Piece(slice(stop - span.width, stop), keys, span.width, bias, causal)


def _bias(
    span: Span, first: int, kind: str, size: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "1 1 G S"]:
    """Return what is added to the scores of a span's tokens."""
    columns, own = torch.arange(first, span.stop, device=device), _positions(span, device)
    if span.parents is None:
        visible = columns <= own[:, None]
    else:
        before = torch.ones((span.width, span.before - first), dtype=torch.bool, device=device)
        visible = torch.cat([before, lineage(span.parents[None])[0]], 1)
        columns = torch.cat([columns[: span.before - first], own])
    if size is not None and kind == "chunked_attention":
        visible = visible & (own[:, None] // size == columns // size)
    elif size is not None:
        visible = visible & (own[:, None] - columns < size)
    # Additive: on a CPU a boolean mask is converted in every call, which takes as long as the attention.
    bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    return bias.repeat(group, 1)[None, None]


class Few(NamedTuple):
    """Pieces of few queries as a table of numbers, which the compiled loops read (compiled/layer.py)."""

    table: Table
    biases: list[Tensor | None]
    """What the table has addresses of."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "Few | None":
        biases = [piece.made_bias() if piece.causal is None else None for piece in pieces]
        rows = [
            (piece.tokens.start, piece.width, piece.keys.start, _reach(piece), 0 if bias is None else bias.data_ptr(),
             0 if piece.causal is None else piece.causal.window)
            for piece, bias in zip(pieces, biases, strict=True)
        ]  # fmt: skip
        return cls(np.array(rows, dtype=np.int64), biases) if rows else None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """Attend with all tokens of the table in one call, and write to `out`."""
        room = (int(self.table[:, 3].max()) + 15) // 16 * 64
        _run_compiled(compiled_layer().ATTEND, self.table, room, query, keys, values, scale, out)


class Many(NamedTuple):
    """Pieces of many queries, which are lanes of vectors (compiled/attention.py), as a table of numbers."""

    table: Table
    vectors: int

    @classmethod
    def of(cls, pieces: Sequence[Piece], group: int, shared: int) -> "Many | None":
        if not pieces:
            return None
        from draftproof.core.simd import LANES

        rows, vectors = [], 0
        for piece in pieces:
            assert piece.causal is not None
            rows.append((piece.tokens.start, piece.width, *piece.causal, vectors))
            vectors += shared * -(-group * piece.width // LANES)
        return cls(np.array(rows, dtype=np.int64), vectors)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
        """Attend with all tokens of the table in one call, and write to `out`."""
        from draftproof.models.compiled.attention import scratch_bytes

        group = query.shape[1] // keys.shape[1]
        room = scratch_bytes(group * int(self.table[:, 1].max()), query.shape[3], values.shape[3])
        _run_compiled(compiled_layer().ATTEND_MANY, self.table, room, query, keys, values, scale, out, self.vectors)


def _run_compiled(
    region: int, table: Table, room: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor,
    vectors: int = 0,
) -> None:  # fmt: skip
    """Run a compiled region that attends; `room` are the bytes of scratch that a thread needs."""
    from draftproof.core.simd import START

    threads = torch.get_num_threads()
    factor, scratch = np.array([scale], dtype=np.float32), np.empty(threads * room, dtype=np.uint8)
    call = np.array(
        [len(table), table.ctypes.data, query.data_ptr(), *query.stride()[1:3], keys.data_ptr(), *keys.stride()[1:3],
         values.data_ptr(), *values.stride()[1:3], out.data_ptr(), query.shape[1], keys.shape[1], query.shape[3],
         values.shape[3], factor.ctypes.data, scratch.ctypes.data, room, vectors],
        dtype=np.int64,
    )  # fmt: skip
    START(region, call.ctypes.data, threads, 0)


class Divided(NamedTuple):
    """Pieces of a pass, divided into those that compiled calls attend to (if any) and the others."""

    few: Few | None
    many: Many | None
    others: Sequence[Piece]


@cache
def compiled_layer() -> Any:
    """Return the module of compiled steps of layers; None without numba, or where threads are not GNU's."""
    if find_spec("numba") is None or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    from draftproof.models.compiled import layer

    return layer


@cache
def fewest_lanes() -> int | float:
    """Return from how many queries that share keys on they are lanes of vectors: never, if vectors have fewer lanes."""
    if compiled_layer() is None or not torch.cpu._is_avx512_supported():
        return math.inf
    from draftproof.models.compiled.attention import FEWEST

    return FEWEST


def divide(pieces: Sequence[Piece], query: Tensor, keys: Tensor, values: Tensor, plain: bool = True) -> Divided:
    """Divide pieces by how they are attended to: that depends on a piece alone, never on others. `plain`: no extras."""
    is_float32 = all(each.dtype == torch.float32 and each.stride(-1) == 1 for each in (query, keys, values))
    if not (plain and is_float32 and query.device.type == "cpu") or compiled_layer() is None:
        return Divided(None, None, pieces)
    group = query.shape[1] // keys.shape[1]
    few: list[Piece] = []
    many: list[Piece] = []
    others: list[Piece] = []
    for piece in pieces:
        if piece.causal is not None and group * piece.width >= fewest_lanes():
            many.append(piece)
        elif piece.width == 1 or piece.width * _reach(piece) <= FEW_SCORES or _is_short(piece, group):
            few.append(piece)
        else:
            others.append(piece)
    return Divided(Few.of(few), Many.of(many, group, keys.shape[1]), others)


def _is_short(piece: Piece, group: int) -> bool:
    return piece.causal is not None and group * piece.width <= FEW_QUERIES


def _reach(piece: Piece) -> int:
    return int(piece.keys.stop - piece.keys.start)


def attend(
    work: Divided | Sequence[Piece],
    query: Float[Tensor, "1 h N d"],
    keys: Float[Tensor, "1 g S d"],
    values: Float[Tensor, "1 g S e"],
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "1 N h e"]:
    """Attend piece by piece, compiled where that is served; query heads that share keys are one longer query."""
    heads, shared = query.shape[1], keys.shape[1]
    few, many, others = work if isinstance(work, Divided) else divide(work, query, keys, values)
    out = query.new_empty(1, query.shape[2], heads, values.shape[3])
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    for compiled in (few, many):
        if compiled is not None:
            compiled.attend(query, keys, values, scale, out)
    for piece in others:
        bias = piece.made_bias()
        k, v = keys[:, :, piece.keys], values[:, :, piece.keys]
        folded = query[:, :, piece.tokens].reshape(1, shared, -1, query.shape[3])
        if softcap is None and sinks is None:
            attended = scaled_dot_product_attention(folded, k, v, attn_mask=bias, scale=scaling)
        else:
            attended = attended_with_extras(folded, k, v, bias, scaling, softcap, sinks)
        out[:, piece.tokens] = attended.reshape(1, heads, piece.width, -1).transpose(1, 2)
    return out


def attended_with_extras(
    q: Float[Tensor, "B g n d"],
    k: Float[Tensor, "B g S d"],
    v: Float[Tensor, "B g S e"],
    bias: Float[Tensor, "_ 1 n S"] | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Float[Tensor, " h"] | None,
) -> Float[Tensor, "B g n e"]:
    """Attend with scores that saturate (Gemma 2) or a sink, a score without a value (GPT-OSS)."""
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        group = q.shape[2] * k.shape[1] // sinks.numel()  # query tokens of each head
        column = sinks.reshape(1, k.shape[1], -1, 1).repeat_interleave(group, 2).to(scores.dtype)
        scores = torch.cat([scores, column.expand(len(scores), -1, -1, -1)], -1)
    weights = nn.functional.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return weights[..., : k.shape[2]] @ v


def check_pass(tokens: Tensor, parents: Tensor | None, scored: int | None, rows: int) -> None:
    """Raise if the arguments of a pass do not fit each other, or a cache of this many rows."""
    B, T = tokens.shape
    if rows != B or T == 0:
        raise ValueError(f"tokens {(B, T)} must have {rows} rows, as the cache has, and at least one column")
    if parents is not None and parents.shape != (B, T - 1):
        raise ValueError(
            f"parents {tuple(parents.shape)} must name a parent for each token after the root: {(B, T - 1)}"
        )
    if scored is not None and not 1 <= scored <= T:
        raise ValueError(f"scored={scored}, but the pass has {T} tokens: give 1 to {T}, or None for all")


def check_layers(layers: Sequence[int], total: int) -> None:
    """Raise if hidden states are requested after a layer that the model does not have."""
    for layer in layers:
        if not 1 <= layer <= total:
            raise ValueError(f"layers={tuple(layers)}: the model has layers 1 to {total}, there is no {layer}")
