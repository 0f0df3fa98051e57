"""Run a draft head on quantised weights as compiled calls, a whole draft as one; see models/compiled_pass.py."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.models.blocked import BLOCK, alternating_halves, plain
from draftproof.models.compiled_pass import (
    Attended,
    Call,
    CompiledLayers,
    CompiledLinear,
    DecoderSizes,
    Entry,
    compiled_refusal,
    run_pass,
    run_region,
)
from draftproof.models.head.network import FittedHead, Head

TABLE_DTYPES: Final = (torch.float32, torch.bfloat16)


class Choice(NamedTuple):
    """How the tokens of a draft are chosen, row by row.

    scales      one over the temperature, in float64; 0: the likeliest token is taken
    uniforms    two random numbers for each token and row, in float64
    lengths     tokens wanted
    confidence  end a row after the token at which the probability of its path falls below this
    """

    scales: Float[Tensor, " B"]
    uniforms: Float[Tensor, "K B 2"]
    lengths: Int[Tensor, " B"]
    confidence: float


class Chain(NamedTuple):
    """A draft: entries of the draft vocabulary, the logits and log-sum-exps of their distributions, and lengths."""

    entries: Int[Tensor, "K B"]
    logits: Float[Tensor, "K B R"]
    sums: Float[Tensor, "K B"]
    lengths: Int[Tensor, " B"]


class Places(NamedTuple):
    """Consecutive entries of rows in a pool: the first slot of each row, its first entry here, and how many."""

    starts: Sequence[int]
    at: Sequence[int]
    widths: Sequence[int]

    def spans(self) -> list[Attended]:
        return [Attended(start, at, width) for start, at, width in zip(self.starts, self.at, self.widths, strict=True)]

    def positions(self) -> Int[Tensor, " N"]:
        each = [np.arange(at, at + width) for at, width in zip(self.at, self.widths, strict=True)]
        return torch.from_numpy(each[0] if len(each) == 1 else np.concatenate(each))


class CompiledHead:
    """A `Head` with its embeddings and output rows, laid out for compiled calls."""

    def __init__(self, fitted: FittedHead, products: Sequence[CompiledLinear], sizes: DecoderSizes) -> None:
        head: Any = fitted.head
        qkv, attended, gate_up, down, fuse = products
        both = alternating_halves(gate_up.blocks)
        layer = [None, qkv.blocks, attended.blocks, plain(head.mlp_norm.weight), both, down.blocks]
        norms = [plain(norm.weight) for norm in (head.embedding_norm, head.state_norm)]
        entry = Entry(norms[0], norms[1], fitted.table.contiguous())
        scales = [each.scale for each in (qkv, attended, gate_up, down) if each.scale is not None]
        if scales:
            scales[2] = alternating_halves(scales[2].view(-1, BLOCK)).flatten()
        self._layers = CompiledLayers([layer], sizes, None, head.frequencies, entry, scales)
        self._fuse, self._ids = fuse, fitted.vocab.ids
        output = CompiledLinear.within(fitted.rows)
        self._output = output if output is not None and output.is_whole else None
        self._norm, self._tap_norms = plain(head.norm.weight), [plain(norm.weight) for norm in head.tap_norms]
        self._tap_norm_table = np.array([norm.data_ptr() for norm in self._tap_norms], dtype=np.int64)
        self._hidden, self._entries = sizes.hidden, len(self._ids)

    @classmethod
    def of(cls, fitted: FittedHead) -> "CompiledHead | None":
        """Lay out a head; None if its weights have another form, or nothing is compiled on this machine."""
        head = fitted.head
        if compiled_refusal() is not None or not isinstance(head, Head) or fitted.table.dtype not in TABLE_DTYPES:
            return None
        shape = head.shape
        sizes = DecoderSizes(
            shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.eps,
            shape.head_dim**-0.5,
        )  # fmt: skip
        linears = head.qkv, head.attended, head.gate_up, head.down, head.fc
        products = [made for linear in linears if (made := CompiledLinear.within(linear)) is not None]
        fits = sizes.fit and shape.intermediate % BLOCK == 0 and len(products) == len(linears)
        return cls(fitted, products, sizes) if fits else None

    @property
    def drafts(self) -> bool:
        """Return whether `logits` and `draft` can be used: the output rows are compiled as well."""
        return self._output is not None

    def states(
        self,
        tokens: Int[Tensor, " N"],
        h: Float[Tensor, "N H"],
        positions: Int[Tensor, " N"],
        spans: Sequence[Attended],
        keys: Float[Tensor, "slots g d"],
        values: Float[Tensor, "slots g d"],
    ) -> Float[Tensor, "N H"]:
        """Return the states after some tokens of each span; keys and values are written to a pool."""
        states = h.float().clone(memory_format=torch.contiguous_format)
        call = self._layers.call(states, spans, positions.contiguous(), [keys], [values], {}, tokens.contiguous())
        run_pass(call.fields)
        return states

    def write(
        self,
        tokens: Int[Tensor, " N"],
        h: Float[Tensor, "N H"],
        positions: Int[Tensor, " N"],
        spans: Sequence[Attended],
        keys: Float[Tensor, "slots g d"],
        values: Float[Tensor, "slots g d"],
    ) -> None:
        """Write the keys and values of some tokens of each span to a pool."""
        states = h.float().contiguous()
        call = self._layers.call(states, spans, positions.contiguous(), [keys], [values], {}, tokens.contiguous())
        run_pass({**call.fields, "keys_only": 1})

    def fuse(self, taps: Sequence[Float[Tensor, "N H"]]) -> Float[Tensor, "N H"]:
        """Combine the target's states after each tap into one state."""
        states = torch.empty((len(taps[0]), self._hidden))
        call = self._layers.bare(states, widest=self._wide)
        made = self._fusing(taps, states)
        run_region(made.fields, call.fields)
        return made.fused

    def logits(self, h: Float[Tensor, "N H"]) -> Float[Tensor, "N R"]:
        """Return the logits of the next token over the draft vocabulary, from the head's states."""
        rows = h.reshape(-1, self._hidden).float().contiguous()
        logits = torch.empty((len(rows), self._entries))
        call = self._scoring(self._layers.bare(rows), logits)
        run_region({"depths": 1}, None, call.fields)
        return logits.view(*h.shape[:-1], self._entries)

    def draft(
        self,
        h: Float[Tensor, "B H"] | None,
        taps: Sequence[Float[Tensor, "N H"]],
        follow: Int[Tensor, " N"],
        places: Places,
        choice: Choice,
        keys: Float[Tensor, "slots g d"],
        values: Float[Tensor, "slots g d"],
    ) -> tuple[Chain, Float[Tensor, "N H"] | None]:
        """Draft tokens for rows after the target's states at some tokens, `taps`; return them and the fused states.

        `follow` are the tokens after those, and `places` where they are; where they were read before, `h` are the
        states after the last of them, and `places` still says which that is.
        """
        B, K = len(choice.lengths), len(choice.uniforms)
        logits = torch.empty((K, B, self._entries))
        states = torch.empty((B, self._hidden)) if h is None else h.float().clone(memory_format=torch.contiguous_format)
        after = Places(places.starts, [at + n for at, n in zip(places.at, places.widths, strict=True)], [1] * B)
        stepping = self._scoring(
            self._layers.call(
                states, after.spans(), after.positions(), [keys], [values], {}, torch.empty(B, dtype=torch.long),
                reach=max(after.at) + K,
            ),
            logits[0],
        )  # fmt: skip
        chosen = _Chosen.of(choice, self._entries)
        fields, reading, fused = chosen.fields(self._ids), None, None
        if h is None:
            first = torch.empty((len(follow), self._hidden))
            reading = self._layers.call(
                first, places.spans(), places.positions(), [keys], [values], {}, follow, widest=self._wide
            )
            last = np.cumsum(places.widths, dtype=np.int64) - 1
            made = self._fusing(taps, first)
            fused = made.fused
            fields |= made.fields | {"last": last.ctypes.data}
        run_region(fields, None if reading is None else reading.fields, stepping.fields)
        return Chain(chosen.entries, logits, chosen.sums, chosen.lengths), fused

    @property
    def _wide(self) -> int:
        return self._hidden * len(self._tap_norms)

    def _scoring(self, call: Call, logits: Float[Tensor, "B R"]) -> Call:
        """Add the head's norm and output layer to a pass."""
        assert self._output is not None
        normed = torch.empty_like(call.kept[0])
        call.fields.update(
            self._output.fields(normed, logits), final_norm=self._norm.data_ptr(), normed=normed.data_ptr()
        )
        return Call(call.fields, (*call.kept, logits, normed), normed)

    def _fusing(self, taps: Sequence[Float[Tensor, "N H"]], states: Float[Tensor, "N H"]) -> "_Fused":
        taps = [tap.float().contiguous() for tap in taps]
        table = np.array([tap.data_ptr() for tap in taps], dtype=np.int64)
        room, fused = torch.empty((len(states), self._wide)), torch.empty_like(states)
        fields = {
            "fusing": 1, "taps": len(taps), "tap_table": table.ctypes.data, "fused": fused.data_ptr(),
            "tap_norms": self._tap_norm_table.ctypes.data, "tap_inputs": room.data_ptr(),
            "fuse_weights": self._fuse.blocks.data_ptr(),
            "fuse_scales": 0 if self._fuse.scale is None else self._fuse.scale.data_ptr(),
        }  # fmt: skip
        return _Fused(fields, fused, (taps, table, room))


