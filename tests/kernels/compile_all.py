"""Compile the launches of a few calls for one compute capability, and print the kernels' names. Needs no GPU."""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

import draftproof as dp
from draftproof.kernels.call import Call
from draftproof.kernels.compile import compile_step
from draftproof.kernels.launch import plan
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import Workspace

B, K = 2, 4


class NoDevice:
    """A stand-in for the driver that provides as much as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def call(rule: str, dtype: torch.dtype, sampling: dp.SamplingParams, V: int) -> Call:
    """Return a call of B requests with drafts of K tokens."""
    lengths = torch.full((B,), K)
    rows = Parameters.of([sampling] * B, [dp.SamplingParams()] * B, seeds=lengths, positions=lengths, lengths=lengths)
    target, draft = torch.empty(B, K + 1, V, dtype=dtype), torch.empty(B, K, V, dtype=dtype)
    return Call(target, torch.zeros(B, K, dtype=torch.long), draft, rows, rule)


def main(capability: int, V: int) -> None:
    """Compile and print."""
    triton.runtime.driver.set_active(NoDevice(capability))
    seen = set()
    calls = [
        call("token", torch.float32, dp.SamplingParams(), V),
        call("block", torch.float32, dp.SamplingParams(), V),
        call("coupled", torch.bfloat16, dp.SamplingParams(), V),
        call("token", torch.bfloat16, dp.SamplingParams(top_k=50), V),
    ]
    for number, each in enumerate(calls):
        for step in plan(each, Workspace.empty(B, K, V, "cpu"), overlap=capability >= 90):
            if number == 1 and step.kernel.__name__ in seen:
                continue
            compile_step(step, overlap=False)
            seen.add(step.kernel.__name__)
            print(step.kernel.__name__)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
