"""Which of torch's attention kernels a pass uses."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def steady_attention(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU all but cuDNN's, which compiles anew for every shape: a text that grows would wait for it again and
    again. torch prefers it on the newest devices."""
    return nullcontext() if device.type == "cpu" else sdpa_kernel(KERNELS)
