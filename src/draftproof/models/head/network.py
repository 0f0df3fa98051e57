"""A drafting head: one decoder layer on the target's own hidden states, after EAGLE-3 (Li et al. 2025, 2503.01840).

At position t it reads the target's states there (`fuse`) and the embedding of the token that follows, x_{t+1}, and
predicts x_{t+2}. Behind what the target has scored it goes on with its own output in place of the states. Embeddings
and output rows are the target's own and no part of it; its dimensions need not be the target's, only its width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from draftproof.core.device import to_device
from draftproof.models.cuda_graphs import Recordings

BUCKET = 256
"""Buffers grow by multiples of this many slots."""


@dataclass(slots=True)
class HeadCache:
    """Keys and values, a row's slots together. Who may look where is the caller's business: nothing is ever erased,
    a slot that is wrong by now is written again before it is looked at."""

    keys: Float[Tensor, "B S g d"]
    values: Float[Tensor, "B S g d"]
    recordings: Recordings = field(default_factory=Recordings)
    """Steps over these buffers that can be replayed."""

    @classmethod
    def empty(
        cls, rows: int, capacity: int, heads: int, size: int, device: torch.device, dtype: torch.dtype
    ) -> "HeadCache":
        # zeros, not empty memory: what is masked still meets a weight of zero, and zero times NaN is NaN
        shape = (rows, rounded(capacity), heads, size)
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return cls(keys, values)

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def ensure(self, capacity: int) -> None:
        """Make room for this many slots in every row."""
        more = rounded(capacity) - self.capacity
        if more > 0:
            self.recordings.forget()
            self.keys, self.values = (
                torch.nn.functional.pad(part, (0, 0, 0, 0, 0, more)) for part in (self.keys, self.values)
            )

    def arranged(self, rows: Sequence[int | None]) -> "HeadCache":
        """A cache of these rows, in this order; None is a new one. Of a new row nothing is ever looked at that was not
        written, but it must be numbers."""
        device = self.keys.device
        old = to_device([row for row in rows if row is not None], device)
        new = to_device([b for b, row in enumerate(rows) if row is not None], device)
        shape = (len(rows), *self.keys.shape[1:])
        return HeadCache(
            self.keys.new_zeros(shape).index_copy_(0, new, self.keys[old]),
            self.values.new_zeros(shape).index_copy_(0, new, self.values[old]),
        )

    def row(self, b: int) -> "HeadCache":
        """One row, by reference."""
        return HeadCache(self.keys[b : b + 1], self.values[b : b + 1])

    def write(
        self,
        keys: Float[Tensor, "B g n d"],
        values: Float[Tensor, "B g n d"],
        slots: Int[Tensor, "B n"],
        reach: int,
    ) -> tuple[Float[Tensor, "B g S d"], Float[Tensor, "B g S d"]]:
        """Write at these slots; all that lies before `reach`."""
        starts = torch.arange(len(slots), device=slots.device)[:, None] * self.capacity
        flat = (slots + starts).flatten()
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer.flatten(0, 1).index_copy_(0, flat, new.transpose(1, 2).flatten(0, 1).to(buffer.dtype))
        return self.keys[:, :reach].transpose(1, 2), self.values[:, :reach].transpose(1, 2)


def rounded(slots: int) -> int:
    """To whole buckets, at least one."""
    return max(1, -(-slots // BUCKET)) * BUCKET


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a head. `taps`: the target's layers whose states it reads, counted as `TargetFeatures.layers` counts."""

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
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")


class Head(nn.Module):
    """The network. Weights are drawn from `seed` until others are loaded."""

    def __init__(self, shape: HeadShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        H, d = shape.hidden, shape.head_dim
        numbers = torch.Generator().manual_seed(seed)

        def linear(inputs: int, outputs: int, std: float) -> nn.Linear:
            made: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
            nn.init.normal_(made.weight, std=std, generator=numbers)
            return made

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(H, eps=shape.eps)

        # Each tap has its own norm: in the middle of a model the first tokens' states can be thousands of times larger
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

    def new_cache(self, rows: int, capacity: int = 0) -> HeadCache:
        weight = self.norm.weight
        return HeadCache.empty(rows, capacity, self.shape.kv_heads, self.shape.head_dim, weight.device, weight.dtype)

    def fuse(self, states: Sequence[Float[Tensor, "*N H"]]) -> Float[Tensor, "*N H"]:
        """The target's states after each tap, as one state."""
        fused: Tensor = self.fc(torch.cat([n(s) for n, s in zip(self.tap_norms, states, strict=True)], -1))
        return fused

    def heads(
        self, embedded: Float[Tensor, "B n H"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "#B n"]
    ) -> tuple[Float[Tensor, "B h n d"], Float[Tensor, "B g n d"], Float[Tensor, "B g n d"]]:
        """Queries, keys and values; the first two turned to their positions."""
        shape = self.shape
        x = torch.cat([self.embedding_norm(embedded), self.state_norm(h)], -1)
        parts = self.qkv(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        turning = shape.heads + shape.kv_heads
        turned = turn(parts[:, :turning], positions, self.frequencies)
        return turned[:, : shape.heads], turned[:, shape.heads :], parts[:, turning:]

    def rest(self, h: Float[Tensor, "B n H"], attended: Float[Tensor, "B h n d"]) -> Float[Tensor, "B n H"]:
        """What comes behind attention: the state that the next step reads, and `out` normalises."""
        x = h + self.attended(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        state: Tensor = x + self.down(nn.functional.silu(gate) * up)
        return state

    def out(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N H"]:
        """The final norm: logits are out(h) @ rows.T, with the target's output rows of the reduced vocabulary."""
        state: Tensor = self.norm(h)
        return state

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
    ) -> Float[Tensor, "B n H"]:
        """n positions of each row: their keys and values are written, each looks at what lies up to its own position.

        A tree's nodes share positions: `slots` says where they are written, `visible` what each of them may look at.
        `reach` is how many slots there are to look at; without it the device is asked for the furthest.
        """
        slots = positions if slots is None else slots
        reach = int(slots.max()) + 1 if reach is None else reach
        q, k, v = self.heads(embedded, h, positions)
        keys, values = cache.write(k, v, slots, reach)
        if visible is None and slots.numel() > 1:
            visible = torch.arange(reach, device=slots.device) <= slots[:, :, None]
        return self.rest(h, attend(q, keys, values, visible))


def turn(
    x: Float[Tensor, "B h n d"], positions: Int[Tensor, "#B n"], frequencies: Float[Tensor, " half"]
) -> Float[Tensor, "B h n d"]:
    """Rotary positions: pairs of numbers, half a head apart, turned by angles that grow with the position."""
    angles = positions[:, None, :, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def attend(
    q: Float[Tensor, "B h n d"],
    keys: Float[Tensor, "B g S d"],
    values: Float[Tensor, "B g S d"],
    visible: Bool[Tensor, "B n S"] | None,
) -> Float[Tensor, "B h n d"]:
    """Attention of heads that share keys, folded into longer queries: nothing is repeated. No mask is no limit."""
    group = q.shape[1] // keys.shape[1]
    folded = q.reshape(q.shape[0], keys.shape[1], group * q.shape[2], q.shape[3])
    mask = None if visible is None else visible[:, None].repeat(1, 1, group, 1)
    return nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(q.shape)
