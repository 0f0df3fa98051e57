"""Check that a call inside torch.compile, with fullgraph=True, gives the same as outside."""

import torch

import draftproof as dp
from draftproof.kernels import verify_rows
from draftproof.kernels.workspace import Workspace
from kernels.side_by_side import make, parameters

given = make([dp.SamplingParams(temperature=0.8)] * 2, V=600, ragged=False)
rows, workspace = parameters(given), Workspace.empty(2, 3, 600, "cpu", filtered=False)


def step(target: torch.Tensor, tokens: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    got = verify_rows(target * 1.0, tokens, draft, parameters=rows, rule="token", workspace=workspace)
    return got.tokens + 0


want = step(given.target, given.tokens, given.draft)
workspace.tokens.zero_()
compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(given.target, given.tokens, given.draft), want)
