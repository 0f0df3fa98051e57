"""Save a tiny target and a drafter near it, in sizes that vLLM's kernels support, to folders that vLLM can load."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
import transformers as tf

from draftproof.models.head import file as headfile
from draftproof.models.head.export import export, exportable_taps
from draftproof.models.head.network import Head
from draftproof.models.head.taps import shape_for
from engine.tiny import NO_END

V = 64
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32
PROMPTS = [[(7 * i + j) % V for j in (0, 1, 2, 3, 0, 1, 2, 5, 0, 1)] for i in range(32)]


HEAD_LAYERS = 8
"""Layers of a target whose head reads three of them: vLLM expects three."""


def pair(layers: int = 2) -> tuple[tf.LlamaForCausalLM, tf.LlamaForCausalLM]:
    """Return a target and a drafter of fixed random weights."""
    shape = {"vocab_size": V, "num_hidden_layers": layers, "max_position_embeddings": 512, "initializer_range": 0.15}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        target = tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **NO_END, **shape)).eval()
        target.lm_head.weight *= 1.5 / target(torch.randint(V, (200, 8))).logits.std()
        drafter = deepcopy(target)
        head = drafter.lm_head.weight
        head += torch.randn_like(head) * 0.6 * head.std()
    return target, drafter


def saved(folder: Path, layers: int = 2) -> tuple[Path, Path]:
    """Save both models under this folder, and return their folders."""
    folders = folder / "target", folder / "drafter"
    for model, place in zip(pair(layers), folders, strict=True):
        model.save_pretrained(place)
    return folders


def saved_head(folder: Path, ids: Sequence[int] = range(V)) -> Path:
    """Save an untrained head for the target as `draftproof models export` writes it, and return its folder.

    `ids` are the tokens that it can draft.
    """
    target = pair(HEAD_LAYERS)[0]
    head = Head(shape_for(target, exportable_taps(HEAD_LAYERS)), seed=1)
    headfile.save(folder / "head", head, headfile.meta_for(target, tuple(ids), target="", training={}, licence=""))
    export(folder / "head", folder / "eagle3", target)
    return folder / "eagle3"
