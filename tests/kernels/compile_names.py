"""Print the kernels that have no cache key yet when `launch` has been imported. Needs no GPU."""

from draftproof.kernels.launch import KERNELS

print(*(kernel.__name__ for kernel in KERNELS if kernel.hash is None))
