"""Read from a target what its head needs: sizes, embeddings, output rows, and a hash of its weights."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.cpu_linear import PackedLinear
from draftproof.models.head.network import HeadShape
from draftproof.models.transformers_types import PreTrainedConfig, PreTrainedModel

HASHED_WEIGHTS: Final = 2**14
"""Weights of a matrix that enter the hash, evenly spaced: enough to tell two models apart, and quick to read."""

HASHED_MATRICES: Final = 8
"""Matrices of a model that enter the hash: the embedding and, in most families, the whole first layer."""


def shape_for(model: PreTrainedModel, taps: tuple[int, ...] | None = None) -> HeadShape:
    """Return the shape of a head with the sizes of one of the target's layers; see `default_taps` for its taps."""
    config = decoder_config(model)
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    taps = default_taps(config.num_hidden_layers) if taps is None else taps
    if max(taps) > config.num_hidden_layers:
        raise ValueError(f"taps={taps}: {type(model).__name__} has layers 1 to {config.num_hidden_layers}")
    size = getattr(config, "head_dim", None) or hidden // heads
    return HeadShape(
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(size) + int(size) % 2,
        intermediate=_intermediate_size(config, hidden),
        rope_theta=_rope_theta(config),
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-5),
        taps=taps,
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the layers after about a quarter and three fifths of the target, and its last."""
    return tuple(sorted({max(1, round(layers * 4 / 15)), max(1, round(layers * 3 / 5)), layers}))


def embeddings(model: PreTrainedModel) -> Float[Tensor, "V H"]:
    """Return the target's input embeddings, not copied."""
    table: Tensor = model.get_input_embeddings().weight.detach()
    hidden = decoder_config(model).hidden_size
    if table.shape[1] != hidden:
        raise ValueError(
            f"{type(model).__name__} has embeddings of width {table.shape[1]} and states of width {hidden}: a head "
            "needs both of the same width"
        )
    return table


def output_rows(model: PreTrainedModel, ids: Int[Tensor, " R"]) -> Float[Tensor, "R H"]:
    """Copy the rows of the target's output layer that score these tokens."""
    weight = _weight_matrix(model.get_output_embeddings())
    if weight is None:
        raise ValueError(f"{type(model).__name__} has no output layer with one row for each token")
    return weight.index_select(0, ids.to(weight.device))


def weights_hash(model: PreTrainedModel) -> str:
    """Hash a model's weights: the same result on every device and in every precision, packed or quantised or not.

    It reads only signs, which no rounding changes, of a sample of the first matrices. Four bits change signs, so a
    quantised model remembers the hash of what it was made from.
    """
    known: str | None = getattr(model, "source_weights_hash", None)
    return hash_weights(model, _weight_matrices(model)) if known is None else known


def hash_weights(model: PreTrainedModel, matrices: Iterable[Tensor]) -> str:
    """Hash the sizes of a model and the signs of these matrices, of which the first HASHED_MATRICES are read."""
    config = decoder_config(model)
    sizes = config.hidden_size, config.num_hidden_layers, head_size(model)
    digest = hashlib.sha256(f"{config.model_type} {sizes}".encode())
    for _, weight in zip(range(HASHED_MATRICES), matrices, strict=False):
        flat = weight.reshape(-1)
        step = max(1, flat.numel() // HASHED_WEIGHTS)
        digest.update(torch.signbit(flat[::step][:HASHED_WEIGHTS]).cpu().numpy().tobytes())
    return digest.hexdigest()


def _weight_matrices(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        weight = _weight_matrix(module)
        if weight is not None:
            yield weight


def _weight_matrix(module: Any) -> Tensor | None:
    """Return a module's own weight matrix, unpacked; None if it has none."""
    if isinstance(module, PackedLinear):
        dense: Tensor = module.packed.to_dense()
        return dense
    weight = getattr(module, "weight", None)
    return weight.detach() if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _intermediate_size(config: PreTrainedConfig, hidden: int) -> int:
    for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"):
        size = getattr(config, name, None)
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return 4 * hidden


def _rope_theta(config: PreTrainedConfig) -> float:
    """Return the base of the target's rotary positions; 10 000 if it has none."""
    rope = getattr(config, "rope_parameters", None) or {}
    sets = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return float(next((part["rope_theta"] for part in sets if part.get("rope_theta")), 10_000.0))
