"""Run a module and its replacement on the same numbers, and tell whether they compute the same."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from draftproof.core.device import runs_kernels
from draftproof.models.device_pass import DevicePass
from draftproof.models.packed import PackedPass, Span, running

CLOSE: Final = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}
"""How far a replacement may be from its module, as a share of the largest number: a few roundings of the dtype."""

FAR: Final = 2**20
"""A late position: scales of attention that grow with it (Llama 4) are 1 for the first thousands."""


def example_of(linear: Any) -> Tensor:
    """Return a tensor with the device and dtype of a linear layer's input."""
    return linear.weight if isinstance(linear, nn.Linear) else torch.empty(0)


def _numbers(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((3, *shape), generator=generator).to(like.device, like.dtype)


def computes_the_same(
    module: Callable[[Tensor], Any], made: Callable[[Tensor], Any], shape: tuple[int, ...], like: Tensor
) -> bool:
    """Return whether two modules compute the same on some numbers, but for rounding."""
    try:
        wanted, got = module(_numbers(shape, like)), made(_numbers(shape, like))
    except Exception:  # a module that wants other arguments is not what it looks like
        return False
    return _close(wanted, got)


def _close(wanted: Any, got: Any) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor) or wanted.shape != got.shape:
        return False
    largest = wanted.float().abs().max().item()
    return bool((wanted.float() - got.float()).abs().max().item() <= CLOSE[wanted.dtype] * max(largest, 1e-6))


def attends_alike(module: nn.Module, made: nn.Module, like: Tensor) -> bool:
    """Return whether two attention modules compute the same in a pass over a small pool, and write the same to it."""
    return _alike(module, like, [partial(_first, module), partial(_first, made)])


def computes_alike(
    layer: nn.Module, made: Callable[..., Tensor], attention: nn.Module, following: nn.Module | None
) -> bool:
    """Return whether two forms of a decoder layer compute the same in a pass over a small pool.

    following  the norm that reads the layer's result, which one of them may have computed; None: another layer does
    """
    own: Any = attention

    def and_norm(form: Callable[..., Tensor], **given: Any) -> Tensor:
        states = form(given.pop("hidden_states"), **given)
        return states if following is None else torch.cat([states, following(states)], -1)

    return _alike(attention, example_of(own.o_proj), [partial(and_norm, form) for form in (layer, made)])


class AttentionSizes(NamedTuple):
    """Sizes of an attention module, and the names of the linear layers that make queries, keys and values.

    inputs  numbers of a hidden state
    size    numbers of a head, in values too
    """

    names: tuple[str, ...]
    inputs: int
    heads: int
    kv_heads: int
    size: int

    @classmethod
    def of(cls, attention: Any) -> "AttentionSizes | None":
        """Read the sizes of a module with the parts of Llama's attention, or with one joined layer (Phi-3)."""
        size, output = getattr(attention, "head_dim", None), getattr(attention, "o_proj", None)
        if not isinstance(size, int) or output is None or not hasattr(output, "in_features"):
            return None
        heads = output.in_features // size
        for names in (("q_proj", "k_proj", "v_proj"), ("qkv_proj",)):
            parts = [getattr(attention, name, None) for name in names]
            if any(not hasattr(part, "out_features") for part in parts):
                continue
            widths = [int(part.out_features) // size for part in parts]  # type: ignore[union-attr]
            kv_heads = widths[1] if len(widths) == 3 else (widths[0] - heads) // 2
            wanted = [heads, kv_heads, kv_heads] if len(widths) == 3 else [heads + 2 * kv_heads]
            if kv_heads > 0 and widths == wanted:
                return cls(names, int(parts[0].in_features), heads, kv_heads, size)  # type: ignore[union-attr]
        return None


def _first(form: Callable[..., tuple[Tensor, ...]], **given: Any) -> Tensor:
    return form(**given)[0]


def _alike(attention: nn.Module, like: Tensor, forms: Sequence[Callable[..., Tensor]]) -> bool:
    """Return whether functions with an attention module's arguments compute and write the same over a small pool."""
    own: Any = attention
    sizes = AttentionSizes.of(attention)
    if sizes is None:
        return False
    return all(_alike_in(this, sizes, own.layer_idx, like, forms) for this in _small_passes(like.device))


def _alike_in(
    this: DevicePass | PackedPass,
    sizes: AttentionSizes,
    layer: int,
    like: Tensor,
    forms: Sequence[Callable[..., Tensor]],
) -> bool:
    """Return whether functions compute and write the same in one pass over a small pool."""
    from transformers.cache_utils import Cache as TransformersCache

    from draftproof.models.hf import PoolLayer

    device, dtype, size = like.device, like.dtype, sizes.size
    slots, positions = this.slots, this.positions.flatten()
    angle = positions[:, None].float() * torch.linspace(0.1, 1.0, size // 2, device=device)
    embeddings = tuple(f(torch.cat([angle, angle], -1)).to(dtype)[None] for f in (torch.cos, torch.sin))
    scale = torch.linspace(0.5, 1.5, 6, device=device, dtype=dtype)[:, None]
    hidden = _numbers((sizes.inputs,), like)[:1].expand(6, -1) * scale
    mask = next(iter(this.placeholders().values()))
    outputs = []
    token = running.set(this)
    try:
        for form in forms:
            shape = (24, sizes.kv_heads, size)
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            past = TransformersCache(layers=[PoolLayer(keys, values, slots)] * (layer + 1))
            result = form(
                hidden_states=hidden[None],
                position_embeddings=embeddings,
                attention_mask=mask,
                past_key_values=past,
                position_ids=positions[None] + FAR,  # for a module that does more with positions than to rotate
            )
            outputs.append((result.view(2, 3, -1)[:, :2], keys[:10], values[:10]))
    except Exception:  # a module that wants other arguments is not what it looks like
        return False
    finally:
        running.reset(token)
    return all(_close(wanted, got) for wanted, got in zip(*outputs, strict=True))


def _small_passes(device: torch.device) -> Iterator[DevicePass | PackedPass]:
    """Yield passes of each kind that a device runs, over two rows of 3 tokens, of which the second may have 2."""
    kinds, tokens = (("full_attention", None),), torch.zeros((2, 3), dtype=torch.long, device=device)
    if runs_kernels(device):
        yield DevicePass(tokens, torch.tensor([[0, 8], [0, 0], [3, 2]], device=device), 16, 8, kinds)
    yield PackedPass(tokens.flatten(), [Span(0, 0, 3), Span(8, 0, 3)], kinds)
