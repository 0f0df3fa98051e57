"""The modules of a Llama model by transformers' names, without importing transformers.

They only hold weights: `LlamaPass` computes with them. The bundled model is loaded into them, because importing
transformers' modelling code takes longer and more memory than loading the weights. `as_transformers` is for everything
else that a model of transformers can do.
"""

import copy
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from draftproof.models.fingerprint import PerModel


@dataclass(slots=True)
class LlamaConfig:
    """The configuration of a Llama model without scaled positions, by the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    hidden_act: str = "silu"
    model_type: str = "llama"
    is_encoder_decoder: bool = False

    @classmethod
    def read(cls, path: Path) -> "LlamaConfig":
        """Read a config.json."""
        values = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Return the parameters of its rotary positions, as transformers names them."""
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    def get_text_config(self, decoder: bool = False) -> "LlamaConfig":
        """Return itself: the model has no part but the decoder of text."""
        return self


class Norm(nn.Module):
    """The weight of an RMSNorm."""

    def __init__(self, weight: Float[Tensor, " H"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Rotary(nn.Module):
    """The frequencies of rotary positions, computed as transformers does, in float32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", 1.0 / config.rope_theta**exponents, persistent=False)


class Attention(nn.Module):
    """The projections of a layer's attention."""

    def __init__(self, config: LlamaConfig, **projections: nn.Module) -> None:
        super().__init__()
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, projections[name])


class Mlp(nn.Module):
    """The projections of a layer's MLP."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, input_layernorm: Norm, self_attn: Attention, post_attention_layernorm: Norm, mlp: Mlp) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp


class Decoder(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, embed_tokens: nn.Module, layers: nn.ModuleList, norm: nn.Module, rotary_emb: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm, self.rotary_emb = embed_tokens, layers, norm, rotary_emb


class Llama(nn.Module):
    """A Llama model: the modules of this file, or those of a model of transformers, shared.

    config  a `LlamaConfig`, of this file or of transformers
    """

    def __init__(self, config: Any, model: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = config, model, lm_head
        self.source_weights_hash: str | None = None
        """Hash of the weights that it was quantised from (head/taps.py)."""

    @classmethod
    def of(cls, model: nn.Module) -> "Llama | None":
        """Return another holder of a model's modules, which does not refer to the model; None if it is no Llama."""
        name = f"{type(model).__module__}.{type(model).__name__}"
        if isinstance(model, Llama) or name == "transformers.models.llama.modeling_llama.LlamaForCausalLM":
            return cls(model.config, model.model, model.lm_head)  # type: ignore[arg-type]
        return None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def first_layers(self, count: int) -> "Llama":
        """Return a model of the first `count` layers, the norm and the output layer, on the same modules."""
        decoder: Any = self.model
        total = len(decoder.layers)
        if not 1 <= count < total:
            raise ValueError(f"first_layers({count}): the model has {total} layers, so take 1 to {total - 1}")
        config = copy.copy(self.config)
        config.num_hidden_layers = count
        part = Decoder(decoder.embed_tokens, decoder.layers[:count], decoder.norm, decoder.rotary_emb)
        return Llama(config, part, self.lm_head)

    def as_transformers(self) -> Any:
        """Return the model as transformers' `LlamaForCausalLM`, on the same weights. It is made once."""
        return _AS_TRANSFORMERS.get(self, "transformers", None, lambda: _as_transformers(self))

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("this model only holds weights: call as_transformers() of it, or use `Engine.model`")


_AS_TRANSFORMERS: PerModel[Any] = PerModel()
"""The transformers model of each `Llama` that is alive and was asked for it."""


def _as_transformers(ours: Llama) -> Any:
    """Make transformers' model without weights, and put our modules in the place of its own."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(**asdict(ours.config))
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(config)
    made.model.rotary_emb = LlamaRotaryEmbedding(config)
    for name, module in ours.named_modules():
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, Norm):
            made.get_submodule(name).weight = module.weight
        elif not isinstance(module, _HOLDERS):
            setattr(made.get_submodule(parent), leaf, module)
    made.source_weights_hash = ours.source_weights_hash
    return made.eval().requires_grad_(False)


_HOLDERS = (Llama, Decoder, Layer, Attention, Mlp, Rotary, nn.ModuleList)
"""Modules that transformers' model has its own of."""
