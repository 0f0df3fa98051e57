"""Pack tokens of many rows, each with its own width, into one pass, and attend row by row over a KV pool.

No row computes padding, and none attends beyond its own length. A row's attention sees its own extent only, so its
bits do not depend on its neighbours.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from draftproof.core.tree import lineage


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


class Piece(NamedTuple):
    """A span as one kind of layer attends to it: where its tokens are in the pass, its keys' slots, and its bias."""

    tokens: slice
    keys: slice
    width: int
    bias: Float[Tensor, "1 1 G S"] | None


@dataclass(slots=True)
class PackedPass:
    """The tokens of a pass, span after span, and what each may attend to.

    `kinds` are the kinds of attention layers in the model, with the window of each (None: full attention).
    """

    tokens: Int[Tensor, " N"]
    spans: Sequence[Span]
    kinds: Sequence[tuple[str, int | None]]
    _pieces: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)

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
        pieces = self.pieces(kind, group, query.dtype)
        return attend(pieces, query, keys, values, scaling, extras.get("softcap"), extras.get("s_aux"))


class PoolPass(Protocol):
    """A pass whose rows lie in a KV pool: a `PackedPass`, or on a GPU a `DevicePass`."""

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
"""The pass over a pool that this thread runs; None where passes are rectangular."""


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
    bias = _bias(span, first, kind, size, group, dtype, device)
    return Piece(slice(stop - span.width, stop), keys, span.width, bias)


def _bias(
    span: Span, first: int, kind: str, size: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "1 1 G S"] | None:
    """Return what is added to the scores of a span's tokens; None if every token attends to every key."""
    if span.width == 1:
        return None
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


def attend(
    pieces: Sequence[Piece],
    query: Float[Tensor, "1 h N d"],
    keys: Float[Tensor, "1 g S d"],
    values: Float[Tensor, "1 g S e"],
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "1 N h e"]:
    """Attend piece by piece; query heads that share keys are folded into one longer query."""
    heads, shared = query.shape[1], keys.shape[1]
    out = query.new_empty(1, query.shape[2], heads, values.shape[3])
    for piece in pieces:
        k, v = keys[:, :, piece.keys], values[:, :, piece.keys]
        folded = query[:, :, piece.tokens].reshape(1, shared, -1, query.shape[3])
        if softcap is None and sinks is None:
            attended = scaled_dot_product_attention(folded, k, v, attn_mask=piece.bias, scale=scaling)
        else:
            attended = _attended_with_extras(folded, k, v, piece.bias, scaling, softcap, sinks)
        out[:, piece.tokens] = attended.reshape(1, heads, piece.width, -1).transpose(1, 2)
    return out


def _attended_with_extras(
    q: Float[Tensor, "B g n d"],
    k: Float[Tensor, "B g S d"],
    v: Float[Tensor, "B g S e"],
    bias: Float[Tensor, "1 1 n S"] | None,
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
