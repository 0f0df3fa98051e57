"""Test every kernel against its reference with the same random numbers, over small shapes and all settings."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

import draftproof as dp
from draftproof.core.draw import TRIALS
from kernels.side_by_side import assert_equal, kernel, make, reference

token_rule = import_module("draftproof.rules.token")  # the package also has a function of that name
S = dp.SamplingParams
RULES = ("token", "block", "coupled")
BATCHES = {
    "temperature": [S(temperature=0.7), S(), S(temperature=1.6)],
    "greedy": [S(temperature=0.0)],
    "top_k": [S(temperature=0.8, top_k=20), S(top_k=1), S(top_k=2000)],
    "top_p": [S(temperature=0.7, top_p=0.8), S(top_p=0.1), S(temperature=1.5, top_p=0.97)],
    "min_p": [S(min_p=0.02), S(temperature=0.6, min_p=0.2), S(min_p=1.0)],
    "all at once": [S(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01), S(temperature=0.0), S(top_p=0.9)],
}
SEARCHED = {"top_k", "top_p", "all at once"}  # in the interpreter a search takes a second
# the rules share the search: every rule with every filter is for `make test-all`
PAIRS = [
    pytest.param(rule, name, marks=[pytest.mark.slow] if rule != "token" and name in SEARCHED else [])
    for rule in RULES
    for name in BATCHES
]


@pytest.mark.parametrize(("rule", "name"), PAIRS)
def test_a_batch_gives_the_reference_verdict(rule, name, device):
    drafts = [S()] * len(BATCHES[name]) if rule == "coupled" else None
    K = 1 if name in SEARCHED else 3
    assert_equal(make(BATCHES[name], K=K, device=device, seed=len(name), drafts=drafts), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_the_reference_verdict(rule, dtype, device):
    batch = [S(temperature=0.8), S(temperature=0.9, min_p=0.05)]
    assert_equal(make(batch, drafts=[S()] * 2, device=device, dtype=dtype, V=900, K=2, seed=5), rule)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_target_and_draft_logits_may_be_of_different_types(rule, device):
    given = make([S(temperature=0.8), S(min_p=0.05)], drafts=[S()] * 2, device=device, V=700, K=2, seed=5)
    assert_equal(replace(given, draft=given.draft.to(torch.bfloat16)), rule)


def test_a_search_among_half_precision_ties(device):
    batch = [S(temperature=0.9, top_k=30, top_p=0.9)]
    assert_equal(make(batch, drafts=[S()], device=device, dtype=torch.bfloat16, V=900, K=1, seed=5), "token")


@pytest.mark.parametrize("rule", RULES)
def test_a_chosen_draft_gives_the_reference_verdict(rule, device):
    batch = [S(temperature=0.5), S(temperature=0.0), S(temperature=0.7, min_p=0.1), S(temperature=0.4)]
    assert_equal(make(batch, device=device, spread=4.0, K=2, ragged=False).chosen(), rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_batch_never_reads_the_draft_rows(rule, device):
    given = make([S(temperature=0.0)] * 3, V=300, K=2, device=device, spread=4.0, ragged=False)
    got = kernel(replace(given, draft=torch.full_like(given.draft, torch.nan)), rule)
    assert got.faults.tolist() == [0, 0, 0]
    assert got.tokens.tolist() == reference(given, rule).tokens.tolist()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_draft_may_be_sampled_differently(rule, device):
    drafts = [S(temperature=0.0), S(temperature=1.2, min_p=0.03), S(temperature=0.5)]
    assert_equal(make([S(temperature=0.8)] * 3, drafts=drafts, K=2, V=700, device=device, seed=3), rule)


@pytest.mark.parametrize("V", [3, 128, 512, 513, 4097])
def test_any_vocabulary_size(V, device):
    assert_equal(make([S(temperature=0.9)] * 2, V=V, device=device, K=2), "token")


@pytest.mark.parametrize("K", [0, 1, 9])
@pytest.mark.parametrize("rule", RULES)
def test_any_draft_length(rule, K, device):
    given = make([S(temperature=0.6), S(temperature=1.1)], V=300, K=max(1, K), device=device, spread=4.0)
    if K == 0:
        given = replace(given.chosen(), target=given.target[:, :1], tokens=given.tokens[:, :0].contiguous(),
                        lengths=given.lengths * 0)  # fmt: skip
    assert_equal(given, rule)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ["token", "block"])
def test_near_and_far_drafters(rule, seed, device):
    """Small differences between p and q make trials fail and chances small; large ones make trials succeed at once."""
    given = make([S()] * 8, V=40, K=4, device=device, seed=seed, spread=0.3 + seed)
    assert_equal(given, rule)


@pytest.mark.parametrize(
    "kind",
    [
        "drawn",
        "lse given",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("chosen", "filtered", "smaller vocabulary")),
    ],
)
def test_a_request_that_runs_out_of_trials_gives_the_reference_verdict(kind, device, monkeypatch):
    """A draft that fits well is rejected rarely, and its residual is then too small for the trials: it is summed."""
    B, V, K = 16, 1100, 2
    sampling = S(temperature=0.9, min_p=1e-6) if kind == "filtered" else S(temperature=0.9)
    given = make([sampling] * B, V=V, K=K, device=device, ragged=False, seed=3)
    numbers = torch.Generator().manual_seed(7)
    near = given.target[:, :K].cpu() + 0.01 * torch.randn(B, K, V, generator=numbers)
    impossible = given.target[:, :K].argmin(-1)  # rejected for certain: p of the token is almost 0
    if kind == "chosen":
        # nearly all of p on the draft token: a coin rejects it rarely, so the coin's row is made to
        given = replace(given, draft=None, tokens=impossible)
        target = given.target.clone()
        target[:, :K].scatter_(2, (impossible[..., None] + 1) % V, 40.0)
        given = replace(given, target=target)
    else:
        near.scatter_(2, impossible[..., None].cpu(), near.gather(2, impossible[..., None].cpu()) + 9.0)
        given = replace(given, draft=near.to(device), tokens=impossible)
    if kind == "smaller vocabulary":
        ids = torch.arange(V, device=device).flip(0)
        given = replace(given, draft=given.draft.flip(-1).contiguous(), vocab=dp.DraftVocab.of(ids, V))
    if kind == "lse given":
        dist = dp.warp(given.draft, given.drafts)
        given = replace(given, extra={"draft_lse": dist.lse})
    exhausted = []
    right = token_rule.close
    monkeypatch.setattr(
        token_rule, "close", lambda w, rng, lane=0: exhausted.extend([lane] * len(w)) or right(w, rng, lane)
    )
    assert_equal(given, "token")
    if kind != "chosen":
        assert exhausted.count(TRIALS) > 5
