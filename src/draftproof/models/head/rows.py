"""A head's rows in a KV pool: packed on a CPU, where each row attends to its own extent, gathered on a GPU.

In rounds that stay on a GPU the attention kernel reads the pool: nothing is gathered, and nothing depends on lengths.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu, to_device
from draftproof.models.compiled_pass import Attended
from draftproof.models.cuda_graphs import CapturedGraphs, GraphCache
from draftproof.models.device_pass import DevicePass
from draftproof.models.extents import PAGE
from draftproof.models.head.compiled import Chain, Choice, CompiledHead, Places
from draftproof.models.head.network import FittedHead, Head, PooledNetwork, attend, rounded
from draftproof.models.packed import PackedPass, Piece, Span
from draftproof.models.packed import attend as attend_by_row
from draftproof.models.pool import KVPool

FULL = (("full_attention", None),)


def pools(head: FittedHead) -> bool:
    """Return whether a pool serves a head: on a CPU, where passes are packed, only one that was trained here."""
    return isinstance(head.head, Head) or (isinstance(head.head, PooledNetwork) and not is_cpu(head.table.device))


class HeadRows:
    """The pool of a head: a row's entry i belongs to the target's state at token i and the embedding of token i + 1."""

    def __init__(self, head: FittedHead, pages: int) -> None:
        if not pools(head):
            raise TypeError(f"a pool does not serve {type(head.head).__name__} on {head.table.device.type}")
        assert isinstance(head.head, PooledNetwork)
        self._head, self._network = head, head.head
        device = head.table.device
        self.pool = KVPool(self._network.kv_shapes, pages, device, spare=0 if is_cpu(device) else 1)
        self._scratch = pages * PAGE
        """First slot of a page that belongs to no row, on a GPU: padding is written there."""
        if not is_cpu(device):
            # A gathered row is read as far as the longest: a masked slot has weight zero, and zero times NaN is NaN.
            for buffer in (*self.pool.keys, *self.pool.values):
                buffer.zero_()
        self.compiled = CompiledHead.of(head) if is_cpu(device) else None
        self.recordings = CapturedGraphs()
        """CUDA graphs of steps over these buffers."""

    def write(
        self, tokens: Int[Tensor, " N"], h: Float[Tensor, "N H"], rows: Sequence[int], starts: Sequence[int],
        widths: Sequence[int],
    ) -> None:  # fmt: skip
        """Write the entries of some rows' tokens, packed, of which only keys and values are of use.

        On a CPU a head has one layer, whose keys and values need nothing of what comes after them.
        """
        if is_cpu(tokens.device):
            self._write_packed(tokens, h, rows, starts, widths)
            return
        widths = list(widths)
        for row, start, own, states in zip(rows, starts, tokens.split(widths), h.split(widths), strict=True):
            positions = torch.arange(start, start + len(own), device=own.device)[None]
            self.gathered_states(start + len(own), own[None], states[None], positions, self.starts([row]))

    def _write_packed(
        self, tokens: Int[Tensor, " N"], h: Float[Tensor, "N H"], rows: Sequence[int], starts: Sequence[int],
        widths: Sequence[int],
    ) -> None:  # fmt: skip
        spans = [Span(self._start(row), at, width) for row, at, width in zip(rows, starts, widths, strict=True)]
        this, [keys], [values] = PackedPass(tokens, spans, FULL), self.pool.keys, self.pool.values
        if self.compiled is not None:
            self.compiled.write(tokens, h, this.positions, [Attended.of(span) for span in spans], keys, values)
            return
        assert isinstance(self._network, Head)
        _, k, v = self._network.heads(self._head.embedded(tokens)[None], h[None], this.positions[None])
        self._store(k, v, this.slots)

    def _store(self, k: Float[Tensor, "1 g N d"], v: Float[Tensor, "1 g N d"], slots: Int[Tensor, " N"]) -> None:
        [keys], [values] = self.pool.keys, self.pool.values
        keys.index_copy_(0, slots, k[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, slots, v[0].transpose(0, 1).to(values.dtype))

    def packed_states(
        self, tokens: Int[Tensor, " N"], h: Float[Tensor, "N H"], rows: Sequence[int], starts: Sequence[int],
        widths: Sequence[int],
    ) -> Float[Tensor, "N H"]:  # fmt: skip
        """Return the states after the tokens of some rows, packed: widths[b] of row b, from entry starts[b] on."""
        spans = [Span(self._start(row), at, width) for row, at, width in zip(rows, starts, widths, strict=True)]
        this = PackedPass(tokens, spans, FULL)
        if self.compiled is not None:
            return self._run_compiled(tokens, h, this.positions, [Attended.of(span) for span in spans])
        return self._packed(tokens, h, this.positions, this.slots, this.pieces(0, self._group, torch.float32))

    def packed_level(
        self, tokens: Int[Tensor, "B w"], h: Float[Tensor, "B w H"], rows: Sequence[int], starts: Sequence[int],
        lineage: Bool[Tensor, "B w M"],
    ) -> Float[Tensor, "B w H"]:  # fmt: skip
        """Return the states after a level of each row's tree, the last w of its M nodes, which begin at starts[b]."""
        B, w, M = lineage.shape
        positions = (torch.tensor(list(starts))[:, None] + lineage.sum(2) - 1).flatten()
        if self.compiled is not None:
            spans = [
                Attended(self._start(row), before + M - w, w, seen, before)
                for row, before, seen in zip(rows, starts, lineage, strict=True)
            ]
            return self._run_compiled(tokens.flatten(), h.flatten(0, 1), positions, spans).view(B, w, -1)
        pieces, slots = [], []
        for b, (row, before) in enumerate(zip(rows, starts, strict=True)):
            at = self._start(row)
            visible = torch.cat([torch.ones((w, before), dtype=torch.bool), lineage[b]], 1)
            bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf).repeat(self._group, 1)[None, None]
            pieces.append(Piece(slice(b * w, b * w + w), slice(at, at + before + M), w, bias))
            slots.append(torch.arange(at + before + M - w, at + before + M))
        return self._packed(tokens.flatten(), h.flatten(0, 1), positions, torch.cat(slots), pieces).view(B, w, -1)

    @property
    def _group(self) -> int:
        """Return how many query heads share a key head."""
        assert isinstance(self._network, Head)
        return self._network.shape.heads // self._network.shape.kv_heads

    def _run_compiled(
        self, tokens: Int[Tensor, " N"], h: Float[Tensor, "N H"], positions: Int[Tensor, " N"],
        spans: Sequence[Attended],
    ) -> Float[Tensor, "N H"]:  # fmt: skip
        [keys], [values] = self.pool.keys, self.pool.values
        assert self.compiled is not None
        return self.compiled.states(tokens, h, positions, spans, keys, values)

    def fuse(self, taps: Sequence[Float[Tensor, "*N T"]]) -> Float[Tensor, "*N H"]:
        """Combine the target's states after each tap into one state."""
        return self._network.fuse(taps) if self.compiled is None else self.compiled.fuse(taps)

    def logits(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N R"]:
        """Return the logits of the next token over the draft vocabulary, from the head's states."""
        return self.compiled.logits(h) if self.compiled is not None and self.compiled.drafts else self._head.logits(h)

    def draft(
        self, h: Float[Tensor, "B H"] | None, taps: Sequence[Float[Tensor, "N H"]], follow: Int[Tensor, " N"],
        rows: Sequence[int], at: Sequence[int], widths: Sequence[int], choice: Choice,
    ) -> tuple[Chain, Float[Tensor, "N H"] | None]:  # fmt: skip
        """Draft in one compiled call; see `CompiledHead.draft`."""
        [keys], [values] = self.pool.keys, self.pool.values
        assert self.compiled is not None
        places = Places([self._start(row) for row in rows], at, widths)
        return self.compiled.draft(h, taps, follow, places, choice, keys, values)

    def _packed(
        self, tokens: Int[Tensor, " N"], h: Float[Tensor, "N H"], positions: Int[Tensor, " N"],
        slots: Int[Tensor, " N"], pieces: Sequence[Piece],
    ) -> Float[Tensor, "N H"]:  # fmt: skip
        [keys], [values] = self.pool.keys, self.pool.values

        def attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._store(k, v, slots)
            made = attend_by_row(pieces, q, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            return made.transpose(1, 2)

        return self._network.over(self._head.embedded(tokens)[None], h[None], positions[None], attention)[0]

    def captured_states(
        self,
        graphs: GraphCache,
        reach: int,
        tokens: Int[Tensor, "B n"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        starts: Int[Tensor, " B"],
    ) -> Float[Tensor, "B n H"]:
        """Return the states after each row's tokens on a GPU; all positions are below `reach`.

        A step takes longer to launch than to run, so it is captured as a CUDA graph. The attention span is rounded up
        and masked, which keeps the number of shapes small.
        """
        reach = rounded(reach)
        body = partial(self._in_tuple, reach)
        return graphs.run(body, (tokens, h, positions, starts), reach, self.recordings)[0]

    def _in_tuple(
        self,
        reach: int,
        tokens: Int[Tensor, "B n"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        starts: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B n H"]]:
        return (self.gathered_states(reach, tokens, h, positions, starts),)

    def gathered_states(
        self,
        reach: int,
        tokens: Int[Tensor, "B n"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        starts: Int[Tensor, " B"],
        slots: Int[Tensor, "B n"] | None = None,
        visible: Bool[Tensor, "B n S"] | None = None,
    ) -> Float[Tensor, "B n H"]:
        """Return the states after each row's tokens, attending to its first `reach` entries; for a GPU.

        A row's keys and values are gathered from the pool: one layer's are few, and shapes stay the same.
        """
        slots = positions if slots is None else slots
        columns = torch.arange(reach, device=positions.device)
        if visible is None:
            visible = columns <= slots[:, :, None]
        written = (starts[:, None] + slots).flatten()
        # A row near the pool's end reads slots of other rows there, which are masked; never padding, which may be NaN.
        read = (starts[:, None] + columns).clamp_max(self._scratch - 1)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._written(layer, written, k, v)
            return attend(q, keys[read].transpose(1, 2), values[read].transpose(1, 2), visible)

        return self._network.over(self._head.embedded(tokens), h, positions, attention)

    def device_states(
        self, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], places: Int[Tensor, "3 B"]
    ) -> Float[Tensor, "B n H"]:
        """Return the states after each row's tokens, whose places only the device knows; see `DevicePass`.

        Shapes depend on the number of rows and the width alone, so that it can be recorded once for texts that grow.
        States of padding are undefined.
        """
        from draftproof.kernels import attention as kernels  # needs Triton, which a CPU does without

        this = DevicePass(tokens, places, self._scratch, self._scratch, FULL)
        slots = this.slots
        starts, lengths, widths = places

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._written(layer, slots, k, v)
            scale = q.shape[-1] ** -0.5
            attended = kernels.decode_attention(
                q.transpose(1, 2), keys, values, starts, lengths, widths, scale=scale, capacity=this.capacity
            )
            return attended.transpose(1, 2)

        return self._network.over(self._head.embedded(tokens), h, this.positions.view(tokens.shape), attention)

    def _written(
        self, layer: int, slots: Int[Tensor, " N"], k: Float[Tensor, "B g n d"], v: Float[Tensor, "B g n e"]
    ) -> tuple[Float[Tensor, "S g d"], Float[Tensor, "S g e"]]:
        """Write a layer's keys and values to these slots, and return all that its pool holds."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        for buffer, new in ((keys, k), (values, v)):
            buffer.index_copy_(0, slots, new.transpose(1, 2).flatten(0, 1).to(buffer.dtype))
        return keys, values

    def starts(self, rows: Sequence[int]) -> Int[Tensor, " B"]:
        """Return the first slot of each row, on the pool's device."""
        return to_device([self._start(row) for row in rows], self.pool.device)

    def _start(self, row: int) -> int:
        return self.pool.rows[row].extent.start
