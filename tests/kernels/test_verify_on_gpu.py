"""Test that `verify` uses the kernels where they run: the same verdicts, and the same error messages."""

import math
from dataclasses import replace

import pytest
import torch

import draftproof as dp
from budget import budgeted
from draftproof import kernels
from draftproof.core import device as core_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.types import Draft, History
from draftproof.rules import RULES, api
from draftproof.rules.checks import MIXED_DRAFT
from kernels.side_by_side import Input, make, reference

S = dp.SamplingParams
CHAINS = ("token", "block", "coupled")


@pytest.fixture
def calls(monkeypatch, device):
    """Make kernels run wherever the tests do; list the rules they were called with."""
    seen = []
    launched = kernels.verify_rows
    monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(kernels, "verify_rows", lambda *a, **k: seen.append(k["rule"]) or launched(*a, **k))
    return seen


def by_name(given: Input, rule: str) -> dp.Verdict:
    return dp.verify(
        given.target, given.tokens, given.draft, draft_lengths=given.lengths, sampling=given.samplings,
        draft_sampling=None if given.draft is None else given.drafts, history=given.history, allowed=given.allowed,
        rule=rule, seeds=given.seeds, positions=given.positions,
        draft_ids=None if given.vocab is None else given.vocab.ids,
    )  # fmt: skip


def assert_same(got: dp.Verdict, want: dp.Verdict) -> None:
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.accepted.tolist() == want.accepted.tolist()


@pytest.mark.parametrize("rule", budgeted(CHAINS, ["block"]))
def test_verify_uses_the_kernels_and_gives_the_same_verdict(rule, calls, device):
    batch = [S(temperature=0.7), S(temperature=0.0), S(temperature=0.9, repetition_penalty=1.3)]
    given = replace(make(batch, V=300, K=2, device=device), history=[History([1, 2], [3])] * 3)
    assert_same(by_name(given, rule), reference(given, rule))
    assert calls == [rule]


