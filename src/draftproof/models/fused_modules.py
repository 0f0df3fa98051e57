"""Fused forms of the modules of Llama-shaped layers: gated MLP, and attention over a pool.

Each is made of a module that has its parts and computes the same: both are run on the same numbers and compared.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftproof.core.device import runs_kernels
from draftproof.models.comparison import AttentionSizes, attends_alike, computes_the_same, example_of
from draftproof.models.cpu_linear import PackedLinear, join, joinable
from draftproof.models.device_pass import DevicePass
from draftproof.models.fused_norm import FusedNorm, is_hooked, steps_of
from draftproof.models.packed import PackedPass, running


class MergedLinear(nn.Module):
    """Linear layers that read the same input as one product."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight, bias = _merged(linears)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FusedMLP(nn.Module):
    """A gated MLP: gate and up in one product, activation and multiplication in one step."""

    def __init__(self, joined: nn.Module, down_proj: nn.Module, tanh: bool, device: torch.device) -> None:
        super().__init__()
        self.joined, self.down_proj, self.tanh = joined, down_proj, tanh
        self.step = steps_of(device).gate

    @classmethod
    def of(cls, module: nn.Module) -> "FusedMLP | None":
        """Return the fused form of a module that is a gated MLP; None if it computes anything else."""
        for names in (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")):
            parts = _linears(module, *names)
            if parts is None or not _has_only(module, *names) or is_hooked(module):
                continue
            *joined, down = parts
            like = example_of(down)
            for tanh in (False, True):
                tried = cls(_Beside(joined), down, tanh, like.device)
                if computes_the_same(module, tried, (joined[0].in_features,), like):
                    return cls(_join(joined), down, tanh, like.device)
        return None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(self.step(self.joined(x), tanh=self.tanh))
        return made


class FusedAttention(nn.Module):
    """Attention over a pool: q, k and v in one product; norms of heads, rotary embedding and the write in one step.

    Passes over other caches run the module it replaces.
    """

    def __init__(self, original: nn.Module, joined: nn.Module, sizes: AttentionSizes, device: torch.device) -> None:
        super().__init__()
        own: Any = original
        self.step = steps_of(device).rotate_and_write
        self.original, self.joined, self.sizes = original, joined, sizes
        self.scaling: float = own.scaling
        self.softcap: float | None = getattr(own, "attn_logit_softcapping", None)
        self.layer_idx: int = own.layer_idx

    @classmethod
    def of(cls, module: nn.Module) -> "FusedAttention | None":
        """Return the fused form of an attention module whose parts are those of Llama's, with norms or not.

        Norms are of each head (Qwen 3), or of all heads together (OLMo 2).
        """
        known = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
        sizes = AttentionSizes.of(module)
        if sizes is None or {name for name, _ in module.named_children()} - known or is_hooked(module):
            return None
        parts = _linears(module, *sizes.names, "o_proj")
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        if parts is None or not hasattr(module, "scaling") or not hasattr(module, "layer_idx"):
            return None
        if norms != [None, None] and not _norm_heads(norms, sizes):
            return None
        like = example_of(parts[0])
        tried = cls(module, _Beside(parts[:-1]), sizes, like.device)
        return cls(module, _join(parts[:-1]), sizes, like.device) if attends_alike(module, tried, like) else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        this = running.get()
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if not isinstance(this, DevicePass | PackedPass) or position_embeddings is None or not _is_written(layer):
            result: tuple[Tensor, Tensor | None] = self.original(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **options,
            )
            return result
        own: Any = self.original
        return own.o_proj(
            self.attended(this, hidden_states, position_embeddings, attention_mask, past_key_values)
        ), None

    def attended(
        self,
        this: DevicePass | PackedPass,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any,
    ) -> Tensor:
        """Return what the output product is given, [1, N, heads · size]."""
        own: Any = self.original
        layer, sizes = past_key_values.layers[self.layer_idx], self.sizes
        cos, sin = (each.reshape(-1, each.shape[-1]) for each in position_embeddings)
        qkv = self.joined(hidden_states[0])
        q_norm: Any = getattr(own, "q_norm", None)
        k_norm: Any = getattr(own, "k_norm", None)
        by_head = q_norm is not None and len(q_norm.weight) == sizes.size
        if q_norm is not None and not by_head:
            q_norm.over(qkv[:, : sizes.heads * sizes.size])
            k_norm.over(qkv[:, sizes.heads * sizes.size : (sizes.heads + sizes.kv_heads) * sizes.size])
        queries = self.step(
            qkv,
            cos,
            sin,
            layer.keys,
            layer.values,
            layer.slots,
            heads=sizes.heads,
            norms=(q_norm.weight, k_norm.weight) if by_head else None,
            eps=q_norm.variance_epsilon if by_head else 0.0,
            plus_one=by_head and q_norm.plus_one,
        )
        attended = this.attention(
            queries.transpose(0, 1)[None],
            layer.keys.transpose(0, 1)[None],
            layer.values.transpose(0, 1)[None],
            attention_mask,
            self.scaling,
            {"softcap": self.softcap},
        )
        return attended.flatten(2)


def _norm_heads(norms: Sequence[Any], sizes: AttentionSizes) -> bool:
    """Return whether fused norms are of each head, or of all query heads and all key heads together."""
    if not all(isinstance(norm, FusedNorm) for norm in norms):
        return False
    widths = [len(norm.weight) for norm in norms]
    return widths in ([sizes.size] * 2, [sizes.heads * sizes.size, sizes.kv_heads * sizes.size])


class _Beside(nn.Module):
    """Linear layers that read the same input, each as it is, with their results side by side: to try a replacement."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in self.linears], -1)


def _linears(module: nn.Module, *names: str) -> list[Any] | None:
    """Return linear layers of a module by name, if all but the last can be merged where they are."""
    parts = [getattr(module, name, None) for name in names]
    if all(type(part) is nn.Linear and runs_kernels(part.weight.device) for part in parts):
        return parts
    packed = [part for part in parts if type(part) is PackedLinear]
    merged = len(packed) == len(parts) and joinable(packed[:-1]) and not runs_kernels(torch.device("cpu"))
    return parts if merged else None


def _join(linears: Sequence[Any]) -> nn.Module:
    """Return linear layers as one product; packed ones have their weights in it from now on."""
    if len(linears) == 1:
        whole: nn.Module = linears[0]
        return whole
    return join(linears) if isinstance(linears[0], PackedLinear) else MergedLinear(linears)


def _is_written(layer: Any) -> bool:
    """Return whether a layer of a cache is one of a pool: others only learn the sizes of keys and values."""
    return getattr(layer, "keys", None) is not None and layer.keys.numel() > 0


def _merged(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights of linear layers as one, and their biases."""
    weights = [part.weight.detach() for part in linears]
    biases = [part.bias for part in linears]
    if all(bias is None for bias in biases):
        return _joined(weights), None
    zeros = [w.new_zeros(w.shape[0]) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
    return _joined(weights), torch.cat(zeros)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices one below the other: a view where they already lie so in memory, else a copy."""
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        if not weight.is_contiguous() or weight.data_ptr() != end or not share_storage(weight, first):
            return torch.cat(list(weights))
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _has_only(module: nn.Module, *linears: str) -> bool:
    """Return whether a module has these linear layers, an activation without weights, and no other parts."""
    others = [child for name, child in module.named_children() if name not in linears]
    return all(not list(child.parameters()) for child in others) and len(others) <= 2
