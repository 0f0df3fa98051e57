"""Run the layers of Llama-shaped models with few kernels on a GPU: merged products, and one kernel for each small step.

The layers of our own structural copy are changed, never those of the model passed in. A module is replaced because it
has the parts and computes what its replacement computes: both are run on the same numbers and compared. Models that are
built differently keep their modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from draftproof.core.device import runs_kernels
from draftproof.models.device_pass import DevicePass
from draftproof.models.packed import running
from draftproof.models.weight_sharing import decoder_stack

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)

CLOSE: Final = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}
"""How far a replacement may be from its module, as a share of the largest number: a few roundings of the dtype."""


MERGED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that read the same input, and are one product."""


@dataclass(slots=True)
class Fusion:
    """What was replaced in a model: modules by kind, and bytes of weights that were copied to be merged."""

    norms: int = 0
    attentions: int = 0
    gates: int = 0
    bytes: int = 0


@torch.no_grad()
def fuse(model: PreTrainedModel) -> Fusion:
    """Replace modules of a structural copy by fused ones, where they compute the same."""
    made, stack = Fusion(), decoder_stack(model)
    if stack is None or not runs_kernels(model.device) or model.dtype not in DTYPES:
        return made
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (norm := FusedNorm.of(child)) is not None:
                setattr(module, name, norm)
                made.norms += 1
    parent, name = stack
    for layer in getattr(parent, name):
        for part, child in list(layer.named_children()):
            if (gated := FusedMLP.of(child)) is not None:
                setattr(layer, part, gated)
                made.gates += 1
                made.bytes += _copied(gated.merged, child)
            elif (attention := FusedAttention.of(child)) is not None:
                setattr(layer, part, attention)
                made.attentions += 1
                made.bytes += _copied(attention.merged, child)
    return made


@torch.no_grad()
def lay_side_by_side(model: nn.Module) -> None:
    """Move weights that will be merged into one buffer each, so that merging copies nothing.

    For models that we loaded ourselves: the parameters keep their values and become slices, which tools that look at
    storages (`save_pretrained`) may refuse.
    """
    for module in model.modules():
        for names in MERGED:
            parts = [part for name in names if type(part := getattr(module, name, None)) is nn.Linear]
            if len(parts) == len(names):
                weights = [part.weight for part in parts]
                sizes = [len(weight) for weight in weights]
                for weight, place in zip(weights, torch.cat([w.detach() for w in weights]).split(sizes), strict=True):
                    weight.data = place


class FusedNorm(nn.Module):
    """RMSNorm in one kernel."""

    def __init__(self, weight: Tensor, eps: float, plus_one: bool, round_first: bool) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps
        self.plus_one, self.round_first = plus_one, round_first

    @classmethod
    def of(cls, module: nn.Module) -> "FusedNorm | None":
        """Return the fused form of a module that is an RMSNorm; None if it computes anything else."""
        weight = getattr(module, "weight", None)
        if list(module.children()) or not isinstance(weight, Tensor) or weight.ndim != 1 or len(vars(module)) > 20:
            return None
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float) or weight.dtype not in DTYPES or not _takes_one_tensor(module):
            return None
        for plus_one, round_first in ((False, True), (False, False), (True, False)):
            made = cls(weight, eps, plus_one, round_first)
            if _agree(module, made, (weight.shape[0],), weight):
                return made
        return None

    def forward(self, x: Tensor) -> Tensor:
        from draftproof.kernels.layer import rms_norm

        return rms_norm(x, self.weight, self.variance_epsilon, plus_one=self.plus_one, round_first=self.round_first)


class FusedMLP(nn.Module):
    """A gated MLP: gate and up in one product, activation and multiplication in one kernel."""

    def __init__(self, merged: Tensor, bias: Tensor | None, down_proj: nn.Module, tanh: bool) -> None:
        super().__init__()
        self.merged = nn.Parameter(merged, requires_grad=False)
        self.merged_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.down_proj, self.tanh = down_proj, tanh

    @classmethod
    def of(cls, module: nn.Module) -> "FusedMLP | None":
        """Return the fused form of a module that is a gated MLP; None if it computes anything else."""
        names = ("gate_proj", "up_proj", "down_proj")
        parts = [part for name in names if type(part := getattr(module, name, None)) is nn.Linear]
        if len(parts) < len(names) or not _has_only(module, *names):
            return None
        gate, up, down = parts
        merged, bias = _merged([gate, up])
        for tanh in (False, True):
            made = cls(merged, bias, down, tanh)
            if _agree(module, made, (gate.in_features,), gate.weight):
                return made
        return None

    def forward(self, x: Tensor) -> Tensor:
        from draftproof.kernels.layer import gate

        made: Tensor = self.down_proj(gate(linear(x, self.merged, self.merged_bias), tanh=self.tanh))
        return made