def test_a_grammar_and_a_smaller_vocabulary_too(calls, device):
    given = make([S(temperature=0.8)] * 2, V=200, K=2, device=device, entries=150)
    allowed = torch.rand(given.target.shape, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    given = replace(given, allowed=allowed)
    assert_same(by_name(given, "token"), reference(given, "token"))
    assert calls == ["token"]


@pytest.mark.parametrize("rule", ["tree", RULES["token"]])
def test_what_kernels_do_not_know_goes_to_the_reference(rule, calls, device):
    given = make([S()], V=40, K=2, device=device, ragged=False)
    dp.verify(given.target, given.tokens, given.draft, rule=rule)
    assert dp.verify(given.target.double(), given.tokens).tokens.shape == (1, 3)
    assert not calls


def nothing(t):
    return torch.zeros(t.shape, dtype=torch.bool, device=t.device)


WRONG = {
    "token ids": (lambda t, x, q: dp.verify(t, x + 25), r"draft_tokens\[\d, \d\] is \d+; the vocabulary is \[0, 30\)"),
    "NaN": (lambda t, x, q: dp.verify(t + torch.tensor(math.nan), x), r"target_logits\[0, 0\] has NaN"),
    "+inf": (lambda t, x, q: dp.verify(t + torch.tensor(math.inf), x), r"target_logits\[0, 0\] has \+inf"),
    "allowed": (lambda t, x, q: dp.verify(t, x, allowed=nothing(t)), r"target_logits\[0, 0\] has no allowed token"),
    "lengths": (lambda t, x, q: dp.verify(t, x, draft_lengths=x[:, 0] * 0 + 5), r"must lie in \[0, 2\]; got \[5, 5\]"),
    "impossible": (lambda t, x, q: dp.verify(t, q.argmin(-1), q, sampling=S(min_p=0.9), draft_sampling=S(min_p=0.9)),
                   r"draft_tokens\[0, 0\] = \d+ has probability 0 under draft_logits"),
    "ids twice": (lambda t, x, q: dp.verify(t, x * 0, q[..., :2], draft_ids=x[0] * 0), "names a token twice"),
    "ids outside": (lambda t, x, q: dp.verify(t, x * 0, q[..., :2], draft_ids=x[0] * 0 + 31), r"must lie in \[0, 30\)"),
    "history": (lambda t, x, q: dp.verify(t, x, sampling=S(presence_penalty=1.0), history=[([1], [40])] * 2),
                r"name tokens from \d+ to 40; the vocabulary is \[0, 30\)"),
    "no history": (lambda t, x, q: dp.verify(t, x, sampling=S(presence_penalty=1.0)), "pass history"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_fault_is_named_by_the_reference(case, calls, device):
    call, words = WRONG[case]
    given = make([S(), S()], V=30, K=2, device=device, ragged=False)
    with pytest.raises(ValueError, match=words):
        call(given.target, given.tokens, given.draft)


def settled(given: Input, drawn: torch.Tensor | None = None) -> Draft:
    dist = dp.warp(given.draft, given.drafts, vocab=given.vocab)
    return Draft(given.tokens, given.lengths, dist, drawn)


def both_verdicts(given: Input, draft: Draft, rule: str) -> tuple[api.Decision, dp.Verdict]:
    """Decide a draft whose q is given by the kernels and by the reference."""
    rng = dp.Philox(given.seeds, given.positions)
    scored = api.Scored(given.target, given.samplings, draft, allowed=given.allowed)
    decision = api.decide(scored, lambda: rng, rule, lambda decision: decision)
    assert decision.by_kernels
    p = dp.warp(given.target, given.samplings, None, draft, given.allowed)
    return decision, RULES[rule](p, draft, rng)


@pytest.mark.parametrize("rule", CHAINS)
def test_a_draft_is_verified_against_the_distributions_it_was_drawn_from(rule, calls, device):
    """Every row is drawn differently: warm, filtered, greedy."""
    drafts = [S(temperature=0.7), S(temperature=1.2, top_k=9), S(temperature=0.0)]
    given = make([S(temperature=0.8)] * 3, drafts=drafts, V=300, K=2, device=device, seed=4, ragged=False)
    decision, want = both_verdicts(given, settled(given), rule)
    assert decision.faults.tolist() == [0, 0, 0]
    assert_same(decision.verdict, want)


def test_a_draft_over_a_smaller_vocabulary_is_verified_by_its_own_entries(calls, device):
    given = make([S(temperature=0.8), S()], V=200, K=2, device=device, entries=120, seed=2)
    decision, want = both_verdicts(given, settled(given), "block")
    assert decision.faults.tolist() == [0, 0]
    assert_same(decision.verdict, want)


def test_chosen_rows_and_drawn_rows_share_a_batch(calls, device):
    given = make([S(temperature=0.8)] * 3, V=100, K=2, device=device, ragged=False)
    drawn = torch.tensor([[True, True], [False, False], [True, False]], device=device)
    decision, want = both_verdicts(given, settled(given, drawn), "token")
    assert decision.faults.tolist() == [0, 0, MIXED_DRAFT]  # a mixture inside a row is for the reference
    assert decision.verdict.tokens[:2].tolist() == want.tokens[:2].tolist()


def test_distributions_that_differ_inside_a_row_are_for_the_reference(calls, device):
    given = make([S()] * 3, V=100, K=2, device=device, ragged=False)
    dist = settled(given).q
    scale = dist.scale.clone()
    scale[1, 1] = 2.0
    point = dist.point.clone()
    point[2] = (given.tokens[2] + 1) % 100
    draft = Draft(given.tokens, given.lengths, replace(dist, scale=scale, point=point, plain=False))
    assert both_verdicts(given, draft, "token")[0].faults.tolist()[1:] == [MIXED_DRAFT] * 2


def test_a_draft_of_shared_random_numbers_is_refused(calls, device):
    given = make([S()], V=40, K=1, device=device)
    with pytest.raises(dp.InexactError, match="drawn with the target's own random numbers"):
        both_verdicts(given, replace(settled(given), shared_rng=True), "block")


def test_the_map_of_a_vocabulary_is_the_checked_one(device):
    from draftproof.rules.api import _unchecked_vocab

    ids = torch.tensor([4, 0, 7], device=device)
    assert _unchecked_vocab(ids, 9).entry.tolist() == DraftVocab.of(ids, 9).entry.tolist()
