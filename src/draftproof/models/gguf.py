"""Read GGUF files: their metadata, and their tensors as float32 or, where the type has them, as groups of four bits.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A damaged file ends in a `ValueError`: every
length is compared with the file's before anything of that length is read or allocated.
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

Raw = UInt8[np.ndarray, " bytes"]
Values = Float32[np.ndarray, " values"]

GROUP: Final = 32
"""Weights that share a scale and a minimum, in every quantised type that is read here."""

SCALARS: Final = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""GGUF's scalar value types, as `struct` format characters."""
STRING: Final = 8
"""GGUF's value type of a string."""
ARRAY: Final = 9
"""GGUF's value type of an array."""
DEEPEST: Final = 4
"""Arrays within arrays that are read: no known file has more than one level."""
MOST_AXES: Final = 4
"""Axes of a tensor, as in GGML."""


class Groups(NamedTuple):
    """A matrix as groups of four-bit codes along its rows: weight = scale · code + minimum."""

    codes: UInt8[np.ndarray, "out inside"]
    scale: Float32[np.ndarray, "out groups"]
    minimum: Float32[np.ndarray, "out groups"]


class Gguf:
    """An open GGUF file: `metadata` by key, `tensor(name)` in float32 and torch's shape, `groups(name)` as stored."""

    def __init__(self, path: Path) -> None:
        self._path, self._name = path, path.name
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:4] != b"GGUF" or self._data[4:8] != b"\x03\0\0\0":
            raise ValueError(f"{path.name} starts with {self._data[:8]!r}; expected a GGUF file of version 3")
        cursor = _Cursor(self._data, 8)
        try:
            tensors, entries = cursor.number("<Q"), cursor.number("<Q")
            self.metadata: dict[str, Any] = {}
            for _ in range(entries):
                key = cursor.string()
                self.metadata[key] = cursor.value(cursor.number("<I"))
            self._tensors: dict[str, _TensorInfo] = {}
            for _ in range(tensors):
                name, info = cursor.tensor_info()
                self._tensors[name] = info
        except (struct.error, UnicodeDecodeError, _DamagedError) as error:
            raise ValueError(
                f"{path.name} is damaged after {cursor.at} of {len(self._data)} bytes: {error}; get it again"
            ) from error
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= 2**20:
            raise ValueError(f"{path.name} has general.alignment {alignment!r}; expected a whole number of bytes")
        self._start = -(-cursor.at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise ValueError(f"{self._name} has no tensor {name}: it is damaged, or holds a model of another kind")
        return self._tensors[name].shape

    def tensor(self, name: str) -> Float32[np.ndarray, "..."]:
        """Return a tensor's values in float32."""
        raw, kind = self._raw(name)
        with np.errstate(all="ignore"):  # what is not a finite number is refused below
            values = kind.dequantise(raw)
        self._check_finite(name, values)
        return values.reshape(self._tensors[name].shape)

    def groups(self, name: str) -> Groups | None:
        """Return a matrix as it is stored; None if its type does not have groups of four bits."""
        raw, kind = self._raw(name)
        if kind.split is None:
            return None
        with np.errstate(all="ignore"):
            codes, scale, minimum = kind.split(raw)
        self._check_finite(name, scale)
        self._check_finite(name, minimum)
        rows = self._tensors[name].shape[0]
        return Groups(codes.reshape(rows, -1), scale.reshape(rows, -1), minimum.reshape(rows, -1))

    def _check_finite(self, name: str, values: Float32[np.ndarray, "..."]) -> None:
        if not np.isfinite(values).all():
            raise ValueError(f"tensor {name} of {self._name} holds values that are not finite: get the file again")

    def parts(self, name: str, rows: int) -> Iterator[Float32[np.ndarray, "part inside"]]:
        """Yield a matrix in float32, so many rows at a time."""
        raw, kind = self._raw(name)
        height, width = self._tensors[name].shape
        size = width // kind.block * kind.bytes
        for start in range(0, height, rows):
            with np.errstate(all="ignore"):
                values = kind.dequantise(raw[start * size : (start + rows) * size])
            self._check_finite(name, values)
            yield values.reshape(-1, width)

    def _raw(self, name: str) -> tuple[Raw, "_TensorType"]:
        """Return a tensor's bytes and its type."""
        info = self._tensors[name]
        kind = TENSOR_TYPES.get(info.kind)
        if kind is None:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise ValueError(f"tensor {name} has GGML type {info.kind}; this reader knows {known}")
        count = prod(info.shape)
        if not info.shape or info.shape[-1] % kind.block or not count:
            raise ValueError(f"tensor {name} has shape {info.shape}; {kind.name} has blocks of {kind.block} values")
        size, start = count // kind.block * kind.bytes, self._start + info.offset
        if start + size > len(self._data):
            raise ValueError(
                f"tensor {name} ends at byte {start + size} and {self._name} has {len(self._data)}: get it again"
            )
        # Read, not mapped: mapped pages would count as memory of the process until the file is closed.
        return np.fromfile(self._path, np.uint8, size, offset=start), kind


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    kind: int
    offset: int


class _DamagedError(Exception):
    """A length in the file's header does not fit the file."""


@dataclass(slots=True)
class _Cursor:
    """A reader of consecutive GGUF values."""

    data: mmap.mmap
    at: int = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.number("<Q")
        if size > len(self.data) - self.at:
            raise _DamagedError(f"a string of {size} bytes")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if count > len(self.data) - self.at or depth == DEEPEST:  # an element takes one byte at least
                raise _DamagedError(f"an array of {count} values at depth {depth}")
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise _DamagedError(f"a value of type {kind}")
        return self.number("<" + SCALARS[kind])

    def tensor_info(self) -> tuple[str, _TensorInfo]:
        name, rank = self.string(), self.number("<I")
        if rank > MOST_AXES:
            raise _DamagedError(f"a tensor of {rank} axes")
        shape = tuple(self.number("<Q") for _ in range(rank))[::-1]  # GGUF stores the fastest axis first
        return name, _TensorInfo(shape, self.number("<I"), self.number("<Q"))


def _f32(raw: Raw) -> Values:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: Raw) -> Values:
    return raw.view("<f2").astype(np.float32)


