"""A head on its target: the target's embeddings before it, the target's output rows behind it."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.core.distribution import DraftVocab
from draftproof.models.compatibility import head_size
from draftproof.models.cpu_linear import halvable, halve, pack, packable
from draftproof.models.head import file as headfile
from draftproof.models.head.network import Head
from draftproof.models.head.taps import embeddings, output_rows

ON_CPU: Final = 12288

"""Tokens that a head says on a CPU, where a step takes as long as its weights take to be read: more would keep a little
more of each draft and take longer than they save (docs/decisions.md)."""


@dataclass(frozen=True, slots=True)
class FittedHead:
    """Float32 on the target's device, on a CPU packed where that can be. The head that was passed in stays as it is."""

    head: Head
    table: Float[Tensor, "V H"]
    rows: nn.Module
    vocab: DraftVocab

    @classmethod
    def on(
        cls, head: Head, ids: Int[Tensor, " all"], model: PreTrainedModel, *, size: int | None = None
    ) -> "FittedHead":
        """`ids` are the tokens that the head may say, the most frequent first; it says the first `size` of them, by
        default as many as pay on the device."""
        device = torch.device(model.device)
        size = size or (ON_CPU if device.type == "cpu" else len(ids))
        ids = ids[:size].to(device=device, dtype=torch.long)
        head = copy.deepcopy(head).to(device=device, dtype=torch.float32).eval().requires_grad_(False)
        rows = nn.Sequential(_linear(output_rows(model, ids).to(device=device, dtype=torch.float32)))
        for part in (head, rows):
            if halvable(part):
                halve(part)
            elif packable(part):
                pack(part)
        return cls(head, embeddings(model), rows, DraftVocab.of(ids, head_size(model)))

    def embedded(self, tokens: Int[Tensor, "*N"]) -> Float[Tensor, "*N H"]:
        return nn.functional.embedding(tokens, self.table).float()

    def logits(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N R"]:
        """What the head's states say of the next token, over its own vocabulary."""
        scored: Tensor = self.rows(self.head.out(h))
        return scored


SHIPPED: Final = Path(__file__).parent.parent / "heads" / "smollm2-135m"

"""The head of the bundled model, where the package has brought one."""


def fitted(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """The head in this folder on its target; refused on any other."""
    head, meta = headfile.load(folder)
    headfile.check_target(meta, model)
    return FittedHead.on(head, torch.tensor(meta.ids), model)


def shipped_fits(model: PreTrainedModel) -> bool:
    """Has the package brought a head, and was it trained on this model?"""
    try:
        headfile.check_target(headfile.load(SHIPPED)[1], model)
    except ValueError:
        return False
    return True


def _linear(weight: Float[Tensor, "R H"]) -> nn.Linear:
    made: nn.Linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return made