class FusedAttention(nn.Module):
    """Attention over a pool: q, k and v in one product; norms of heads, rotary embedding and the write in one kernel.

    Other passes, such as those that read prompts, run the module it replaces.
    """

    def __init__(self, original: nn.Module, merged: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        own: Any = original
        self.original, self.merged = original, nn.Parameter(merged, requires_grad=False)
        self.merged_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.size: int = own.head_dim
        self.heads: int = own.q_proj.out_features // self.size
        self.scaling: float = own.scaling
        self.softcap: float | None = getattr(own, "attn_logit_softcapping", None)
        self.layer_idx: int = own.layer_idx

    @classmethod
    def of(cls, module: nn.Module) -> "FusedAttention | None":
        """Return the fused form of an attention module whose parts are those of Llama's, with norms of heads or not."""
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        linears = [part for name in names if type(part := getattr(module, name, None)) is nn.Linear]
        if len(linears) < len(names):
            return None
        known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
        fields = ("head_dim", "scaling", "layer_idx")
        if {name for name, _ in module.named_children()} - known or not all(hasattr(module, name) for name in fields):
            return None
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        if any(norm is not None and not isinstance(norm, FusedNorm) for norm in norms) or (norms[0] is None) != (
            norms[1] is None
        ):
            return None
        own: Any = module
        if any(norm is not None and norm.weight.shape[0] != own.head_dim for norm in norms):
            return None
        made = cls(module, *_merged(linears[:3]))
        return made if _attends_alike(module, made) else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        this = running.get()
        if not isinstance(this, DevicePass) or position_embeddings is None:
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
        this: DevicePass,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any,
    ) -> Tensor:
        """Return what the output product is given, [1, N, heads · size]."""
        from draftproof.kernels.layer import rotate_and_write

        own: Any = self.original
        layer = past_key_values.layers[self.layer_idx]
        cos, sin = (each.reshape(-1, each.shape[-1]) for each in position_embeddings)
        q_norm = getattr(own, "q_norm", None)
        queries = rotate_and_write(
            linear(hidden_states[0], self.merged, self.merged_bias),
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
        if not weight.is_contiguous() or weight.data_ptr() != end or not _share_storage(weight, first):
            return torch.cat(list(weights))
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _copied(merged: Tensor, module: nn.Module) -> int:
    """Return the bytes that merging a module's weights has added."""
    return 0 if any(_share_storage(merged, weight) for weight in module.parameters()) else merged.nbytes


def _has_only(module: nn.Module, *linears: str) -> bool:
    """Return whether a module has these linear layers, an activation without weights, and no other parts."""
    others = [child for name, child in module.named_children() if name not in linears]
    return all(not list(child.parameters()) for child in others) and len(others) <= 2


def _takes_one_tensor(module: nn.Module) -> bool:
    return module.forward.__code__.co_argcount == 2 if hasattr(module.forward, "__code__") else True


def _numbers(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((3, *shape), generator=generator).to(like.device, like.dtype)


def _agree(
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


def _attends_alike(module: nn.Module, made: FusedAttention) -> bool:
    """Return whether two attention modules compute the same in a pass over a small pool, and write the same to it."""
    from transformers.cache_utils import Cache as TransformersCache

    from draftproof.models.hf import PoolLayer

    own: Any = module
    if own.v_proj.out_features != own.k_proj.out_features:
        return False
    device, dtype, size = made.merged.device, made.merged.dtype, made.size
    places = torch.tensor([[0, 8], [0, 0], [3, 2]], device=device)
    this = DevicePass(torch.zeros((2, 3), dtype=torch.long, device=device), places, 16, 8, (("full_attention", None),))
    angle = this.positions[0, :, None].float() * torch.linspace(0.1, 1.0, size // 2, device=device)
    embeddings = tuple(f(torch.cat([angle, angle], -1)).to(dtype)[None] for f in (torch.cos, torch.sin))
    scale = torch.linspace(0.5, 1.5, 6, device=device, dtype=dtype)[:, None]
    hidden = _numbers((made.merged.shape[1],), made.merged)[:1].expand(6, -1) * scale
    mask = next(iter(this.placeholders().values()))
    outputs = []
    token = running.set(this)
    try:
        for each in (module, made):
            shape = (24, own.k_proj.out_features // size, size)
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            past = TransformersCache(layers=[PoolLayer(keys, values, this.slots)] * (made.layer_idx + 1))
            result = each(
                hidden_states=hidden[None], position_embeddings=embeddings, attention_mask=mask, past_key_values=past
            )
            outputs.append((result[0].view(2, 3, -1)[:, :2], keys[:10], values[:10]))
    except Exception:  # a module that wants other arguments is not what it looks like
        return False
    finally:
        running.reset(token)
    return all(_close(wanted, got) for wanted, got in zip(*outputs, strict=True))