class _Fused(NamedTuple):
    """The numbers of a call that fuses states, the states, and what the numbers have addresses of."""

    fields: dict[str, int]
    fused: Float[Tensor, "N H"]
    kept: tuple[Any, ...]


class _Chosen(NamedTuple):
    """The tensors that choosing tokens reads and writes."""

    choice: Choice
    entries: Int[Tensor, "K B"]
    sums: Float[Tensor, "K B"]
    paths: Float[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    weights: Float[Tensor, "B wide"]
    confidence: Float[Tensor, " 1"]

    @classmethod
    def of(cls, choice: Choice, entries: int) -> "_Chosen":
        K, B = choice.uniforms.shape[:2]
        return cls(
            choice,
            torch.empty((K, B), dtype=torch.long),
            torch.empty((K, B), dtype=torch.float64),
            torch.zeros(B, dtype=torch.float64),
            choice.lengths.clone(),
            torch.empty((B, entries + entries // 16)),
            torch.full((1,), choice.confidence, dtype=torch.float64),
        )

    def fields(self, ids: Int[Tensor, " R"]) -> dict[str, int]:
        return {
            "depths": len(self.entries), "chooses": 1, "ids": ids.data_ptr(), "scales": self.choice.scales.data_ptr(),
            "uniforms": self.choice.uniforms.data_ptr(), "weights": self.weights.data_ptr(),
            "entries": self.entries.data_ptr(), "sums": self.sums.data_ptr(), "paths": self.paths.data_ptr(),
            "lengths": self.lengths.data_ptr(), "confidence": self.confidence.data_ptr(),
        }  # fmt: skip
