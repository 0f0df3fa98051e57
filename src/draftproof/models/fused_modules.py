"""Fused forms of the modules of Llama-shaped layers: RMSNorm, gated MLP, and attention over a pool.

Each is made of a module that has its parts and computes the same: both are run on the same numbers and compared.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftproof.core.device import runs_kernels
from draftproof.models.comparison import attends_alike, computes_the_same
from draftproof.models.cpu_linear import PackedLinear, join, joinable
from draftproof.models.device_pass import DevicePass
from draftproof.models.packed import PackedPass, running

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class FusedNorm(nn.Module):
    """RMSNorm in one step, or together with the sum that it reads."""

    def __init__(self, weight: Tensor, eps: float, plus_one: bool, round_first: bool) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps
        self.plus_one, self.round_first = plus_one, round_first
        self.step, self.sum_step = _steps(weight.device).rms_norm, _steps(weight.device).sum_and_norm
        self.ready: tuple[Tensor, Tensor] | None = None
        """A sum whose norm was computed with it, and that norm, until it is asked for."""

    @classmethod
    def of(cls, module: nn.Module) -> "FusedNorm | None":
        """Return the fused form of a module that is an RMSNorm; None if it computes anything else."""
        weight = getattr(module, "weight", None)
        if list(module.children()) or not isinstance(weight, Tensor) or weight.ndim != 1 or len(vars(module)) > 20:
            return None
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float) or not serves(weight.device, weight.dtype) or not _takes_one_tensor(module):
            return None
        if _is_hooked(module):
            return None
        for plus_one, round_first in ((False, True), (False, False), (True, False)):
            made = cls(weight, eps, plus_one, round_first)
            if computes_the_same(module, made, (weight.shape[0],), weight):
                return made
        return None

    def forward(self, x: Tensor) -> Tensor:
        ready, self.ready = self.ready, None
        if ready is not None and ready[0] is x:
            return ready[1]
        made: Tensor = self.step(
            x, self.weight, self.variance_epsilon, plus_one=self.plus_one, round_first=self.round_first
        )
        return made

    def sum(self, x: Tensor, added: Tensor) -> Tensor:
        """Return x + added. Its norm is computed in the same step, and kept for the call that will ask for it."""
        total, normed = self.sum_step(
            x, added, self.weight, self.variance_epsilon, plus_one=self.plus_one, round_first=self.round_first
        )
        self.ready = total, normed
        made: Tensor = total
        return made


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
        self.step = _steps(device).gate

    @classmethod
    def of(cls, module: nn.Module) -> "FusedMLP | None":
        """Return the fused form of a module that is a gated MLP; None if it computes anything else."""
        names = ("gate_proj", "up_proj", "down_proj")
        parts = _linears(module, *names)
        if parts is None or not _has_only(module, *names) or _is_hooked(module):
            return None
        gate, up, down = parts
        like = _example(gate)
        for tanh in (False, True):
            tried = cls(_Beside([gate, up]), down, tanh, like.device)
            if computes_the_same(module, tried, (gate.in_features,), like):
                return cls(_join([gate, up]), down, tanh, like.device)
        return None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(self.step(self.joined(x), tanh=self.tanh))
        return made


class FusedAttention(nn.Module):
    """Attention over a pool: q, k and v in one product; norms of heads, rotary embedding and the write in one step.

    Passes over other caches run the module it replaces.
    """

    def __init__(self, original: nn.Module, joined: nn.Module, device: torch.device) -> None:
        super().__init__()
        own: Any = original
        self.step = _steps(device).rotate_and_write
        self.original, self.joined = original, joined
        self.size: int = own.head_dim
        self.heads: int = own.q_proj.out_features // self.size
        self.scaling: float = own.scaling
        self.softcap: float | None = getattr(own, "attn_logit_softcapping", None)
        self.layer_idx: int = own.layer_idx

    @classmethod
    def of(cls, module: nn.Module) -> "FusedAttention | None":
        """Return the fused form of an attention module whose parts are those of Llama's, with norms of heads or not."""
        known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
        fields = ("head_dim", "scaling", "layer_idx")
        parts = _linears(module, "q_proj", "k_proj", "v_proj", "o_proj")
        if parts is None or {name for name, _ in module.named_children()} - known or _is_hooked(module):
            return None
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        if any(norm is not None and not isinstance(norm, FusedNorm) for norm in norms) or (norms[0] is None) != (
            norms[1] is None
        ):
            return None
        own: Any = module
        if not all(hasattr(module, name) for name in fields) or any(
            norm is not None and norm.weight.shape[0] != own.head_dim for norm in norms
        ):
            return None
        like = _example(parts[0])
        tried = cls(module, _Beside(parts[:3]), like.device)
        return cls(module, _join(parts[:3]), like.device) if attends_alike(module, tried, like) else None

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
        layer = past_key_values.layers[self.layer_idx]
        cos, sin = (each.reshape(-1, each.shape[-1]) for each in position_embeddings)
        q_norm = getattr(own, "q_norm", None)
        queries = self.step(
            self.joined(hidden_states[0]),
            cos,
            sin,
            layer.keys,
            layer.values,
            layer.slots,
            heads=self.heads,
            norms=None if q_norm is None else (own.q_norm.weight, own.k_norm.weight),
            eps=0.0 if q_norm is None else q_norm.variance_epsilon,
            plus_one=q_norm is not None and q_norm.plus_one,
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


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there are steps for a device and a dtype."""
    return dtype in DTYPES if runs_kernels(device) else device.type == "cpu" and dtype == torch.float32


def _steps(device: torch.device) -> Any:
    """Return the module with a device's steps: `rms_norm`, `sum_and_norm`, `gate` and `rotate_and_write`."""
    if runs_kernels(device):
        from draftproof.kernels import layer

        return layer
    from draftproof.models import layer_steps

    return layer_steps


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
    return join(linears) if isinstance(linears[0], PackedLinear) else MergedLinear(linears)


def _example(linear: Any) -> Tensor:
    """Return a tensor with the device and dtype of a linear layer's input."""
    return linear.weight if isinstance(linear, nn.Linear) else torch.empty(0)


def _is_written(layer: Any) -> bool:
    """Return whether a layer of a cache is one of a pool: others only learn the sizes of keys and values."""
    return getattr(layer, "keys", None) is not None and layer.keys.numel() > 0


def _is_hooked(module: nn.Module) -> bool:
    """Return whether someone is called when a module or its parts run: a replacement would not call them."""
    return any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


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


def _takes_one_tensor(module: nn.Module) -> bool:
    return module.forward.__code__.co_argcount == 2 if hasattr(module.forward, "__code__") else True
