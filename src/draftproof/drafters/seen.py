"""What the penalties count while a draft grows: the context, then the drafted tokens behind it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.core.host import sent
from draftproof.core.sampling import Sampling
from draftproof.core.types import History
from draftproof.drafters import Context


def seen(context: Context, device: torch.device) -> History:
    """On the device once a round; nothing where there is no penalty."""
    if not context.sampling.penalises:
        return History([], [])
    n = context.prompt_length
    parts = context.tokens[:n], context.tokens[n:]
    return History(*(sent(list(part), device) for part in parts))


def grown(histories: list[History], samplings: Sequence[Sampling], drafted: list[Tensor]) -> list[History]:
    """The same with the drafted tokens behind it."""
    if not drafted or not any(sampling.penalises for sampling in samplings):
        return histories
    rows = torch.stack(drafted, 1)
    return [
        History(h.prompt, torch.cat([h.output, row])) if isinstance(h.output, Tensor) else h
        for h, row in zip(histories, rows, strict=True)
    ]