def _q8_0(raw: Raw) -> Values:
    """Dequantise blocks of a scale and 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = _halves(blocks[:, :2])
    return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)


def _split_q4_0(raw: Raw) -> Groups:
    """Split blocks of a scale and 16 bytes; codes count from -8."""
    blocks = raw.reshape(-1, 18)
    scale = _halves(blocks[:, :2])
    return Groups(_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _split_q4_1(raw: Raw) -> Groups:
    """Split blocks of a scale, a minimum and 16 bytes."""
    blocks = raw.reshape(-1, 20)
    return Groups(_nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _split_q4_k(raw: Raw) -> Groups:
    """Split blocks of eight groups, whose scales and minima are six-bit multiples of the block's own two."""
    blocks = raw.reshape(-1, 144)
    packed, codes = blocks[:, 4:16], blocks[:, 16:].reshape(-1, 4, 32)
    # The first four of each are the low six bits of bytes 0 to 7. The other four have their low nibbles in bytes 8 to
    # 11 and their high two bits at the top of bytes 0 to 7.
    scale = np.concatenate([packed[:, :4] & 63, packed[:, 8:] & 15 | packed[:, :4] >> 6 << 4], 1)
    minimum = np.concatenate([packed[:, 4:8] & 63, packed[:, 8:] >> 4 | packed[:, 4:8] >> 6 << 4], 1)
    nibbles = np.stack([codes & 15, codes >> 4], 2).reshape(-1, GROUP)
    return Groups(
        nibbles,
        (_halves(blocks[:, :2]) * scale).reshape(-1, 1),
        (-_halves(blocks[:, 2:4]) * minimum).reshape(-1, 1),
    )


def _halves(raw: UInt8[np.ndarray, "blocks 2"]) -> Float32[np.ndarray, "blocks 1"]:
    return raw.copy().view("<f2").astype(np.float32)


def _nibbles(raw: UInt8[np.ndarray, "blocks 16"]) -> UInt8[np.ndarray, "blocks 32"]:
    """Return first the 16 low nibbles of a block, then the 16 high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _dequantised(split: Callable[[Raw], Groups]) -> Callable[[Raw], Values]:
    def dequantise(raw: Raw) -> Values:
        codes, scale, minimum = split(raw)
        values: Values = (scale * codes + minimum).reshape(-1)
        return values

    return dequantise


class _TensorType(NamedTuple):
    """A tensor type of GGML: values and bytes of a block, and how blocks are read."""

    name: str
    block: int
    bytes: int
    dequantise: Callable[[Raw], Values]
    split: Callable[[Raw], Groups] | None = None


TENSOR_TYPES: Final = {
    0: _TensorType("F32", 1, 4, _f32),
    1: _TensorType("F16", 1, 2, _f16),
    2: _TensorType("Q4_0", GROUP, 18, _dequantised(_split_q4_0), _split_q4_0),
    3: _TensorType("Q4_1", GROUP, 20, _dequantised(_split_q4_1), _split_q4_1),
    8: _TensorType("Q8_0", GROUP, 34, _q8_0),
    12: _TensorType("Q4_K", 8 * GROUP, 144, _dequantised(_split_q4_k), _split_q4_k),
}
"""GGML's tensor types by number."""
