"""Test edits of logits (bias, penalties, mask, a smaller draft vocabulary), and the memory layouts they may have."""

from dataclasses import replace

import pytest
import torch

import draftproof as dp
from draftproof.core.types import History
from draftproof.kernels import verify_rows
from draftproof.kernels.call import pack
from draftproof.kernels.workspace import Workspace
from kernels.side_by_side import assert_equal, kernel, make, parameters, reference

S = dp.SamplingParams
RULES = ("token", "block", "coupled")


@pytest.mark.parametrize("rule", RULES)
def test_bias_and_penalties(rule, device):
    batch = [
        S(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        S(logit_bias={3: 4.0, 600: -2.0, 899: 3.0}),
        S(temperature=0.0, repetition_penalty=0.7, logit_bias={5: 1.0}),
        S(temperature=0.7, min_p=0.02, presence_penalty=2.0),
    ]
    given = make(batch, drafts=[S()] * 4, V=900, K=2, device=device, ragged=False)
    tokens = given.tokens.clone()
    tokens[:, 1] = tokens[:, 0]  # repeated right after itself
    history = [History([1, 2, 3, int(t[0])], [2, 2, 700]) for t in tokens]
    assert_equal(replace(given, tokens=tokens, history=history).chosen(), rule)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_penalties_on_both_sides(rule, device):
    batch = [S(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3)] * 3
    given = make(batch, V=900, K=2, device=device)
    history = [History([4, 5], [700, 700])] * 3
    assert_equal(replace(given, history=history), rule)


@pytest.mark.parametrize("rule", RULES)
def test_allowed_tokens(rule, device):
    batch = [S(), S(temperature=0.0), S(min_p=0.05)]
    given = make(batch, drafts=[S()] * 3, V=1000, K=1, device=device, ragged=False)
    generator = torch.Generator().manual_seed(1)
    allowed = (torch.rand(given.target.shape, generator=generator) < 0.3).to(device)
    allowed[:, :, 600:] = False
    allowed[:, :, 42] = True
    assert_equal(replace(given, allowed=allowed), rule)


def test_a_search_among_allowed_and_edited_tokens(device):
    given = make([S(top_k=9, top_p=0.9, logit_bias={5: 3.0, 40: 9.0})], drafts=[S()], V=1000, K=1, device=device)
    allowed = torch.zeros(given.target.shape, dtype=torch.bool, device=device)
    allowed[:, :, ::3] = True
    assert_equal(replace(given, allowed=allowed), "token")


def test_packed_bits_are_those_of_the_grammar_libraries():
    allowed = torch.zeros(1, 70, dtype=torch.bool)
    allowed[0, [0, 31, 33, 69]] = True
    assert pack(allowed).tolist() == [[1 - 2**31, 2, 32]]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_smaller_draft_vocabulary(rule, device):
    batch = [S(temperature=0.8), S(temperature=0.9, min_p=0.02)]
    assert_equal(make(batch, V=1100, K=2, device=device, entries=700), rule)


def test_a_smaller_draft_vocabulary_with_penalties(device):
    batch = [S(temperature=0.8, repetition_penalty=1.2), S(logit_bias={7: 3.0})]
    given = make(batch, V=900, device=device, entries=600)
    assert_equal(replace(given, history=[History([1, 2], [3, 850])] * 2), "token")


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_drafter_may_pass_its_log_sum_exp(rule, device):
    given = make([S(temperature=0.8), S()], drafts=[S(temperature=0.7)] * 2, device=device)
    lse = (given.draft.double() / 0.7).logsumexp(-1)
    assert_equal(replace(given, extra={"draft_lse": lse}), rule)


def test_a_drafter_with_filters_passes_its_cutoff_too(device):
    given = make([S(temperature=0.8)] * 2, drafts=[S(temperature=0.7, top_k=9)] * 2, K=1, V=600, device=device)
    dist = dp.warp(given.draft, given.drafts)
    assert_equal(replace(given, extra={"draft_lse": dist.lse, "draft_cutoff": dist.cutoff.double()}), "token")


def test_any_strides_and_ragged_rows_give_the_same(device):
    given = make([S(temperature=0.8), S(temperature=0.9)], V=600, device=device, ragged=False)
    want = kernel(given, "block").tokens.tolist()
    wide = torch.full((3, 4, 640), 9.0, device=device)
    wide[:2, :, :600] = given.target
    turned = given.draft.transpose(0, 1).contiguous().transpose(0, 1)
    assert kernel(replace(given, target=wide[:2, :, :600], draft=turned), "block").tokens.tolist() == want
    flat = torch.cat([given.target[1], given.target[0]])
    rows = parameters(given)
    rows["target_rows"].copy_(torch.tensor([4, 0]))
    rows["draft_rows"].copy_(torch.tensor([0, 3]))
    got = verify_rows(flat, given.tokens, given.draft.flatten(0, 1), parameters=rows, rule="block")
    assert got.tokens.tolist() == want


@pytest.mark.parametrize("K", [0, 2])
def test_rows_in_another_order_are_found(K, device):
    """In a small batch the scan loads first rows before it knows their order."""
    given = make([S(temperature=0.8), S(temperature=0.0), S(min_p=0.1)], K=K, V=600, device=device)
    want = reference(given, "token").tokens.tolist()
    order = torch.tensor([2, 0, 1])
    rows = parameters(given)
    rows["target_rows"].copy_(order)
    rows["draft_rows"].copy_(order)
    target, draft = torch.empty_like(given.target), torch.empty_like(given.draft)
    target[order], draft[order] = given.target, given.draft
    assert verify_rows(target, given.tokens, draft, parameters=rows, rule="token").tokens.tolist() == want


def test_a_row_does_not_depend_on_its_neighbours(device):
    batch = [S(temperature=0.8), S(temperature=0.5), S(min_p=0.1)]
    given = make(batch * 3, drafts=[S()] * 9, V=600, K=1, device=device)
    together = kernel(given, "block").tokens
    for b in (0, 4, 8):
        names = ("target", "draft", "tokens", "lengths", "seeds", "positions")
        alone = replace(given, **{n: getattr(given, n)[b : b + 1] for n in names}, samplings=[given.samplings[b]],
                        drafts=[given.drafts[b]])  # fmt: skip
        assert kernel(alone, "block").tokens[0].tolist() == together[b].tolist()


def test_a_workspace_is_used_again_and_by_smaller_batches(device):
    workspace = Workspace.empty(4, 3, 1100, device)
    for size in (4, 2, 3):
        given = make([S(temperature=0.8)] * size, device=device, seed=size)
        got = kernel(given, "token", workspace=workspace)
        assert got.tokens.data_ptr() == workspace.tokens.data_ptr()
        assert got.tokens.tolist() == reference(given, "token").tokens.tolist()
