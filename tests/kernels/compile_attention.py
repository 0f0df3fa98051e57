"""Compile decode attention for one compute capability, and print each kernel and its shared memory. Needs no GPU."""

import sys

import torch
import triton
from compile_all import NoDevice

from draftproof.kernels.attention import AttentionCall, plan_attention
from draftproof.kernels.compile import compile_step

SHAPES = [(1, 128, torch.bfloat16), (5, 128, torch.float32), (16, 256, torch.float16)]


def main(capability: int) -> None:
    """Compile three shapes: a plain one, and two with all variants."""
    triton.runtime.driver.set_active(NoDevice(capability))
    for T, size, dtype in SHAPES:
        query, pool = torch.empty(1, T, 32, size, dtype=dtype), torch.empty(8192, 8, size, dtype=dtype)
        numbers, of_tokens, of_heads = torch.zeros(1, dtype=torch.long), torch.zeros(1, T).long(), torch.zeros(32)
        plain = (None,) * 7
        variants = plain if T == 1 else (4096, 4096, 50.0, of_heads, of_heads, of_tokens, of_tokens)
        call = AttentionCall(query, pool, pool, numbers, numbers, None, 1.0, None, *variants)
        call.check()
        for step in plan_attention(call, torch.empty_like(query), overlap=capability >= 90):
            print(step.kernel.__name__, compile_step(step, overlap=False).metadata.shared)


if __name__ == "__main__":
    main(int(sys.argv[1]))
