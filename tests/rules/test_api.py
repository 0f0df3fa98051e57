"""`dp.verify`, the entry point for other engines: correct results, and clear errors before anything is drawn."""

import math
from pathlib import Path

import pytest
import torch

import draftproof as dp

B, K, V = 3, 4, 30
WARM = dp.SamplingParams(temperature=0.7, top_k=9)


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    draft_logits = torch.randn((B, K, V), generator=g) * 2
    target = torch.cat([draft_logits, draft_logits[:, :1]], 1) + 0.5 * torch.randn((B, K + 1, V), generator=g)
    probs = dp.warp(draft_logits, [WARM] * B).probs().flatten(0, 1)
    return target, probs.multinomial(1, generator=g).view(B, K), draft_logits


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "tree"])
def test_torch_manual_seed_reproduces(rule):
    target, tokens, draft = inputs()

    def once():
        torch.manual_seed(5)
        return dp.verify(target, tokens, draft, sampling=WARM, draft_sampling=WARM, rule=rule).tokens

    assert torch.equal(once(), once())


def test_seeds_make_a_row_independent_of_its_batch():
    target, tokens, draft = inputs()
    seeds, positions = torch.tensor([11, 12, 13]), torch.tensor([5, 8, 2])
    kwargs = {"sampling": WARM, "draft_sampling": WARM}
    together = dp.verify(target, tokens, draft, seeds=seeds, positions=positions, **kwargs)
    alone = dp.verify(target[1:2], tokens[1:2], draft[1:2], seeds=12, positions=8, **kwargs)
    assert torch.equal(together.tokens[1], alone.tokens[0])


def test_greedy_keeps_the_argmax_and_ends_with_it():
    target, _, _ = inputs()
    best = target.argmax(-1)
    tokens = best[:, :K].clone()
    tokens[1, 2] = (tokens[1, 2] + 1) % V
    for rule in ("token", "block", "coupled", "tree"):
        verdict = dp.verify(target, tokens, sampling=dp.SamplingParams(temperature=0), rule=rule)
        assert verdict.accepted.tolist() == [K, 2, K]
        assert verdict.tokens[1].tolist() == [*best[1, :3].tolist(), -1, -1]
        assert verdict.tokens[0].tolist() == best[0].tolist()


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_point_masses_are_drawn_without_weights_and_give_the_same_tokens(rule, monkeypatch):
    """Greedy rows skip the pass over the vocabulary; the general way must decide the same, for drawn drafts too."""
    generator = torch.Generator().manual_seed(5)
    target, draft = (torch.randn((6, n, 11), generator=generator) for n in (4, 3))
    tokens = torch.where(torch.rand((6, 3), generator=generator) < 0.6, target[:, :3].argmax(-1), 4)

    def verdict():
        options = {"sampling": dp.SamplingParams(temperature=0), "draft_sampling": dp.SamplingParams(), "rule": rule}
        return dp.verify(target, tokens, draft, seeds=torch.arange(6), positions=3, **options).tokens

    short = verdict()
    monkeypatch.setattr(dp.Distribution, "points_at", lambda *_: None)
    assert torch.equal(short, verdict())


def test_rows_may_have_their_own_sampling_and_length():
    target, tokens, draft = inputs()
    samplings = [dp.SamplingParams(temperature=0), WARM, dp.SamplingParams(top_p=0.5, presence_penalty=1.0)]
    verdict = dp.verify(
        target, tokens, draft, draft_lengths=torch.tensor([0, 4, 2]), sampling=samplings, draft_sampling=WARM,
        history=[([1, 2], [])] * B,
    )  # fmt: skip
    assert verdict.tokens[0, 0] == target[0, 0].argmax()
    assert verdict.accepted[2] <= 2


