"""Where filters cut: by a short list of logits where it can be short, by passes over the row where it cannot."""

import pytest
import torch

import draftproof as dp
from draftproof.kernels import verify_rows
from draftproof.kernels.device.cutoff import LINES
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.torch_op import launch_op
from draftproof.kernels.workspace import FEW, MEASURED, NUMBERS, PARTS, PER_CHUNK, PIVOTS, ROUNDS, Workspace, chunks

S = dp.SamplingParams
V = 9000


def rows(flat: bool, dtype: torch.dtype) -> torch.Tensor:
    """Two rows; with a head, as a language model's have it, unless they are to be flat."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 1, V, generator=generator)
    if not flat:
        where = torch.rand(2, 1, V, generator=generator).topk(200).indices
        logits.scatter_(2, where, 15.0 - 1.3 * torch.arange(1.0, 201.0).log().expand(2, 1, -1))
    return logits.to(dtype)


@pytest.mark.parametrize(
    ("sampling", "flat", "deep"),
    [
        (S(temperature=0.8, top_k=20, top_p=0.9), False, 0),
        (S(temperature=0.8, top_k=20, top_p=0.9, min_p=0.2), True, 0),
        (S(temperature=0.8, top_p=0.9), False, 0),
        (S(min_p=0.05), False, 0),
        (S(temperature=0.8, top_p=0.9), True, 2),
        (S(temperature=0.8, top_k=400, top_p=0.9), True, 2),
        (S(temperature=0.8, top_k=400), False, 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_cutoff_and_mass_are_the_references(sampling, flat, deep, dtype, device):
    """`deep` rows are left in the queue: that both ways are gone is part of the claim."""
    workspace = settled(rows(flat, dtype).to(device), sampling)
    assert workspace.work[FEW + 1] == deep


@pytest.mark.parametrize(("kind", "together"), [("flat", 1), ("few values", 1), ("neighbours", 0)])
def test_deep_nuclei_are_cut_by_all_programs_together(kind, together, device):
    """Few logits are left after two rounds, or many that are equal; of any others one program takes care."""
    generator = torch.Generator().manual_seed(4)
    logits = {
        "flat": torch.randn(2, 1, V, generator=generator),
        "few values": torch.randint(8, (2, 1, V), generator=generator) * 0.125,
        "neighbours": 1.0 + torch.randint(2, (2, 1, V), generator=generator) * 2.0**-23,
    }[kind]
    logits[:, :, 0] = 3.0
    workspace = settled(logits.to(device), S(temperature=0.8, top_p=0.9))
    assert workspace.work[FEW + 1] == 2
    left = workspace.parts[: 2 * MEASURED].view(2, MEASURED)[:, ROUNDS * PIVOTS :].view(2, 3, PARTS)
    counts, least, most = left[:, :, : -(-chunks(V) * PER_CHUNK // LINES.value)].unbind(1)
    few = counts.amax(1) <= FEW / PARTS
    assert (few | (least.amin(1) == most.amax(1))).tolist() == [bool(together)] * 2


def test_numbers_of_a_deep_nucleus_do_not_depend_on_how_many_programs_there_are(monkeypatch, device):
    """One that takes several parts of a row says the same of each, to the last bit."""
    logits = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(5)).to(device)
    sampling = S(temperature=0.8, top_p=0.9)
    each_by_itself = settled(logits, sampling)
    monkeypatch.setattr(launch_op, "PROCESSORS", 2)
    assert torch.equal(settled(logits, sampling).numbers, each_by_itself.numbers)


def settled(logits: torch.Tensor, sampling: dp.SamplingParams) -> Workspace:
    """Memory after a call on some rows, whose cutoffs and masses are found to be the reference's."""
    device, (B, _, V) = logits.device, logits.shape
    workspace = Workspace.empty(B, 0, V, device)
    numbers = torch.arange(B, device=device)
    parameters = Parameters.of([sampling] * B, [S()] * B, seeds=numbers, positions=numbers, lengths=0 * numbers)
    none = torch.empty(B, 0, dtype=torch.long, device=device)
    verify_rows(logits, none, parameters=parameters, rule="token", workspace=workspace)
    cutoff, base, mass, *_ = workspace.numbers.view(B, NUMBERS).unbind(-1)
    dist = dp.warp(logits, [sampling] * B)
    assert torch.equal(cutoff.float(), dist.cutoff[:, 0].float())
    assert torch.allclose(base + mass.log(), dist.lse[:, 0].double(), rtol=0, atol=1e-6)
    return workspace
