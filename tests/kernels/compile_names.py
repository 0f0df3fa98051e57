"""Print the kernels that have no name yet when the launches have been imported. No GPU."""

from draftproof.kernels.launch import KERNELS

print(*(kernel.__name__ for kernel in KERNELS if kernel.hash is None))