def test_a_shorter_draft_vocabulary_is_padded_when_asked_for():
    target, _, draft = inputs()
    small = draft[..., :20]
    tokens = small.argmax(-1)
    with pytest.raises(ValueError, match=r"draft_logits are over 20 tokens, target_logits over 30.*draft_ids"):
        dp.verify(target, tokens, small)
    verdict = dp.verify(target, tokens, small, draft_ids=torch.arange(20))
    full = torch.cat([small, torch.full((B, K, 10), -math.inf)], -1)
    torch.manual_seed(0)
    one = dp.verify(target, tokens, small, draft_ids=torch.arange(20))
    torch.manual_seed(0)
    other = dp.verify(target, tokens, full)
    assert torch.equal(one.tokens, other.tokens)
    assert verdict.exact


def test_half_precision_logits_are_taken():
    target, tokens, draft = inputs()
    for dtype in (torch.bfloat16, torch.float16):
        verdict = dp.verify(target.to(dtype), tokens, draft.to(dtype))
        assert verdict.tokens.shape == (B, K + 1)


def test_an_empty_draft_is_plain_sampling():
    target, tokens, draft = inputs()
    for sampling in (WARM, dp.SamplingParams(), dp.SamplingParams(top_p=0.5), dp.SamplingParams(temperature=0)):
        for logits in (draft[:, :0], None):
            verdict = dp.verify(target[:, :1], tokens[:, :0], logits, sampling=sampling, draft_sampling=sampling)
            assert verdict.tokens.shape == (B, 1)
            assert verdict.accepted.tolist() == [0] * B


def test_an_allowed_mask_holds_at_every_position():
    target, tokens, draft = inputs()
    allowed = torch.zeros(B, K + 1, V, dtype=torch.bool)
    allowed[..., 7] = True
    verdict = dp.verify(target, tokens, draft, allowed=allowed)
    assert set(verdict.tokens.flatten().tolist()) <= {7, -1}


def nan_at(target):
    bad = target.clone()
    bad[2, 3, 4] = math.nan
    return bad


