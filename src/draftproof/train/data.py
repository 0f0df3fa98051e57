"""The texts that a head learns from: made by the target in waves, each kept in a file as soon as it is there."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.models.door import decoder_config, furthest, head_size
from draftproof.models.tapped import shape_for
from draftproof.train.budget import Budget
from draftproof.train.lockstep import Start, Texts, converse
from draftproof.train.plan import Workplace
from draftproof.train.seeds import starts
from draftproof.train.turns import turns_of

SHORTEST: Final = 24
"""Tokens of a text below which there is nothing to learn from."""

CPU_ROWS: Final = 32
GPU_SHARE: Final = 0.55
"""Of the free memory of a GPU, for the keys and values of a wave."""

SEEDS: Final = 100_003
"""Waves that one seed has numbers for: plans with seeds next to each other have no text in common."""

HELD_OUT: Final = 32
"""One text in so many is kept for the evaluation."""

Report = Callable[[str, float], None]
"""What is being done, and how much of it is done."""


@dataclass(frozen=True, slots=True)
class Corpus:
    train: Texts
    held_out: Texts

    @property
    def tokens(self) -> int:
        return self.train.tokens.numel()


def corpus(place: Workplace, model: PreTrainedModel, tokenizer: Any, budget: Budget, report: Report) -> Corpus:
    """The texts that are there, and as many more as the budget for data has time for."""
    plan, took = place.plan, 0.0
    length = min(plan.length, furthest(decoder_config(model)) or plan.length)
    rows = rows_at_once(model, length)
    while not (files := _files(place.folder)) or _may_grow(place, budget, took):
        before = budget.spent
        place.spend(before)
        wave = _wave(model, tokenizer, rows, length, plan.seed * SEEDS + len(files), budget, report)
        if files and wave.tokens.shape[1] < kept(place.folder).tokens.shape[1]:
            break  # cut short by the clock, and texts of one length train together
        _write(place.folder / f"texts-{len(files):03}.safetensors", wave)
        length, took = wave.tokens.shape[1], budget.spent - before
        place.spend(budget.spent)
        budget.check_pause()
    return _split(kept(place.folder))


def _may_grow(place: Workplace, budget: Budget, wave: float) -> bool:
    """Whether there is time for another wave. A student that has begun keeps its texts: they name its vocabulary."""
    return not place.checkpoint.exists() and budget.left_until(budget.data_ends) > wave


def kept(folder: Path) -> Texts:
    """All waves in the folder."""
    parts = [load_file(path) for path in _files(folder)]
    return Texts(torch.cat([part["tokens"] for part in parts]), torch.cat([part["spoken"] for part in parts]).bool())


def rows_at_once(model: PreTrainedModel, length: int) -> int:
    """How many texts a wave has: what a GPU has memory for."""
    if model.device.type != "cuda":
        return CPU_ROWS
    shape, config = shape_for(model), decoder_config(model)
    remembered = 2 * config.num_hidden_layers * shape.kv_heads * shape.head_dim * length * model.dtype.itemsize
    laws = 5 * 4 * head_size(model)  # the draw holds a few float32 copies
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(32, int(GPU_SHARE * free / (remembered + laws)) // 32 * 32)


def frequent(texts: Texts, size: int, count: int, always: Sequence[int]) -> Int[Tensor, " R"]:
    """The `count` most frequent tokens of the answers, the most frequent first; those of `always` whatever they are."""
    if not 1 <= count <= size:
        raise ValueError(f"vocab={count}: the target has {size} tokens; give 1 to {size}")
    counts = torch.bincount(texts.tokens[texts.spoken].long(), minlength=size)
    counts[torch.tensor(sorted(set(always)), dtype=torch.long)] += int(counts.sum()) + 1
    return counts.argsort(descending=True, stable=True)[:count]


def _wave(
    model: PreTrainedModel, tokenizer: Any, rows: int, length: int, seed: int, budget: Budget, report: Report
) -> Texts:
    turns = turns_of(tokenizer)
    begun: list[Start] = starts(turns, tokenizer, rows, random.Random(seed))

    def go_on(position: int) -> bool:
        report("data", min(1.0, budget.spent / budget.data_ends))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # or the clock would tell how fast work is launched
        return position < SHORTEST or budget.left_until(budget.data_ends) > 0

    generator = torch.Generator(model.device).manual_seed(seed)
    return converse(model, turns, begun, length, generator, ends=ends_of(model, tokenizer), go_on=go_on)


def ends_of(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Every token that ends a text."""
    named = getattr(model.generation_config, "eos_token_id", None) or tokenizer.eos_token_id
    return [] if named is None else [named] if isinstance(named, int) else list(named)


def _split(texts: Texts) -> Corpus:
    """By rows and not by waves: both parts then have texts of every wave."""
    apart = torch.arange(len(texts)) % HELD_OUT == 0
    return Corpus(Texts(texts.tokens[~apart], texts.spoken[~apart]), Texts(texts.tokens[apart], texts.spoken[apart]))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("texts-*.safetensors"))


def _write(path: Path, texts: Texts) -> None:
    """Under another name first: a reader finds all of it or nothing."""
    unfinished = path.with_suffix(".part")
    save_file({"tokens": texts.tokens.contiguous(), "spoken": texts.spoken.to(torch.uint8).contiguous()}, unfinished)
    unfinished.rename(path)
