"""Draft with the multi-token prediction (MTP) layer inside a target's checkpoint (DeepSeek-V3, arXiv 2412.19437).

Such a layer was trained with the target, and transformers leaves it out when it loads the model. At position t it reads
the target's last state, after the final norm, and the embedding of x_{t+1}, and predicts x_{t+2}. Its own output, also
normed, replaces the state afterwards. Embeddings and output layer are the target's. It is a decoder layer of the
target's own class, so it is run by transformers' code over a `HeadCache`.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftproof.core.distribution import DraftVocab
from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.head.checkpoint import Checkpoint, load_exactly
from draftproof.models.head.network import FittedHead, HeadCache
from draftproof.models.head.taps import embeddings
from draftproof.models.masks import additive_mask
from draftproof.models.weight_sharing import decoder_stack

DEEPSEEK: Final = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": None,
    "embed_tokens.": None,
    "": "block.",
}
"""Prefixes of tensors in `model.layers.N.` (see STACKS), where N is the number of the target's layers, and ours; None:
not used, because they are copies of the target's (DeepSeek-V3, GLM-4.5 and later)."""

STACKS: Final = ("model.layers.", "model.language_model.layers.")
"""Where checkpoints have the target's layers; the second is that of models which also read images."""

QWEN: Final = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "norm.",
    "layers.0.": "block.",
    "embed_tokens.": None,
    "lm_head.": None,
}
"""Prefixes of tensors in `mtp.`, and ours (Qwen3-Next, Qwen3.5)."""

EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""Weights of one expert. transformers has those of all experts in one tensor, gate and up joined."""


class Mtp(nn.Module):
    """The MTP layer of a target. Its weights are undefined until they are loaded (`load`)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        parent, layers = _stack(model)
        config, hidden = _block_config(model), decoder_config(model).hidden_size
        norm = type(parent.norm)
        self.taps: tuple[int, ...] = (decoder_config(model).num_hidden_layers,)
        self.enorm, self.hnorm, self.norm = (norm(hidden, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = type(layers[-1])(config, 0)
        self._rotary = (parent.rotary_emb,)  # in a tuple, so that it is no submodule: it is the target's
        self._eager = config._attn_implementation == "eager"
        self._cached: tuple[tuple[int, int], tuple[int, int]] | None = None

    def new_cache(self, rows: int, capacity: int = 0) -> HeadCache:
        """Return a cache for what the layer's attention stores: keys and values, or with MLA the compressed ones."""
        weight = self.eh_proj.weight
        if self._cached is None:
            self._cached = self._stored_shapes()
        (heads, size), (value_heads, value_size) = self._cached
        assert heads == value_heads
        return HeadCache.empty(rows, capacity, heads, size, weight.device, weight.dtype, value_size=value_size)

    def fuse(self, states: Sequence[Float[Tensor, "*N H"]]) -> Float[Tensor, "*N H"]:
        """Return the target's last state."""
        return states[0]

    def step(
        self,
        embedded: Float[Tensor, "B n H"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        cache: HeadCache,
        *,
        slots: Int[Tensor, "B n"] | None = None,
        visible: Bool[Tensor, "B n S"] | None = None,
        reach: int | None = None,
    ) -> Float[Tensor, "B n H"]:
        """Compute the states at n positions of each row; see `network.Head.step`."""
        slots = positions if slots is None else slots
        reach = int(slots.max()) + 1 if reach is None else reach
        if visible is None:
            visible = torch.arange(reach, device=slots.device) <= slots[:, :, None]
        return self._run(embedded, h, positions, visible, _Slots(cache, slots, reach))

    def out(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N H"]:
        """Return the state: `step` has normed it."""
        return h

    def _run(self, embedded: Tensor, h: Tensor, positions: Tensor, visible: Tensor, past: Any) -> Tensor:
        dtype = self.eh_proj.weight.dtype
        x = self.eh_proj(torch.cat([self.enorm(embedded.to(dtype)), self.hnorm(h.to(dtype))], -1))
        mask = visible[:, None]
        result = self.block(
            x,
            attention_mask=additive_mask(mask, dtype) if self._eager else mask,
            position_ids=positions,
            position_embeddings=self._rotated(x, positions),
            past_key_values=past,
        )
        state: Tensor = self.norm(result[0] if isinstance(result, tuple) else result)
        return state.float()

    def _rotated(self, x: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"]) -> Any:
        """Return the target's rotary embeddings; a multimodal one counts time, height and width, equal in a text."""
        rotary: Any = self._rotary[0]
        return rotary(x, positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions)

    @torch.no_grad()
    def _stored_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Run the layer once, to see how many heads of what size it stores for a token."""
        seen = _Shapes()
        weight = self.eh_proj.weight
        empty = weight.new_zeros((1, 1, weight.shape[0]))
        start = torch.zeros((1, 1), dtype=torch.long, device=weight.device)
        self._run(empty, empty, start, start[:, :, None] == 0, seen)
        return seen.keys, seen.values


@dataclass(frozen=True, slots=True)
class _Slots:
    """A cache of transformers, as far as an attention layer calls it, that writes to slots of a `HeadCache`."""

    cache: HeadCache
    slots: Int[Tensor, "B n"]
    reach: int

    def update(self, keys: Tensor, values: Tensor, *layer: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(keys, values, self.slots, self.reach)


@dataclass(slots=True)
class _Shapes:
    """A cache of transformers that only notes number and size of the heads."""

    keys: tuple[int, int] = (0, 0)
    values: tuple[int, int] = (0, 0)

    def update(self, keys: Tensor, values: Tensor, *layer: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = ((part.shape[1], part.shape[3]) for part in (keys, values))
        return keys, values


class OutputLayer(nn.Module):
    """The target's output layer, for float32 states."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = layer, dtype

    def forward(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        logits: Tensor = self.layer(h.to(self.dtype)).float()
        return logits


def load(checkpoint: Checkpoint, model: PreTrainedModel) -> Mtp:
    """Read the MTP layer that belongs to a target from the target's checkpoint, in the target's precision."""
    tensors, in_file = _tensors(checkpoint, decoder_config(model).num_hidden_layers)
    with torch.device(model.device):
        network = Mtp(model)
    load_exactly(network, joined_experts(tensors, checkpoint.folder, in_file), checkpoint.folder, in_file)
    for weight in network.parameters():  # not buffers: routers keep a float32 bias
        weight.data = weight.data.to(model.dtype)
    return network.eval().requires_grad_(False)


def attach_mtp(network: Mtp, model: PreTrainedModel) -> FittedHead:
    """Attach an MTP layer to its target, which lends embeddings and output layer; nothing is copied."""
    everything = torch.arange(head_size(model), device=model.device)
    rows = OutputLayer(model.get_output_embeddings(), model.dtype)
    return FittedHead(network, embeddings(model), rows, DraftVocab.of(everything, head_size(model)))


def checkpoint_of(model: PreTrainedModel, folder: str | Path = "") -> Checkpoint:
    """Open the checkpoint that a target was loaded from, or the named one."""
    source = folder or model.config.name_or_path
    if not source:
        raise ValueError(
            f'drafter "mtp" reads a layer of the target\'s checkpoint, and this {type(model).__name__} was not loaded '
            'from one: name its folder, "mtp:folder"'
        )
    return Checkpoint.of(source)


def joined_experts(
    tensors: Mapping[str, Tensor], source: Path, in_file: Callable[[str], str] = str
) -> dict[str, Tensor]:
    """Join the weights of all experts: `gate_up_proj` and `down_proj`, with the expert as first axis.

    `source` and `in_file` name the folder and each tensor in the messages; see `load_exactly`.
    """
    found = {name: match for name in tensors if (match := EXPERT.fullmatch(name))}
    joined = {name: tensor for name, tensor in tensors.items() if name not in found}
    for prefix in sorted({match[1] for match in found.values()}):
        numbers = sorted({int(match[2]) for match in found.values() if match[1] == prefix})
        experts = [[f"{prefix}.{number}.{part}_proj.weight" for part in ("gate", "up", "down")] for number in numbers]
        for name in (name for names in experts for name in names if name not in tensors):
            raise ValueError(
                f"{source}: tensor {in_file(name)!r} is missing among those of {len(numbers)} experts: get it again"
            )
        _check_alike(tensors, experts, source, in_file)
        joined[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([tensors[g], tensors[u]]) for g, u, _ in experts])
        joined[f"{prefix}.down_proj"] = torch.stack([tensors[down] for _, _, down in experts])
    return joined


def _check_alike(
    tensors: Mapping[str, Tensor], experts: list[list[str]], source: Path, in_file: Callable[[str], str]
) -> None:
    """Refuse experts whose weights have different shapes: gate and up are transposed to down."""
    wanted = tensors[experts[0][0]].shape
    for names in experts:
        for name, shape in zip(names, (wanted, wanted, wanted[::-1]), strict=True):
            if tensors[name].shape != shape:
                raise ValueError(
                    f"{source}: tensor {in_file(name)!r} has shape {list(tensors[name].shape)}, and those of the first "
                    f"expert ask for {list(shape)}: the checkpoint is damaged, get it again"
                )


def _tensors(checkpoint: Checkpoint, layers: int) -> tuple[dict[str, Tensor], Callable[[str], str]]:
    """Read the tensors of the MTP layer, under our names; return them, and which name each has in the checkpoint."""
    stack = next((stack for stack in STACKS if f"{stack}{layers}.eh_proj.weight" in checkpoint.names), None)
    if stack is not None:
        start, prefixes, second = f"{stack}{layers}.", DEEPSEEK, f"{stack}{layers + 1}.eh_proj.weight"
    elif "mtp.fc.weight" in checkpoint.names:
        start, prefixes, second = "mtp.", QWEN, "mtp.layers.1.input_layernorm.weight"
    else:
        raise ValueError(
            f"{checkpoint.folder} holds no MTP layer: neither 'model.layers.{layers}.eh_proj.weight' (DeepSeek-V3, "
            "GLM-4.5) nor 'mtp.fc.weight' (Qwen3-Next, Qwen3.5). Use another drafter"
        )
    if second in checkpoint.names:
        raise ValueError(f"{checkpoint.folder} holds tensor {second!r}: more than one MTP layer is not supported")
    renamed = {}
    for name in sorted(name for name in checkpoint.names if name.startswith(start)):
        rest = name.removeprefix(start)
        prefix = next((prefix for prefix in prefixes if rest.startswith(prefix)), None)
        if prefix is None:
            raise ValueError(f"{checkpoint.folder} holds tensor {name!r}, which no known MTP layer has")
        if prefixes[prefix] is not None:
            renamed[name] = f"{prefixes[prefix]}{rest.removeprefix(prefix)}"

    def in_file(name: str) -> str:
        old, new = next((old, new) for old, new in prefixes.items() if new is not None and name.startswith(new))
        return f"{start}{old}{name.removeprefix(new)}"

    return {renamed[name]: tensor for name, tensor in checkpoint.read(renamed).items()}, in_file


def _block_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the one layer: full attention, and experts where the target has any.

    Settings that go by the layer's index are set for index 0. Attention is one that takes a mask of any form.
    """
    config = copy.deepcopy(decoder_config(model))
    config.num_hidden_layers = 1
    for name, value in (
        ("layer_types", ["full_attention"]),
        ("mlp_layer_types", ["sparse"]),
        ("first_k_dense_replace", 0),
        ("mlp_only_layers", []),
    ):
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    return config


def _stack(model: PreTrainedModel) -> tuple[Any, nn.ModuleList]:
    """Return the target's decoder and its layers."""
    stack = decoder_stack(model)
    if stack is None or not all(hasattr(stack[0], name) for name in ("norm", "rotary_emb")):
        raise ValueError(
            f"{type(model).__name__} has no single stack of decoder layers with a final norm and rotary positions, "
            "which an MTP layer is made after: use another drafter"
        )
    parent, name = stack
    return parent, getattr(parent, name)
