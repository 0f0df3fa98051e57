"""Run a decoder layer whose modules are fused with each sum of its residual stream in one step with a norm."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor, nn

from draftproof.models.comparison import computes_alike
from draftproof.models.fused_modules import FusedAttention
from draftproof.models.fused_norm import FusedNorm


class FusedLayer:
    """What a decoder layer computes, with each sum of its residual stream in one step with the norm that reads it.

    It stands in for a layer's `forward` and holds its parts, not the layer: a layer that held itself would be freed
    late. The norm after the last sum is the next layer's, which finds it computed.

    before    the norm of the layer's input
    attended  the norm of what attention returns; None in layers without one
    middle    the norm between attention and MLP
    gated     the norm of what the MLP returns; None in layers without one
    factor    of what is added to the residual stream (Granite)
    """

    ARRANGEMENTS: Final = (
        ("input_layernorm", "self_attn", None, "post_attention_layernorm", "mlp", None),
        ("input_layernorm", "self_attn", None, "pre_feedforward_layernorm", "mlp", None),
        ("input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
         "post_feedforward_layernorm"),
    )  # fmt: skip
    """Names of a layer's parts in the order in which they run: Llama's, VaultGemma's, and Gemma 2's and 3's."""

    def __init__(self, parts: Sequence[Any], following: FusedNorm, factor: float) -> None:
        self.before, self.attention, self.attended, self.middle, self.mlp, self.gated = parts
        self.following, self.factor = following, factor

    @classmethod
    def of(cls, layer: nn.Module, following: nn.Module | None) -> "FusedLayer | None":
        """Return the fused form of a layer whose parts are fused; None if it computes anything else."""
        for names in cls.ARRANGEMENTS:
            parts = _parts(layer, names)
            if parts is not None and isinstance(following, FusedNorm):
                made = cls(parts, following, float(getattr(layer, "residual_multiplier", 1.0)))
                if computes_alike(layer, made, parts[1].original, following):
                    return made
        return None

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        attended, _ = self.attention(hidden_states=self.before(hidden_states), **options)
        attended = attended if self.attended is None else self.attended(attended)
        hidden_states = self.middle.sum(hidden_states, attended, self.factor)
        gated = self.mlp(self.middle(hidden_states))
        return self.following.sum(hidden_states, gated if self.gated is None else self.gated(gated), self.factor)


class PostNormLayer:
    """What a decoder layer computes that norms only what its parts return (OLMo 2), each in one step with its sum."""

    NAMES: Final = (None, "self_attn", "post_attention_layernorm", None, "mlp", "post_feedforward_layernorm")

    def __init__(self, parts: Sequence[Any]) -> None:
        _, self.attention, self.attended, _, self.mlp, self.gated = parts

    @classmethod
    def of(cls, layer: nn.Module) -> "PostNormLayer | None":
        """Return the fused form of a layer whose parts are fused; None if it computes anything else."""
        parts = _parts(layer, cls.NAMES)
        made = None if parts is None else cls(parts)
        return made if made is not None and computes_alike(layer, made, made.attention.original, None) else None

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        attended, _ = self.attention(hidden_states=hidden_states, **options)
        hidden_states = self.attended.added_to(hidden_states, attended)
        made: Tensor = self.gated.added_to(hidden_states, self.mlp(hidden_states))
        return made


def _parts(layer: nn.Module, names: Sequence[str | None]) -> list[Any] | None:
    """Return the parts of a layer by name, if it has no others and its norms and its attention are fused."""
    children = {name: part for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
    if children.keys() != {name for name in names if name} or (layer.training and _drops(layer)):
        return None
    parts = [None if name is None else children[name] for name in names]
    before, attention, attended, middle, _, gated = parts
    norms = all(norm is None or isinstance(norm, FusedNorm) for norm in (before, attended, middle, gated))
    return parts if norms and isinstance(attention, FusedAttention) else None


def _drops(layer: nn.Module) -> bool:
    return any(isinstance(part, nn.Dropout) and part.p for part in layer.children())


def fuse_sums(layers: Sequence[nn.Module], last_norm: nn.Module | None) -> int:
    """Give each layer the fused form that computes the same, if there is one; return how many have one."""
    followers = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), last_norm]
    made: list[Callable[..., Tensor] | None] = [
        FusedLayer.of(layer, follower) or PostNormLayer.of(layer)
        for layer, follower in zip(layers, followers, strict=True)
    ]
    for layer, fused in zip(layers, made, strict=True):
        if fused is not None:
            layer.forward = fused  # type: ignore[method-assign]
    return sum(fused is not None for fused in made)
