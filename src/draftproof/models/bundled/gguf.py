"""GGUF files: what they say and their tensors as float32. Knows the container, and no model and no tokenizer.

It reads the three tensor types that the bundled file uses, which spares every user the `gguf` package and
what that pulls in. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, UInt8

Raw = UInt8[np.ndarray, " bytes"]
Values = Float32[np.ndarray, " values"]

BLOCK: Final = 32  # values that share one scale
SCALARS: Final = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}  # as struct writes them
STRING: Final = 8
ARRAY: Final = 9


class Gguf:
    """An open file: `metadata` by key, `tensor(name)` dequantised in the shape that torch uses."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data)
        if self._data[:4] != b"GGUF" or cursor.number("<4xI") != 3:
            raise ValueError(f"{path.name} starts with {self._data[:8]!r}; expected a GGUF file of version 3")
        tensors, entries = cursor.number("<Q"), cursor.number("<Q")
        self.metadata: dict[str, Any] = {cursor.string(): cursor.value(cursor.number("<I")) for _ in range(entries)}
        self._places = dict(cursor.place() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-cursor.at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def tensor(self, name: str) -> Float32[np.ndarray, "..."]:
        place = self._places[name]
        if place.kind not in KINDS:
            raise ValueError(f"tensor {name} has GGML type {place.kind}; this reader knows {sorted(KINDS)}")
        size, dequantise = KINDS[place.kind]
        count = int(np.prod(place.shape))
        raw = np.frombuffer(self._data, np.uint8, count // BLOCK * size, self._start + place.offset)
        return dequantise(raw).reshape(place.shape)


@dataclass(frozen=True, slots=True)
class _Place:
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(slots=True)
class _Cursor:
    """Reads on from where it stands."""

    data: mmap.mmap
    at: int = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.number("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.number("<" + SCALARS[kind])

    def place(self) -> tuple[str, _Place]:
        name, rank = self.string(), self.number("<I")
        shape = tuple(self.number("<Q") for _ in range(rank))[::-1]  # GGUF names the fastest axis first
        return name, _Place(shape, self.number("<I"), self.number("<Q"))


def _f32(raw: Raw) -> Values:
    return raw.view("<f4").astype(np.float32)


def _q4_1(raw: Raw) -> Values:
    """Blocks of a scale, a minimum and 16 bytes: first their 16 low halves, then their 16 high halves."""
    blocks = raw.reshape(-1, 20)
    scale, minimum = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    values: Values = (scale * nibbles + minimum).reshape(-1)
    return values


def _q8_0(raw: Raw) -> Values:
    """Blocks of a scale and 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)


KINDS: Final[dict[int, tuple[int, Callable[[Raw], Values]]]] = {
    0: (4 * BLOCK, _f32),
    3: (20, _q4_1),
    8: (34, _q8_0),
}
"""GGML's number of a tensor type: bytes for 32 values, and how they become float32."""
