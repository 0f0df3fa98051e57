"""A drafting head: one decoder layer on the target's hidden states, after EAGLE-3 (Li et al. 2025, 2503.01840).

At position t it reads the target's states there (`fuse`) and the embedding of the next token, x_{t+1}, and predicts
x_{t+2}. After the last position that the target has scored, its own output replaces the states. Embeddings and output
rows belong to the target and are not part of the head. Only its width must be the target's; other sizes may differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from draftproof.core.device import runs_kernels, to_device
from draftproof.core.distribution import DraftVocab
from draftproof.models.cuda_graphs import CapturedGraphs
from draftproof.models.pool import LayerShape
from draftproof.models.transformers_types import PreTrainedModel

LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attends, given a layer's number, queries, keys and values [B, heads, n, size]; it also writes the keys and values."""

HEAD_BUCKET = 256
"""Slots: the buffers of a `HeadCache` grow by multiples of this."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a head. `taps`: the target's layers whose states it reads, counted as in `TargetFeatures.layers`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    eps: float
    taps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.taps or min(self.taps) < 1:
            raise ValueError(f"taps must name layers from 1 on, at least one; got {self.taps}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions rotate pairs")


class Head(nn.Module):
    """The network of a head. Weights are drawn from `seed` until others are loaded; None leaves them undefined."""

    def __init__(self, shape: HeadShape, seed: int | None = 0) -> None:
        super().__init__()
        self.shape = shape
        H, d = shape.hidden, shape.head_dim
        generator = None if seed is None else torch.Generator().manual_seed(seed)

        def linear(inputs: int, outputs: int, std: float) -> nn.Linear:
            layer = linear_on(torch.empty((outputs, inputs)))
            if generator is not None:
                nn.init.normal_(layer.weight, std=std, generator=generator)
            return layer

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(H, eps=shape.eps)

        # A norm for each tap: in the middle of a model the first tokens' states can be thousands of times larger.
        self.tap_norms = nn.ModuleList([norm() for _ in shape.taps])
        self.fc = linear(H * len(shape.taps), H, 0.03)
        self.embedding_norm, self.state_norm = norm(), norm()
        self.qkv = linear(2 * H, (shape.heads + 2 * shape.kv_heads) * d, 0.02)
        self.attended = linear(shape.heads * d, H, 0.01)
        self.mlp_norm = norm()
        self.gate_up = linear(H, 2 * shape.intermediate, 0.02)
        self.down = linear(shape.intermediate, H, 0.01)
        self.norm = norm()
        exponents = torch.arange(0, d, 2, dtype=torch.float32) / d
        self.frequencies: Tensor
        self.register_buffer("frequencies", shape.rope_theta**-exponents, persistent=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.shape.taps

    @property
    def kv_shapes(self) -> list[LayerShape]:
        """Return the sizes of each layer's keys and values; there is one layer."""
        size = self.shape.head_dim
        return [LayerShape(self.shape.kv_heads, size, size, self.norm.weight.dtype)]

    def new_cache(self, rows: int, capacity: int = 0) -> "HeadCache":
        weight = self.norm.weight
        return HeadCache.empty(rows, capacity, self.shape.kv_heads, self.shape.head_dim, weight.device, weight.dtype)

    def fuse(self, states: Sequence[Float[Tensor, "*N H"]]) -> Float[Tensor, "*N H"]:
        """Combine the target's states after each tap into one state."""
        fused: Tensor = self.fc(torch.cat([n(s) for n, s in zip(self.tap_norms, states, strict=True)], -1))
        return fused

    def step(
        self,
        embedded: Float[Tensor, "B n H"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        cache: "HeadCache",
        *,
        slots: Int[Tensor, "B n"] | None = None,
        visible: Bool[Tensor, "B n S"] | None = None,
        reach: int | None = None,
    ) -> Float[Tensor, "B n H"]:
        """Compute the states at n positions of each row: write their keys and values, then attend causally.

        A tree's nodes share positions: `slots` says where they are written, `visible` what each of them attends to.
        `reach` is the number of slots to attend to; without it the largest slot is read back, which synchronises.
        """
        slots = positions if slots is None else slots
        reach = int(slots.max()) + 1 if reach is None else reach
        if visible is None and slots.numel() > 1:
            visible = torch.arange(reach, device=slots.device) <= slots[:, :, None]
        return self.over(
            embedded, h, positions, lambda _, q, k, v: attend(q, *cache.write(k, v, slots, reach), visible)
        )

    def over(
        self,
        embedded: Float[Tensor, "B n H"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        attention: LayerAttention,
    ) -> Float[Tensor, "B n H"]:
        """Compute the states at n positions of each row, with an attention that also writes keys and values."""
        return self.rest(h, attention(0, *self.heads(embedded, h, positions)))

    def heads(
        self, embedded: Float[Tensor, "B n H"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "#B n"]
    ) -> tuple[Float[Tensor, "B h n d"], Float[Tensor, "B g n d"], Float[Tensor, "B g n d"]]:
        """Return queries, keys and values; queries and keys are rotated to their positions."""
        shape = self.shape
        x = torch.cat([self.embedding_norm(embedded), self.state_norm(h)], -1)
        qkv = self.qkv(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        rotating = shape.heads + shape.kv_heads
        rotated = rotate(qkv[:, :rotating], positions, self.frequencies)
        return rotated[:, : shape.heads], rotated[:, shape.heads :], qkv[:, rotating:]

    def rest(self, h: Float[Tensor, "B n H"], attended: Float[Tensor, "B h n d"]) -> Float[Tensor, "B n H"]:
        """Apply the part of the layer after attention; the result is the next step's state and the input of `out`."""
        x = h + self.attended(attended.transpose(1, 2).flatten(2))
        state: Tensor = x + self.down(gated(self.gate_up(self.mlp_norm(x))))
        return state

    def out(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N H"]:
        """Apply the final norm: logits are out(h) @ rows.T, with the target's output rows of the draft vocabulary."""
        state: Tensor = self.norm(h)
        return state


@dataclass(slots=True)
class HeadCache:
    """The keys and values of a head, `[B, slots, heads, size]`; their sizes may differ.

    Nothing is erased. The caller's positions and masks decide what is attended to, and a stale slot is written again
    before it is read.
    """

    keys: Float[Tensor, "B S g d"]
    values: Float[Tensor, "B S g e"]
    recordings: CapturedGraphs = field(default_factory=CapturedGraphs)
    """CUDA graphs of steps over these buffers."""

    @classmethod
    def empty(
        cls,
        rows: int,
        capacity: int,
        heads: int,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        value_size: int | None = None,
    ) -> "HeadCache":
        # Zeros, not uninitialised memory: a masked slot has weight zero, and zero times NaN is NaN.
        shape, sizes = (rows, rounded(capacity), heads), (size, size if value_size is None else value_size)
        keys, values = (torch.zeros((*shape, each), device=device, dtype=dtype) for each in sizes)
        return cls(keys, values)

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def ensure(self, capacity: int) -> None:
        """Grow the buffers to at least this many slots in every row."""
        more = rounded(capacity) - self.capacity
        if more > 0:
            self.recordings.forget()
            self.keys, self.values = (
                torch.nn.functional.pad(buffer, (0, 0, 0, 0, 0, more)) for buffer in (self.keys, self.values)
            )

    def arranged(self, rows: Sequence[int | None]) -> "HeadCache":
        """Return a cache of these rows, in this order; None is a new row, of zeros."""
        device = self.keys.device
        old = to_device([row for row in rows if row is not None], device)
        new = to_device([b for b, row in enumerate(rows) if row is not None], device)
        return HeadCache(
            self.keys.new_zeros((len(rows), *self.keys.shape[1:])).index_copy_(0, new, self.keys[old]),
            self.values.new_zeros((len(rows), *self.values.shape[1:])).index_copy_(0, new, self.values[old]),
        )

    def row(self, b: int) -> "HeadCache":
        """Return a cache of one row that shares this cache's buffers."""
        return HeadCache(self.keys[b : b + 1], self.values[b : b + 1])

    def write(
        self,
        keys: Float[Tensor, "B g n d"],
        values: Float[Tensor, "B g n e"],
        slots: Int[Tensor, "B n"],
        reach: int,
    ) -> tuple[Float[Tensor, "B g S d"], Float[Tensor, "B g S e"]]:
        """Write keys and values at these slots, and return those of the first `reach` slots."""
        starts = torch.arange(len(slots), device=slots.device)[:, None] * self.capacity
        flat = (slots + starts).flatten()
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.flatten(0, 1).index_copy_(0, flat, new.transpose(1, 2).flatten(0, 1).to(buffer.dtype))
        return self.keys[:, :reach].transpose(1, 2), self.values[:, :reach].transpose(1, 2)


def linear_on(weight: Float[Tensor, "O I"]) -> nn.Linear:
    """Return a linear layer without a bias on this matrix, without drawing another one first.

    torch's `skip_init` does that too, and imports sympy for it, which takes half a second.
    """
    layer: nn.Linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight)
    layer.register_parameter("bias", None)
    return layer


def rounded(slots: int) -> int:
    """Round up to a multiple of HEAD_BUCKET, at least one."""
    return max(1, -(-slots // HEAD_BUCKET)) * HEAD_BUCKET


def by_kernel(x: Tensor) -> bool:
    """Return whether a small step on this tensor is one kernel: on a GPU, where no gradient is wanted."""
    return runs_kernels(x.device) and not torch.is_grad_enabled()


def gated(both: Float[Tensor, "*N I2"]) -> Float[Tensor, "*N I"]:
    """Return the SiLU of the first half times the second."""
    if by_kernel(both):
        from draftproof.kernels import layer

        return layer.gate(both)
    gate, up = both.chunk(2, -1)
    return nn.functional.silu(gate) * up


def rotate(
    x: Float[Tensor, "B h n d"], positions: Int[Tensor, "#B n"], frequencies: Float[Tensor, " half"]
) -> Float[Tensor, "B h n d"]:
    """Apply rotary position embeddings: rotate pairs half a head apart by angles proportional to the position."""
    if by_kernel(x):
        from draftproof.kernels import layer  # needs Triton, which a CPU does without

        return layer.rotate(x, positions, frequencies)
    return rotated_by_torch(x, positions, frequencies)


def rotated_by_torch(
    x: Float[Tensor, "B h n d"], positions: Int[Tensor, "#B n"], frequencies: Float[Tensor, " half"]
) -> Float[Tensor, "B h n d"]:
    """Define what the kernel computes; gradients flow through it."""
    angles = positions[:, None, :, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(
    q: Float[Tensor, "B h n d"],
    keys: Float[Tensor, "B g S d"],
    values: Float[Tensor, "B g S d"],
    visible: Bool[Tensor, "B n S"] | None,
) -> Float[Tensor, "B h n d"]:
    """Compute grouped-query attention without repeating keys: heads that share keys are folded into longer queries.

    Without a mask every query attends to every slot.
    """
    group = q.shape[1] // keys.shape[1]
    folded = q.reshape(q.shape[0], keys.shape[1], group * q.shape[2], q.shape[3])
    mask = None if visible is None else visible[:, None].repeat(1, 1, group, 1)
    return nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(q.shape)


@runtime_checkable
class HeadNetwork(Protocol):
    """The networks that `HeadDrafter` can draft with: `Head`, `eagle3.Eagle3`, `mtp.Mtp`. Methods as in `Head`."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the target's layers whose states it reads, counted as in `TargetFeatures.layers`."""

    def new_cache(self, rows: int, capacity: int = 0) -> HeadCache: ...

    def fuse(self, states: Sequence[Float[Tensor, "*N T"]]) -> Float[Tensor, "*N H"]: ...

    def step(
        self,
        embedded: Float[Tensor, "B n H"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        cache: HeadCache,
        *,
        slots: Int[Tensor, "B n"] | None = None,
        visible: Bool[Tensor, "B n S"] | None = None,
        reach: int | None = None,
    ) -> Float[Tensor, "B n H"]: ...

    def out(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N H"]: ...


@runtime_checkable
class PooledNetwork(Protocol):
    """The networks whose keys and values can lie in a pool (rows.py): `Head`, `eagle3.Eagle3`. Methods as in `Head`."""

    @property
    def kv_shapes(self) -> list[LayerShape]: ...

    def fuse(self, states: Sequence[Float[Tensor, "*N T"]]) -> Float[Tensor, "*N H"]: ...

    def over(
        self,
        embedded: Float[Tensor, "B n H"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        attention: LayerAttention,
    ) -> Float[Tensor, "B n H"]: ...


@dataclass(frozen=True, slots=True)
class FittedHead:
    """A head with embeddings and output rows, its own or the target's, on the target's device and packed on a CPU.

    dtype  of the states that it is given and computes
    """

    head: HeadNetwork
    table: Float[Tensor, "V H"]
    rows: nn.Module
    vocab: DraftVocab
    dtype: torch.dtype = torch.float32

    @classmethod
    def on(
        cls, head: Head, ids: Int[Tensor, " all"], model: PreTrainedModel, *, size: int | None = None
    ) -> "FittedHead":
        """Attach a copy of `head` to the target `model`.

        `ids` are the tokens that the head can draft, most frequent first. It uses the first `size` of them; the default
        is `attach.ON_CPU` on a CPU and all on a GPU.
        """
        from draftproof.models.head.attach import attach  # which imports this file

        return attach(head, ids, model, size)

    def embedded(self, tokens: Int[Tensor, "*N"]) -> Float[Tensor, "*N H"]:
        return nn.functional.embedding(tokens, self.table).to(self.dtype)

    def logits(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N R"]:
        """Return the logits of the next token over the draft vocabulary, from the head's states, in float32."""
        logits: Tensor = self.rows(self.head.out(h))
        return logits.float()
