"""Decoder layer of a published head (EAGLE-3, DFlash). Modules have the names of the checkpoints' tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from draftproof.models.head.rotary import Rotary

Heads = Float[Tensor, "B h n d"]

LAYER_CONFIGS: Final[dict[str, type[PreTrainedConfig]]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Kinds of layers that published drafters are made of. transformers' classes fill in what a config.json leaves out."""

SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


def read_layer_config(values: Any, source: Path) -> PreTrainedConfig:
    """Return the configuration of a drafter's layers, from the part of its config.json that describes them."""
    if not isinstance(values, dict):
        raise ValueError(f"{source} lacks transformer_layer_config, the sizes of the drafter's layers: get it again")
    kind = values.get("model_type", "qwen3")  # the default of speculators
    if not isinstance(kind, str) or kind not in LAYER_CONFIGS:
        raise ValueError(f"{source}: layers of model_type {kind!r} are not known; known are {', '.join(LAYER_CONFIGS)}")
    try:
        config = LAYER_CONFIGS[kind](**{name: value for name, value in values.items() if name != "model_type"})
    except Exception as error:  # transformers validates by errors of its own, and divides by sizes first
        raise ValueError(f"{source} does not describe a {kind} layer: {error}") from error
    _check_sizes(config, source)
    return config


def _check_sizes(config: PreTrainedConfig, source: Path) -> None:
    """Refuse sizes of which no layer can be made."""
    for name in SIZES:
        value = getattr(config, name, None)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{source}: {name} must be a whole number ≥ 1; got {value!r}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads:
        raise ValueError(f"{source}: {heads} num_attention_heads cannot share {kv_heads} num_key_value_heads evenly")
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"{source}: hidden_act {config.hidden_act!r} is none that transformers knows, such as 'silu'")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a decoder layer and which optional parts it has."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    activation: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LayerShape":
        """Read the sizes from a Llama or Qwen3 configuration; only Qwen3 norms queries and keys."""
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            activation=config.hidden_act,
            attention_bias=bool(config.attention_bias),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type == "qwen3",
        )


class DecoderLayer(nn.Module):
    """A decoder layer: norm, attention, norm, MLP.

    The first layer of an EAGLE-3 head has `inputs` = 2: its attention reads the normed embedding and, after a norm of
    its own, the state.
    """

    def __init__(self, shape: LayerShape, *, inputs: int = 1) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        if inputs == 2:
            self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape, inputs * shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape)

    def rest(self, residual: Float[Tensor, "B n H"], attended: Heads) -> Float[Tensor, "B n H"]:
        """Apply the part of the layer after attention."""
        x = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        state: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return state


class Attention(nn.Module):
    """The projections of a layer's attention. Attending itself is left to the caller, who owns the cache."""

    def __init__(self, shape: LayerShape, width: int) -> None:
        super().__init__()
        self.head_dim, bias = shape.head_dim, shape.attention_bias
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=bias)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps) if shape.qk_norm else nn.Identity()

    def queries(self, x: Float[Tensor, "B n I"], positions: Int[Tensor, "#B n"], rotary: Rotary) -> Heads:
        rotated: Tensor = rotary(self.q_norm(self._split(self.q_proj(x))), positions)
        return rotated

    def keys_values(
        self, x: Float[Tensor, "B n I"], positions: Int[Tensor, "#B n"], rotary: Rotary
    ) -> tuple[Float[Tensor, "B g n d"], Float[Tensor, "B g n d"]]:
        keys: Tensor = rotary(self.k_norm(self._split(self.k_proj(x))), positions)
        return keys, self._split(self.v_proj(x))

    def _split(self, x: Float[Tensor, "B n O"]) -> Heads:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)
        self.activation = ACT2FN[shape.activation]

    def forward(self, x: Float[Tensor, "*N H"]) -> Float[Tensor, "*N H"]:
        result: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return result
