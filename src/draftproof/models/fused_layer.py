"""Run a decoder layer whose modules are fused with each sum of its residual stream in one step with the next norm."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn

from draftproof.models.comparison import computes_alike
from draftproof.models.fused_modules import FusedAttention, FusedMLP, FusedNorm


class FusedLayer:
    """What a decoder layer computes, with each sum of its residual stream in one step with the norm that reads it.

    It stands in for a layer's `forward` and holds its parts, not the layer: a layer that held itself would be freed
    late. The norm after the last sum is the next layer's, which finds it computed.

    before    the norm of the layer's input
    attended  the norm of what attention returns; None in layers without one
    middle    the norm between attention and MLP
    gated     the norm of what the MLP returns; None in layers without one
    """

    ARRANGEMENTS: Final = (
        ("input_layernorm", "self_attn", None, "post_attention_layernorm", "mlp", None),
        ("input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
         "post_feedforward_layernorm"),
    )  # fmt: skip
    """Names of a layer's parts in the order in which they run: Llama's, and Gemma 2's and 3's."""

    def __init__(self, parts: Sequence[Any], following: FusedNorm) -> None:
        self.before, self.attention, self.attended, self.middle, self.mlp, self.gated = parts
        self.following = following

    @classmethod
    def of(cls, layer: nn.Module, following: nn.Module | None) -> "FusedLayer | None":
        """Return the fused form of a layer whose parts are fused; None if it computes anything else."""
        children = dict(layer.named_children())
        for names in cls.ARRANGEMENTS:
            parts = [None if name is None else children.get(name) for name in names]
            if children.keys() != {name for name in names if name} or not isinstance(following, FusedNorm):
                continue
            attention, mlp = parts.pop(1), parts.pop(3)
            norms = all(part is None or isinstance(part, FusedNorm) for part in parts)
            if norms and isinstance(attention, FusedAttention) and isinstance(mlp, FusedMLP):
                made = cls([parts[0], attention, parts[1], parts[2], mlp, parts[3]], following)
                return made if computes_alike(layer, made, attention.original, following) else None
        return None

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        attended, _ = self.attention(hidden_states=self.before(hidden_states), **options)
        attended = attended if self.attended is None else self.attended(attended)
        hidden_states = self.middle.sum(hidden_states, attended)
        gated = self.mlp(self.middle(hidden_states))
        return self.following.sum(hidden_states, gated if self.gated is None else self.gated(gated))


def fuse_sums(layers: Sequence[nn.Module], last_norm: nn.Module | None) -> int:
    """Give each layer the `FusedLayer` that computes the same, if there is one; return how many have one."""
    followers = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), last_norm]
    made = [FusedLayer.of(layer, follower) for layer, follower in zip(layers, followers, strict=True)]
    for layer, fused in zip(layers, made, strict=True):
        if fused is not None:
            layer.forward = fused  # type: ignore[method-assign]
    return sum(fused is not None for fused in made)
