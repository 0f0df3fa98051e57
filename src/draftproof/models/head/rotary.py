"""Rotary positions of a published head, scaled as its own configuration says."""

from pathlib import Path
from typing import Final

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftproof.models.head.network import rotate

FIXED: Final = ("default", "linear", "llama3", "yarn")
"""Kinds of scaling whose frequencies do not depend on the length of the text. With the others, keys that were cached
early would be rotated by other frequencies than later ones."""


class Rotary(nn.Module):
    """Rotates queries and keys to their positions. YaRN also scales them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        if kind not in FIXED:
            reason = "depends on the length of the text" if kind in ROPE_INIT_FUNCTIONS else "is not known"
            raise ValueError(f"rope_type {kind!r} {reason}; served are {', '.join(FIXED)}")
        computed = LlamaRotaryEmbedding(config)
        self.frequencies: Tensor
        self.register_buffer("frequencies", computed.inv_freq.float(), persistent=False)
        self.scale = float(computed.attention_scaling)

    @classmethod
    def of(cls, config: PreTrainedConfig, source: Path) -> "Rotary":
        """Make the rotary positions of a configuration; `source` is its file, for the message of a refusal."""
        try:
            return cls(config)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{source}: rope_parameters cannot be used: {error}") from error

    def forward(self, x: Float[Tensor, "B h n d"], positions: Int[Tensor, "#B n"]) -> Float[Tensor, "B h n d"]:
        rotated = rotate(x, positions, self.frequencies)
        return rotated if self.scale == 1 else rotated * self.scale
