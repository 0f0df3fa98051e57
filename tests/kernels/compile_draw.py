"""Compile the launches of a draw for one compute capability, and print the kernels' names. Needs no GPU."""

import sys

import torch
import triton
from compile_all import B, NoDevice

import draftproof as dp
from draftproof.kernels.call import Call
from draftproof.kernels.compile import compile_step
from draftproof.kernels.draw_rows import plan_draw
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import Workspace


def main(capability: int, V: int) -> None:
    triton.runtime.driver.set_active(NoDevice(capability))
    none = torch.zeros(B, dtype=torch.long)
    for sampling in (dp.SamplingParams(), dp.SamplingParams(top_k=50)):
        rows = Parameters.of([sampling] * B, [sampling] * B, seeds=none, positions=none, lengths=none)
        for rule in ("token", "coupled"):
            logits, tokens = torch.empty(B, 1, V, dtype=torch.bfloat16), torch.zeros((B, 0), dtype=torch.long)
            workspace = Workspace.empty(B, 0, V, "cpu", filtered=rows.filtered)
            call = Call(logits, tokens, None, rows, rule)
            for step in plan_draw(call, workspace, 1, overlap=capability >= 90):
                compile_step(step, overlap=False)
                print(step.kernel.__name__)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
