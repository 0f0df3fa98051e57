"""Compile what lies between and inside the passes of a round for one compute capability; print the kernels' names.

Needs no GPU: the calls are those of a round, and every launch only compiles.
"""

import sys

import torch
import triton
from compile_all import NoDevice
from triton.runtime.jit import JITFunction

from draftproof.core.types import Draft
from draftproof.kernels import Parameters, Rows, layer, round_steps
from draftproof.kernels.draw_rows import Drawn
from draftproof.kernels.round_table import LINES

B, K = 2, 4


def compile_only() -> None:
    """Make every launch compile its kernel, print its name, and launch nothing."""
    run = JITFunction.run

    def compiled(kernel, *args, grid, warmup, **options):
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        print(kernel.__name__)
        return made

    JITFunction.run = compiled


def between_passes() -> None:
    table, ready = torch.zeros((LINES, 8), dtype=torch.long)[:, :B], torch.zeros(B, dtype=torch.bool)
    places, lengths = torch.zeros((3, B), dtype=torch.long), torch.zeros(B, dtype=torch.long)
    round_steps.lay_out(places, K + 1, scratch=4096, last_position=2**31 - 1)
    round_steps.begin_draft(table, K, vocab_size=49152, behind_text=1)
    round_steps.begin_draft(table, K, vocab_size=49152, behind_text=2, ready=ready)
    drawn = Drawn(lengths, *torch.zeros(B, 7, dtype=torch.float64).unbind(-1)[:3])
    round_steps.describe_draws(drawn, None, None)
    round_steps.describe_draws(drawn, ready, lengths)
    draft = Draft(torch.zeros((B, K), dtype=torch.long), lengths)
    round_steps.begin_scoring(table, draft, 49152, Parameters.empty(B, "cpu"))
    verdict = Rows(torch.zeros((B, K + 1), dtype=torch.long), lengths, lengths.int())
    for reads in ("later", "at once", "when it drafts"):
        round_steps.conclude(table, verdict, lengths, reads)


def inside_layers(dtype: torch.dtype) -> None:
    x, weight = torch.empty(5, 64, dtype=dtype), torch.empty(64, dtype=dtype)
    for plus_one, round_first in ((False, True), (False, False), (True, False)):
        layer.rms_norm(x, weight, 1e-6, plus_one=plus_one, round_first=round_first)
        layer.sum_and_norm(x, x, weight, 1e-6, plus_one=plus_one, round_first=round_first, factor=0.22)
        layer.norm_and_sum(x, x, weight, 1e-6, plus_one=plus_one, round_first=round_first)
    part = torch.empty(5, 200, dtype=dtype)[:, 8:72]
    layer.rms_norm(part, weight, 1e-6, out=part)
    for tanh in (False, True):
        layer.gate(x, tanh=tanh)
    layer.rotate(torch.empty(2, 4, 5, 16, dtype=dtype), torch.zeros((2, 5), dtype=torch.long), torch.empty(8))
    qkv, angles, pool = (torch.empty(shape, dtype=dtype) for shape in ((5, 128), (5, 16), (64, 2, 16)))
    slots = torch.zeros(5, dtype=torch.long)
    for norms in (None, (weight[:16], weight[:16])):
        layer.rotate_and_write(qkv, angles, angles, pool, pool, slots, heads=4, norms=norms, plus_one=norms is not None)


def main(capability: int) -> None:
    triton.runtime.driver.set_active(NoDevice(capability))
    compile_only()
    between_passes()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inside_layers(dtype)


if __name__ == "__main__":
    main(int(sys.argv[1]))
