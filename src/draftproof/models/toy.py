"""A toy model whose logits are a table lookup, so that tests, documentation and audits know its exact distribution."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.models.interface import Cache, Forward


class Toy:
    """A Markov model: the next token's logits are `table[last]`, or `table[before, last]` of the last two tokens.

    A first token is treated as if token 0 preceded it.
    """

    def __init__(self, table: Float[Tensor, "V V"] | Float[Tensor, "V V V"]) -> None:
        self.table = table

    @classmethod
    def random(cls, vocab_size: int, *, order: int = 1, spread: float = 1.5, seed: int = 0) -> "Toy":
        """Draw a table of Gaussian logits from its own generator; the global one is not touched."""
        if order not in (1, 2):
            raise ValueError(f"order={order}: a toy reads the last token (1) or the last two (2)")
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn([vocab_size] * (order + 1), generator=generator) * spread)

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    @property
    def max_length(self) -> int | None:
        return None

    @property
    def device(self) -> torch.device:
        return self.table.device

    def new_cache(self, rows: int, capacity: int = 0) -> "ToyCache":
        empty = torch.zeros(rows, max(capacity, 1), dtype=torch.long, device=self.device)
        return ToyCache(empty, torch.zeros(rows, dtype=torch.long, device=self.device))

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        cache: Cache,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        scored: int | None = None,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Score `tokens` as the continuation of each cached row; see `Model`."""
        if not isinstance(cache, ToyCache):
            raise ValueError(f"cache is a {type(cache).__name__}: take one from this model's new_cache()")
        if layers:
            raise ValueError(f"layers={tuple(layers)}: a table has no layers")
        cache.write(tokens)
        last = tokens if scored is None else tokens[:, tokens.shape[1] - scored :]
        if self.table.ndim == 2:
            return Forward(self.table[last])
        before = _preceding(tokens, cache.last(), parents)[:, tokens.shape[1] - last.shape[1] :]
        return Forward(self.table[before, last])


class ToyCache:
    """A cache that stores the tokens themselves."""

    def __init__(self, tokens: Int[Tensor, "B S"], lengths: Int[Tensor, " B"]) -> None:
        self.tokens = tokens
        self.lengths = lengths
        self._width = 0

    def write(self, tokens: Int[Tensor, "B T"]) -> None:
        """Write tokens after each row's length; the lengths stay the same."""
        self._width = tokens.shape[1]
        needed = int(self.lengths.max()) + self._width if len(tokens) else 0
        if needed > self.tokens.shape[1]:
            self.tokens = _padded(self.tokens, 2 * needed)
        self.tokens.scatter_(1, self._next_slots(self._width), tokens)

    def last(self) -> Int[Tensor, " B"]:
        """Return the last token of each row; 0 for an empty row."""
        token = self.tokens.gather(1, (self.lengths - 1).clamp(min=0)[:, None])[:, 0]
        return token * (self.lengths > 0)

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each row by `counts` tokens of the last pass; see `Cache`."""
        if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) <= self._width:
            raise ValueError(f"counts {counts.tolist()} must lie within the last pass's {self._width} tokens")
        if path is not None:
            target = self._next_slots(path.shape[1] + 1)[:, 1:]
            source = self.lengths[:, None] + 1 + path.clamp(min=0)
            self.tokens.scatter_(1, target, self.tokens.gather(1, source))
        self.lengths = self.lengths + counts

    def take(self, rows: Sequence[int]) -> "ToyCache":
        index = torch.tensor(rows, dtype=torch.long, device=self.lengths.device)
        return ToyCache(self.tokens[index], self.lengths[index])

    def join(self, other: Cache) -> "ToyCache":
        if not isinstance(other, ToyCache):
            raise ValueError(f"other is a {type(other).__name__}: a ToyCache can be joined only with a ToyCache")
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        tokens = torch.cat([_padded(self.tokens, width), _padded(other.tokens, width)])
        return ToyCache(tokens, torch.cat([self.lengths, other.lengths]))

    def _next_slots(self, width: int) -> Int[Tensor, "B T"]:
        return self.lengths[:, None] + torch.arange(width, device=self.lengths.device)


def _preceding(
    tokens: Int[Tensor, "B T"], cached: Int[Tensor, " B"], parents: Int[Tensor, "B K"] | None
) -> Int[Tensor, "B T"]:
    """Return the token before each token: its left neighbour, or its parent in a tree."""
    preceding = tokens[:, :-1] if parents is None else tokens.gather(1, parents + 1)
    return torch.cat([cached[:, None], preceding], dim=1)


def _padded(tokens: Int[Tensor, "B S"], width: int) -> Int[Tensor, "B W"]:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
