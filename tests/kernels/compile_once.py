"""Plan calls that differ in what must not cause a recompilation, and print each kernel compiled. Needs no GPU."""

import torch
import triton
from compile_all import B, NoDevice

import draftproof as dp
from draftproof.kernels.call import Call
from draftproof.kernels.compile import compile_step
from draftproof.kernels.launch import plan
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import Workspace

V = 4096


def call(rule: str, K: int, sampling: dp.SamplingParams, V: int = V) -> Call:
    lengths = torch.full((B,), K)
    rows = Parameters.of([sampling] * B, [sampling] * B, seeds=lengths, positions=lengths, lengths=lengths)
    target, draft = torch.empty(B, K + 1, V), torch.empty(B, K, V) if K else None
    return Call(target, torch.zeros(B, K, dtype=torch.long), draft, rows, rule)


def main() -> None:
    triton.runtime.driver.set_active(NoDevice(90))
    triton.knobs.compilation.listener = lambda *, src, **_: print(src.name)
    for K in (1, 4, 7):
        for each in (call("block", K, dp.SamplingParams()), call("coupled", K, dp.SamplingParams())):
            for step in plan(each, Workspace.empty(B, K, V, "cpu"), overlap=True):
                compile_step(step, overlap=False)
    filtered = call("token", 0, dp.SamplingParams(top_k=50)), call("block", 15, dp.SamplingParams(min_p=0.1))
    for each in filtered:
        for step in plan(each, Workspace.empty(B, each.K, V, "cpu"), overlap=True)[:2]:
            compile_step(step, overlap=False)


if __name__ == "__main__":
    main()
