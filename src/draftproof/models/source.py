"""What an encoder-decoder model remembers: the source, read once, and the answer's slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicLayer

from draftproof.core.types import Inexact
from draftproof.models import Cache
from draftproof.models.cache import SlotCache

NO_TREES = "encoder-decoder models count positions by slot, so a tree cannot be scored: use a rule for chains"


@dataclass(frozen=True, slots=True)
class Source:
    """The encoder's states, and the keys and values that each decoder layer made of them."""

    states: Float[Tensor, "B S H"]
    present: Bool[Tensor, "B S"]
    keys: tuple[Float[Tensor, "B h S d"], ...] = ()
    values: tuple[Float[Tensor, "B h S d"], ...] = ()

    def rows(self, index: slice | Int[Tensor, " R"]) -> "Source":
        return Source(
            self.states[index],
            self.present[index],
            tuple(key[index] for key in self.keys),
            tuple(value[index] for value in self.values),
        )

    def join(self, other: "Source") -> "Source":
        width = max(self.present.shape[1], other.present.shape[1])
        return Source(
            _stacked(self.states, other.states, 1, width),
            _stacked(self.present, other.present, 1, width),
            tuple(_stacked(*pair, 2, width) for pair in zip(self.keys, other.keys, strict=True)),
            tuple(_stacked(*pair, 2, width) for pair in zip(self.values, other.values, strict=True)),
        )

    def cross(self) -> TransformersCache:
        """As transformers wants it: a cache whose layers are filled already."""
        return TransformersCache(layers=[_filled(k, v) for k, v in zip(self.keys, self.values, strict=True)])


class SourceCache:
    """A source and the answer so far, for each row."""

    def __init__(self, source: Source, answer: SlotCache) -> None:
        self.source = source
        self.answer = answer

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of the answer remembered. Forgetting is assigning smaller lengths."""
        return self.answer.lengths

    @lengths.setter
    def lengths(self, lengths: Int[Tensor, " B"]) -> None:
        self.answer.lengths = lengths

    def keep(self, counts: Int[Tensor, " B"], path: Int[Tensor, "B K"] | None = None) -> None:
        """Lengthen each row by its first `counts` tokens of the last pass."""
        if path is not None:
            raise Inexact(NO_TREES)
        self.answer.keep(counts)

    def take(self, rows: Sequence[int]) -> "SourceCache":
        """A cache of these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.source.states.device)
        return SourceCache(self.source.rows(index), self.answer.take(rows))

    def join(self, other: Cache) -> "SourceCache":
        """These rows, then the other's."""
        if not isinstance(other, SourceCache):
            raise ValueError(f"other is a {type(other).__name__}, and a SourceCache joins only its like")
        return SourceCache(self.source.join(other.source), self.answer.join(other.answer))

    def runs(self) -> Iterator[tuple[slice, int]]:
        """Neighbours of equal length, and that length: they can share a pass. The lengths must be known here, so a
        GPU is waited for once in every pass."""
        lengths = self.lengths.tolist()
        first = 0
        for row in range(1, len(lengths) + 1):
            if row == len(lengths) or lengths[row] != lengths[first]:
                yield slice(first, row), lengths[first]
                first = row


def _filled(keys: Tensor, values: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _stacked(mine: Tensor, theirs: Tensor, axis: int, width: int) -> Tensor:
    """Both, one below the other, widened with zeros to the same number of source tokens."""

    def widened(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[axis] = width - shape[axis]
        return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)

    return torch.cat([widened(mine), widened(theirs)])