WRONG = {
    "draft_tokens shape": (lambda t, x, q: dp.verify(t, x[:, :2], q), r"score 5 positions.*\[3, 2\] need 3"),
    "draft_tokens rank": (lambda t, x, q: dp.verify(t, x[0], q), r"draft_tokens \[B, K\]"),
    "draft_logits shape": (lambda t, x, q: dp.verify(t, x, q[:, :3]), r"draft_logits must be \[3, 4, 30\]"),
    "token ids": (lambda t, x, q: dp.verify(t, x + 25), r"draft_tokens\[\d, \d\] is \d+; the vocabulary is \[0, 30\)"),
    "NaN": (lambda t, x, q: dp.verify(nan_at(t), x, q), r"target_logits\[2, 3\] has NaN"),
    "+inf": (lambda t, x, q: dp.verify(t + torch.tensor(math.inf), x, q), r"target_logits\[0, 0\] has \+inf"),
    "nothing allowed": (
        lambda t, x, q: dp.verify(t, x, q, allowed=torch.zeros(B, K + 1, V, dtype=torch.bool)),
        "no allowed token",
    ),
    "allowed shape": (
        lambda t, x, q: dp.verify(t, x, q, allowed=torch.ones(B, K, V, dtype=torch.bool)),
        r"allowed must be \[3, 5, 30\]; got \[3, 4, 30\]",
    ),
    "lengths range": (
        lambda t, x, q: dp.verify(t, x, q, draft_lengths=torch.tensor([0, 5, 1])),
        r"draft_lengths must lie in \[0, 4\]; got \[0, 5, 1\]",
    ),
    "lengths shape": (lambda t, x, q: dp.verify(t, x, q, draft_lengths=torch.tensor([0])), "draft_lengths must be"),
    "seeds shape": (
        lambda t, x, q: dp.verify(t, x, q, seeds=torch.tensor([1, 2]), positions=0),
        r"seeds must be \[3\]; got \[2\]",
    ),
    "one seed for many rows": (lambda t, x, q: dp.verify(t, x, q, seeds=4, positions=0), "share their random numbers"),
    "positions missing": (
        lambda t, x, q: dp.verify(t, x, q, seeds=torch.arange(3)),
        "positions must be given with seeds",
    ),
    "seed in sampling, positions missing": (
        lambda t, x, q: dp.verify(t, x, sampling=dp.SamplingParams(seed=3)),
        "positions must be given with seeds",
    ),
    "draft_sampling missing": (
        lambda t, x, q: dp.verify(t, x, q, sampling=WARM),
        "draft_sampling must say how the draft's tokens were drawn",
    ),
    "not drawn from q": (
        lambda t, x, q: dp.verify(t, q.argmin(-1), q, sampling=WARM, draft_sampling=WARM),
        r"has probability 0 under draft_logits with draft_sampling: it was not drawn from that distribution",
    ),
    "penalty without history": (
        lambda t, x, q: dp.verify(t, x, sampling=dp.SamplingParams(frequency_penalty=0.5)),
        "asks for a penalty.*history",
    ),
    "samplings count": (lambda t, x, q: dp.verify(t, x, sampling=[WARM]), "one for each of 3 rows; got 1"),
    "rule": (lambda t, x, q: dp.verify(t, x, q, rule="blok"), "rule must be one of 'token', 'block'.*got 'blok'"),
    "draft_ids twice": (
        lambda t, x, q: dp.verify(t, x * 0, q[..., :2], draft_ids=torch.tensor([0, 0])),
        "draft_ids names a token twice",
    ),
    "parents order": (
        lambda t, x, q: dp.verify(t, x, q, parents=torch.full((B, K), 3), rule="tree"),
        "a slot's parent must be -1 .the root. or an earlier slot",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_a_clear_error_before_anything_is_drawn(case):
    call, words = WRONG[case]
    target, tokens, draft = inputs()
    before = torch.get_rng_state()
    with pytest.raises((ValueError, TypeError), match=words if "shape" not in case and "rank" not in case else None):
        call(target, tokens, draft)
    assert torch.equal(before, torch.get_rng_state())


def test_shape_errors_are_clear_where_no_annotation_is_executed():
    """Run in a process without the tests' shape checker, as a user does."""
    import subprocess
    import sys

    for case in (
        "draft_tokens shape",
        "draft_tokens rank",
        "draft_logits shape",
        "allowed shape",
        "lengths shape",
        "seeds shape",
    ):
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); sys.path.insert(0, sys.argv[2])\n"
            "import re, test_api as t\n"
            f"call, words = t.WRONG[{case!r}]\n"
            "try: call(*t.inputs())\n"
            "except ValueError as e: assert re.search(words, str(e)), e\n"
            "else: raise AssertionError('no error')\n"
        )
        here = Path(__file__).parent
        subprocess.run([sys.executable, "-c", code, str(here), str(here.parent)], check=True)


def test_what_would_be_inexact_is_refused():
    target, tokens, draft = inputs()
    with pytest.raises(dp.InexactError, match="this draft is a tree"):
        dp.verify(target, tokens, draft, parents=torch.full((B, K), -1), rule="block")
    p = dp.warp(target, [dp.SamplingParams()] * B)
    shared = dp.Draft(tokens, torch.full((B,), K), dp.warp(draft, [dp.SamplingParams()] * B), shared_rng=True)
    rng = dp.Philox(torch.arange(B), torch.arange(B))
    for rule in ("token", "block", "tree"):
        with pytest.raises(dp.InexactError, match="own random numbers"):
            dp.RULES[rule](p, shared, rng)
    assert dp.RULES["coupled"](p, shared, rng).exact


def test_the_example_in_the_docstring_runs():
    import doctest

    lines = "\n".join(e.source for e in doctest.DocTestParser().get_examples(dp.verify.__doc__))
    scope: dict = {}
    exec(lines, scope)
    assert scope["verdict"].tokens.shape == (2, 5)


def test_int32_tokens_and_logits_that_require_grad_are_taken():
    target, tokens, draft = inputs()
    seeds, positions = torch.arange(len(tokens)), torch.arange(len(tokens))
    want = dp.verify(target, tokens, draft, seeds=seeds, positions=positions)
    got = dp.verify(
        target.clone().requires_grad_(), tokens.int(), draft.clone().requires_grad_(), seeds=seeds, positions=positions
    )
    assert torch.equal(got.tokens, want.tokens)
    assert not got.tokens.requires_grad
