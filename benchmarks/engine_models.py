"""Make the models, drafters and prompts of engine_gpu.py, with random weights created on the device: no hub needed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NGram
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.models.head.network import FittedHead, Head
from draftproof.models.head.taps import shape_for
from draftproof.models.hf import HFModel


@dataclass(frozen=True)
class Scale:
    """Sizes of all parts: the real ones, or so small that a CPU runs everything in a minute."""

    device: str
    tiny: bool

    def of(self, real: int, tiny: int) -> int:
        """Return one of two sizes."""
        return tiny if self.tiny else real


def llama(scale: Scale, seed: int, vocab: int, hidden: int, layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """Make a Llama without an end-of-text token.

    A small vocabulary gets large weights, so that distributions depend on the text.
    """
    heads = max(2, hidden // 128)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.5 if vocab < 100 else 0.05,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(scale.device):  # a billion random numbers take a CPU half a minute
        return LlamaForCausalLM(config).to(dtype).eval()


def small_target(scale: Scale) -> Any:
    return llama(scale, 0, scale.of(4096, 256), scale.of(512, 32), scale.of(8, 3))


def billion(scale: Scale) -> Any:
    """Make a model with the shape of a 1B model."""
    return llama(scale, 3, scale.of(32000, 512), scale.of(2048, 32), scale.of(16, 3), torch.bfloat16)


def first_layers(model: Any, count: int, share: float) -> Any:
    """Scale down the later layers' output, in place, and return a model of the first layers, which then drafts well."""
    with torch.no_grad():
        for layer in model.model.layers[count:]:
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:count]
    with torch.device(model.device):
        small = LlamaForCausalLM(config).to(model.dtype).eval()
    small.load_state_dict(model.state_dict(), strict=False)
    return small


def head(model: Any, size: int = 1024) -> FittedHead:
    """Make an untrained head: it drafts badly, and costs as much as a good one."""
    ids = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(5))[:size]
    return FittedHead.on(Head(shape_for(model), seed=1), ids, model, size=size)


def drafters(model: Any, small: Any, *, graphs: bool = True) -> dict[str, Callable[[], Any]]:
    """Return factories of drafters by name: each engine needs a new one, because drafters keep state of requests."""
    V = model.config.vocab_size
    return {
        "none": lambda: None,
        "ngram": lambda: "ngram",
        "suffix": lambda: "suffix",
        "model": lambda: ModelDrafter(HFModel(small, graphs=graphs), vocab_size=V),
        "early-exit": lambda: f"early-exit:{min(2, model.config.num_hidden_layers - 1)}",
        "head": lambda: HeadDrafter(head(model), graphs=graphs),
        "suffix+head": lambda: Switch(Suffix(), HeadDrafter(head(model), graphs=graphs)),
    }


def tree_drafters(model: Any, small: Any, branches: int) -> dict[str, Callable[[], Any]]:
    """Return factories of drafters for rule="tree" by name; a chain is a tree too."""
    V = model.config.vocab_size
    return {
        "ngram": lambda: NGram(branches=branches, fillers=1),
        "suffix": lambda: Suffix(branches=branches),
        "model": lambda: ModelDrafter(HFModel(small), vocab_size=V, branches=branches),
        "chain": lambda: ModelDrafter(HFModel(small), vocab_size=V),
        "head": lambda: HeadDrafter(head(model), branches=branches),
        "suffix+head": lambda: Switch(Suffix(branches=branches), HeadDrafter(head(model), branches=branches)),
    }


def numbers(n: int, count: int, vocab: int) -> list[int]:
    """Return a prompt of random tokens whose second half repeats the first, so that copying drafters find matches."""
    half = torch.randint(vocab, (-(-count // 2),), generator=torch.Generator().manual_seed(n)).tolist()
    return (half * 2)[:count]
