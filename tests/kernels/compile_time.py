"""Measure how long first requests wait for their kernels: seconds to compile for sm_90, V = 128256. Needs no GPU.

TRITON_CACHE_DIR=$(mktemp -d) python tests/kernels/compile_time.py
"""

import time

import triton
from compile_all import B, NoDevice
from compile_once import call

import draftproof as dp
from draftproof.kernels.compile import compile_step
from draftproof.kernels.launch import plan
from draftproof.kernels.workspace import Workspace

V = 128256
SETTINGS = {
    "top-k and top-p": dp.SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "top-p alone": dp.SamplingParams(temperature=0.8, top_p=0.9),
}


def main() -> None:
    triton.runtime.driver.set_active(NoDevice(90))
    both, alone = SETTINGS
    for rule, K, name in (("token", 4, both), ("token", 6, both), ("block", 4, both), ("token", 4, alone)):
        start = time.perf_counter()
        for step in plan(call(rule, K, SETTINGS[name], V), Workspace.empty(B, K, V, "cpu"), overlap=True):
            compile_step(step, overlap=False)
        print(f"{rule}, drafts of {K}, {name}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
