"""Compile the loss kernel for one compute capability and print its name. Needs no GPU."""

import sys

import torch
import triton
from compile_all import NoDevice

from draftproof.train.loss import MAX_KERNEL_WIDTH
from draftproof.train.loss_kernel import compare, launch_options


def main(capability: int) -> None:
    triton.runtime.driver.set_active(NoDevice(capability))
    for R in (8192, 12288, MAX_KERNEL_WIDTH, 1000):
        rows, numbers = torch.empty(2, R, dtype=torch.bfloat16), torch.empty(2)
        compiled = compare.warmup(rows, rows, numbers, numbers, numbers, R, 0.4, grid=(2,), **launch_options(R))
        print(compiled.name)


if __name__ == "__main__":
    main(int(sys.argv[1]))
