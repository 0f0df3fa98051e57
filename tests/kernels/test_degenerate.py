"""Test degenerate distributions: ties, holes, one possible token, nothing left, nothing possible."""

from dataclasses import replace

import pytest
import torch

import draftproof as dp
from kernels.side_by_side import assert_equal, kernel, make

S = dp.SamplingParams
RULES = ("token", "block", "coupled")


@pytest.mark.parametrize("rule", RULES)
def test_all_logits_equal(rule, device):
    given = make([S(), S(min_p=0.3), S(temperature=0.0)], drafts=[S()] * 3, V=600, K=1, device=device)
    flat = replace(given, target=torch.zeros_like(given.target), draft=torch.zeros_like(given.draft))
    assert_equal(flat, rule)


@pytest.mark.parametrize("sampling", [S(top_k=7), S(top_p=0.6), S(top_k=400, top_p=0.7)])
def test_ties_at_the_cutoff_are_kept(sampling, device):
    given = make([sampling], drafts=[S()], V=600, K=1, device=device)
    assert_equal(replace(given, target=given.target.round(), draft=given.draft.round()), "token")


@pytest.mark.parametrize("rule", RULES)
def test_rows_with_minus_infinity(rule, device):
    batch = [S(), S(temperature=0.0), S(min_p=0.1)]
    given = make(batch, drafts=[S()] * 3, V=700, K=1, device=device)
    target = given.target.clone()
    target[..., 100:650] = -torch.inf  # a whole chunk and more
    target[..., 3] = 0.0
    assert_equal(replace(given, target=target), rule)


@pytest.mark.parametrize("rule", RULES)
def test_one_possible_token(rule, device):
    given = make([S(), S(temperature=0.0), S(min_p=0.9)], V=600, K=1, device=device).chosen()
    target = torch.full_like(given.target, -torch.inf)
    target[..., 555] = -3.0
    assert_equal(replace(given, target=target), rule)


@pytest.mark.parametrize("other", [S(temperature=0.0), S()])
def test_a_token_that_ends_in_the_bits_of_the_argmax_is_not_the_argmax(other, device):
    given = make([S(temperature=0.0), other], V=600, K=1, device=device, ragged=False).chosen()
    tokens = given.target[:, :1].argmax(-1)
    assert kernel(replace(given, tokens=tokens), "token").accepted[0] == 1
    tokens[0] += 2**32
    assert kernel(replace(given, tokens=tokens), "token").accepted[0] == 0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafter_equal_to_the_target_keeps_everything(rule, device):
    given = make([S(temperature=0.8)] * 3, V=600, device=device, ragged=False)
    given = replace(given, draft=given.target[:, :-1].clone())
    got = kernel(given, rule)
    assert got.accepted.tolist() == [3, 3, 3]


def test_a_residual_no_trial_finds_is_summed_in_full(device):
    """p and q differ in one token by a thousandth: all trials fail nearly always."""
    given = make([S()] * 4, V=600, K=1, device=device, ragged=False)
    target = torch.zeros_like(given.target)
    draft = target[:, :1].clone()
    draft[..., 10] += 0.5
    tokens = torch.full_like(given.tokens, 10)
    seeds = torch.tensor([s for s in range(4000) if _coin(s) > 0.7][:4], device=device)
    given = replace(given, target=target, draft=draft, tokens=tokens, seeds=seeds, positions=seeds * 0)
    assert kernel(given, "token").accepted.tolist() == [0, 0, 0, 0]
    assert_equal(given, "token")


def _coin(seed: int) -> float:
    return float(dp.Philox(torch.tensor([seed]), torch.tensor([0])).coins(1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_a_distribution_is_a_fault_and_emits_pad(rule, value, device):
    given = make([S(), S(temperature=0.0), S(top_k=4)], V=300, K=1, device=device, ragged=False).chosen()
    target = given.target.clone()
    target[:, 0, 17] = value
    got = kernel(replace(given, target=target), rule)
    assert got.faults.tolist() == [1, 1, 1]
    assert got.tokens[:, 0].tolist() == [dp.PAD] * 3


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_that_are_not_distributions_are_faults_too(rule, device):
    """Nor is a draft token equal to PAD accepted at a row that is not a distribution."""
    given = make([S(temperature=0.0)] * 3, V=300, K=1, device=device, ragged=False).chosen()
    target = given.target.clone()
    target[0, 0, 17], target[1, 0, 17], target[2, 0] = torch.nan, torch.inf, -torch.inf
    got = kernel(replace(given, target=target, tokens=torch.full_like(given.tokens, dp.PAD)), rule)
    assert got.faults.tolist() == [1, 1, 1]
    assert got.accepted.tolist() == [0, 0, 0]
    assert got.tokens[:, 0].tolist() == [dp.PAD] * 3


def test_nothing_allowed_is_a_fault(device):
    given = make([S(), S(temperature=0.0), S(top_p=0.5)], V=300, K=1, device=device).chosen()
    allowed = torch.zeros(given.target.shape, dtype=torch.bool, device=device)
    assert kernel(replace(given, allowed=allowed), "token").faults.tolist() == [1, 1, 1]


def test_an_impossible_draft_is_a_fault(device):
    given = make([S(), S()], V=600, device=device, ragged=False)
    draft = given.draft.clone()
    draft[0].scatter_(-1, given.tokens[0][:, None], -torch.inf)
    outside = given.tokens.clone()
    outside[1, 0] = 600
    got = kernel(replace(given, draft=draft, tokens=outside), "token")
    assert got.faults.tolist() == [2, 4]
