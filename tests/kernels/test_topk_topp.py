"""Test where filters cut: by a short list of logits if possible, else by passes over the row."""

import pytest
import torch

import draftproof as dp
from draftproof.kernels import launch, verify_rows
from draftproof.kernels.device.slice_lists import LINES
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import (
    PART_SUMS,
    PARTS,
    PER_CHUNK,
    PIVOTS,
    ROUNDS,
    ROW_STATS,
    SHORTLIST,
    Workspace,
    chunks,
)

S = dp.SamplingParams
V = 9000


def rows(flat: bool, dtype: torch.dtype) -> torch.Tensor:
    """Make two rows, with a head as a language model's have it unless flat."""
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
    """`deep` rows are queued: that both searches are taken is part of the claim."""
    workspace = settled(rows(flat, dtype).to(device), sampling)
    assert workspace.work[SHORTLIST + 1] == deep


@pytest.mark.parametrize(("kind", "together"), [("flat", 1), ("few values", 1), ("neighbours", 0)])
def test_deep_nuclei_are_cut_by_all_programs_together(kind, together, device):
    """Few logits are left after two rounds, or many that are equal; one program settles any other row."""
    generator = torch.Generator().manual_seed(4)
    logits = {
        "flat": torch.randn(2, 1, V, generator=generator),
        "few values": torch.randint(8, (2, 1, V), generator=generator) * 0.125,
        "neighbours": 1.0 + torch.randint(2, (2, 1, V), generator=generator) * 2.0**-23,
    }[kind]
    logits[:, :, 0] = 3.0
    workspace = settled(logits.to(device), S(temperature=0.8, top_p=0.9))
    assert workspace.work[SHORTLIST + 1] == 2
    left = workspace.part_sums[: 2 * PART_SUMS].view(2, PART_SUMS)[:, ROUNDS * PIVOTS :].view(2, 3, PARTS)
    counts, least, most = left[:, :, : -(-chunks(V) * PER_CHUNK // LINES.value)].unbind(1)
    few = counts.amax(1) <= SHORTLIST / PARTS
    assert (few | (least.amin(1) == most.amax(1))).tolist() == [bool(together)] * 2


def test_stats_of_a_deep_nucleus_do_not_depend_on_the_number_of_programs(monkeypatch, device):
    """A program that takes several parts of a row computes the same for each, to the last bit."""
    logits = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(5)).to(device)
    sampling = S(temperature=0.8, top_p=0.9)
    each_by_itself = settled(logits, sampling)
    monkeypatch.setattr(launch, "MULTIPROCESSORS", 2)
    assert torch.equal(settled(logits, sampling).row_stats, each_by_itself.row_stats)


def settled(logits: torch.Tensor, sampling: dp.SamplingParams) -> Workspace:
    """Return the workspace after a call on some rows, having compared cutoffs and masses with the reference's."""
    device, (B, _, V) = logits.device, logits.shape
    workspace = Workspace.empty(B, 0, V, device)
    numbers = torch.arange(B, device=device)
    parameters = Parameters.of([sampling] * B, [S()] * B, seeds=numbers, positions=numbers, lengths=0 * numbers)
    none = torch.empty(B, 0, dtype=torch.long, device=device)
    verify_rows(logits, none, parameters=parameters, rule="token", workspace=workspace)
    cutoff, base, mass, *_ = workspace.row_stats.view(B, ROW_STATS).unbind(-1)
    dist = dp.warp(logits, [sampling] * B)
    assert torch.equal(cutoff.float(), dist.cutoff[:, 0].float())
    assert torch.allclose(base + mass.log(), dist.lse[:, 0].double(), rtol=0, atol=1e-6)
    return workspace
