"""Which attention kernels a training uses."""

from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel


def steady_attention() -> AbstractContextManager[None]:
    """All but cuDNN's, which compiles anew for every length: texts that grow would wait for it at every token."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
