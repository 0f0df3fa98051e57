"""Make passes over a pool of keys and values, and compare the attention kernels with their reference. Needs no pytest.

Slots that belong to no row hold NaN: reading one by mistake shows.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from draftproof.core.tree import lineage
from draftproof.kernels.attention import decode_attention
from draftproof.kernels.attention_reference import decode_attention_reference

VARIANTS = ("window", "chunk", "softcap", "sinks", "alibi", "tree")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Relative error of rounding to a type: half an ulp."""

if triton.knobs.runtime.interpret:
    ROUNDING[torch.bfloat16] *= 2  # the interpreter cuts digits off


@dataclass(frozen=True)
class Pass:
    """Arguments of `decode_attention`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    lengths: Tensor
    widths: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.query, self.keys, self.values, self.starts, self.lengths, self.widths

    def row(self, b: int) -> "Pass":
        """Return the pass of one row alone, over the same pool."""
        by_row = {"ancestors", "positions"}
        options = {name: x[b : b + 1].contiguous() if name in by_row else x for name, x in self.options.items()}
        pick = slice(b, b + 1)
        widths = None if self.widths is None else self.widths[pick]
        return Pass(self.query[pick], self.keys, self.values, self.starts[pick], self.lengths[pick], widths, options)


def make(
    lengths: list[int],
    T: int = 3,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    widths: list[int] | None = None,
    variants: tuple[str, ...] = (),
    window: int = 40,
    chunk: int = 48,
) -> Pass:
    """Make a random pass over rows of these lengths, which lie in the pool in random order, with gaps between them.

    variants: of VARIANTS.
    """
    generator = torch.Generator(device).manual_seed(seed)
    B, value_size = len(lengths), value_size or size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    starts, slots = _places([n + T for n in lengths], seed)
    keys = torch.full((slots, kv_heads, size), torch.nan, device=device)
    values = torch.full((slots, kv_heads, value_size), torch.nan, device=device)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        stop = start + length + (T if widths is None else widths[b])
        keys[start:stop] = normal(stop - start, kv_heads, size)
        values[start:stop] = normal(stop - start, kv_heads, value_size)
    # scores with a standard deviation of 2, so that no key has all the weight and none is negligible
    options: dict[str, Any] = {"scale": 2.0 * size**-0.5}
    long = torch.tensor(lengths, device=device)
    if "window" in variants:
        options["window"] = window
    if "chunk" in variants:
        options["chunk"] = chunk
    if "softcap" in variants:
        options["softcap"] = 2.5
    if "sinks" in variants:
        options["sinks"] = 3.0 + normal(heads)
    if "alibi" in variants:
        options["alibi_slopes"] = 0.5 ** torch.arange(1, heads + 1, device=device).float()
    if "tree" in variants:
        ancestors = random_tree(B, T, generator, device)
        options |= {"ancestors": ancestors, "positions": long[:, None] + ancestors.sum(2) - 1}
    query = normal(B, T, heads, size).to(dtype)
    wide = None if widths is None else torch.tensor(widths, device=device)
    return Pass(query, keys.to(dtype), values.to(dtype), torch.tensor(starts, device=device), long, wide, options)


def random_pass(seed: int, *, most: int, rows: int, T: int, device: str, heads: int = 6, size: int = 16) -> Pass:
    """Make a pass with a random mixture of variants, lengths up to `most`, widths, dtype, groups and sizes."""
    choose = random.Random(seed)
    lengths = [choose.randint(0, most) for _ in range(rows)]
    return make(
        lengths,
        T,
        heads=heads,
        kv_heads=choose.choice([n for n in (1, 2, 3, 8, heads) if heads % n == 0]),
        size=size + choose.choice([0, 8]),
        value_size=size + choose.choice([0, 24]),
        dtype=choose.choice([torch.float32, torch.bfloat16, torch.float16]),
        device=device,
        seed=seed,
        widths=choose.choice([None, [choose.randint(0, T) for _ in lengths]]),
        variants=tuple(name for name in VARIANTS if choose.random() < 0.4),
        window=choose.randint(1, most),
        chunk=choose.randint(1, most),
    )


def random_tree(B: int, T: int, generator: torch.Generator, device: str) -> Tensor:
    """Return the ancestors [B, T, T] of random trees: every token hangs below one of those before it."""
    limits = torch.arange(1, T, device=device).expand(B, -1)
    parents = (torch.rand(B, T - 1, generator=generator, device=device) * limits).long()
    return lineage(parents) if T > 1 else torch.ones(B, 1, 1, dtype=torch.bool, device=device)


def _places(sizes: list[int], seed: int) -> tuple[list[int], int]:
    """Return the first slot of each row, and the slots in the pool."""
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist()
    starts, at = [0] * len(sizes), 3
    for b in order:
        starts[b] = at
        at += sizes[b] + 5
    return starts, at


def kernel(given: Pass, **other: Any) -> Tensor:
    """Run the kernels; `other` replaces options."""
    return decode_attention(*given.tensors(), **given.options | other)


def reference(given: Pass, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return the attention and that to the magnitudes of the values, which bounds the effect of rounding weights."""
    query, keys, values, *rest = given.tensors()
    want = decode_attention_reference(query.to(dtype), keys, values, *rest, **given.options)
    return want, decode_attention_reference(query.to(dtype), keys, values.abs(), *rest, **given.options)


def excess(got: Tensor, given: Pass, *, dtype: torch.dtype = torch.float64) -> float:
    """Return the largest error of an element over its bound; above 1 it is more than rounding.

    The weights are rounded to the values' type, and the result too: each moves an element by at most ROUNDING times
    Σ weight · |value|. Scores are sums of float32: 2e-5 covers their error, and all there is to float32 passes.
    """
    want, magnitude = reference(given, dtype=dtype)
    bound = (2 * ROUNDING[got.dtype] + 2e-5) * magnitude + 1e-6
    error = ((got.to(dtype) - want).abs() / bound).nan_to_num(torch.inf)
    return float(error.max()) if error.numel() else 0.0


def assert_equal(given: Pass, **other: Any) -> None:
    found = excess(kernel(given, **other), given)
    assert found <= 1, f"{found:.3g} times the error that rounding explains"
