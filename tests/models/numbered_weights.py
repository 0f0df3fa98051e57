"""Weights that depend only on a tensor's name and shape, so that checkpoints need not be stored with the tests.

Neither draftproof nor its test tools are imported: reference packages run this file in their own environment.
"""

import math
from collections.abc import Iterable
from zlib import crc32

import torch
from torch import Tensor

VOCABULARY = 24
"""Tokens of the target in all reference checkpoints."""
DRAFTED = (1, 2, 3, 5, 8, 9, 11, 12, 14, 15, 17, 18, 20, 23)
"""Tokens of the draft vocabulary where it is a reduced one."""
LENGTH, STEPS = 9, 4


def numbered(name: str, shape: Iterable[int]) -> Tensor:
    """Return the tensor of this name: around 1 for a norm, else with outputs about as large as its inputs."""
    shape = tuple(shape)
    if name == "d2t":
        return torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))
    if name == "t2d":
        return torch.isin(torch.arange(VOCABULARY), torch.tensor(DRAFTED))
    steps = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    waves = (12.9898 * steps * (1 + 0.01 * steps) + crc32(name.encode()) % 1000).sin().float()
    if "norm" in name:
        return 1 + 0.4 * waves
    return waves * (1.0 if len(shape) == 1 or "embed" in name else 1.5 / shape[-1] ** 0.5)


def tokens() -> Tensor:
    """Return a text of LENGTH + STEPS tokens."""
    return torch.tensor([[(7 * i * i + 3 * i + 1) % VOCABULARY for i in range(LENGTH + STEPS)]])


def states(width: int) -> Tensor:
    """Return the target's states at LENGTH positions, [1, LENGTH, width]."""
    return 1.5 * numbered("states", (1, LENGTH, width))
