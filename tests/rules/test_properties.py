"""Properties that hold for all distributions, drafts and random numbers; hypothesis searches for counterexamples."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from draftproof.core.distribution import Distribution, overlap, residual, total_variation
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.tree import real
from draftproof.core.types import PAD, Draft
from draftproof.rules import RULES

QUICK = settings(max_examples=150, deadline=None)
weights = st.floats(0, 1, width=32).map(lambda x: 0.0 if x < 0.2 else x)


@st.composite
def rows(draw, shape):
    """Make rows of weights with zeros, ties and one-hots."""
    w = torch.from_numpy(draw(arrays("float32", shape, elements=weights)))
    return torch.where(w.sum(-1, keepdim=True) > 0, w, torch.eye(shape[-1])[0]) + 0.0


def normal(w):
    return w / w.sum(-1, keepdim=True)


@st.composite
def rounds(draw):
    """Make p, a draft with drawn and chosen tokens of ragged lengths, and random numbers."""
    B, K, V = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 6))
    p, q = normal(draw(rows((B, K + 1, V)))), normal(draw(rows((B, max(K, 1), V))))[:, :K]
    seeds = torch.tensor(draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=B, max_size=B)))
    rng = Philox(seeds, torch.tensor(draw(st.lists(st.integers(0, 10_000), min_size=B, max_size=B))))
    lengths = torch.tensor(draw(st.lists(st.integers(0, K), min_size=B, max_size=B)))
    dist = Distribution.of(q)
    tokens = [dist.at(torch.arange(B), torch.full((B,), j)).draw(rng, j=j) for j in range(K)]
    drawn = torch.from_numpy(draw(arrays("bool", (B, K))))
    tokens = torch.stack(tokens, 1) if K else torch.zeros((B, 0), dtype=torch.long)
    return Distribution.of(p), Draft(tokens, lengths, dist, drawn), rng


@QUICK
@given(rounds(), st.sampled_from(sorted(RULES)))
def test_a_verdict_is_a_kept_prefix_one_possible_token_and_padding(case, rule):
    p, draft, rng = case
    verdict = RULES[rule](p, draft, rng)
    K = draft.tokens.shape[1]
    assert verdict.exact
    assert (verdict.accepted >= 0).all()
    assert (verdict.accepted <= draft.lengths).all()
    place = torch.arange(K + 1)
    kept, last = place < verdict.accepted[:, None], place == verdict.accepted[:, None]
    assert torch.equal(verdict.tokens[:, :K][kept[:, :K]], draft.tokens[kept[:, :K]])
    assert (verdict.tokens[~kept & ~last] == PAD).all()
    emitted = p.log_prob(verdict.tokens)[kept | last]
    assert (emitted > -torch.inf).all()  # no impossible token is emitted, not even by rounding


@QUICK
@given(rounds(), st.sampled_from(sorted(RULES)))
def test_a_row_does_not_depend_on_its_neighbours(case, rule):
    from worlds import take_distribution, take_draft

    p, draft, rng = case
    together = RULES[rule](p, draft, rng)
    for b in range(len(draft.tokens)):
        row = torch.tensor([b])
        alone = RULES[rule](take_distribution(p, row), take_draft(draft, row), rng.take(row))
        assert torch.equal(alone.tokens[0], together.tokens[b])


@QUICK
@given(rounds())
def test_a_tree_that_is_a_chain_is_verified_as_a_block(case):
    p, draft, rng = case
    one, other = RULES["block"](p, draft, rng), RULES["tree"](p, draft, rng)
    assert torch.equal(one.accepted, other.accepted)


@QUICK
@given(rounds())
def test_a_draft_from_the_target_itself_is_always_kept(case):
    p, draft, rng = case
    K, B = draft.tokens.shape[1], len(draft.tokens)
    dist = Distribution(p.logits[:, :K], p.scale[:, :K], p.cutoff[:, :K], p.lse[:, :K], p.point[:, :K])
    tokens = [p.at(torch.arange(B), torch.full((B,), j)).draw(rng, j=j) for j in range(K)]
    own = Draft(torch.stack(tokens, 1) if K else draft.tokens, draft.lengths, dist)
    for rule in ("token", "block", "tree"):
        assert torch.equal(RULES[rule](p, own, rng).accepted, draft.lengths)


@QUICK
@given(st.integers(1, 9).flatmap(lambda V: st.tuples(rows((2, V)), rows((2, V)))))
def test_the_residual_is_a_distribution_on_what_is_missing(pair):
    p, q = map(normal, pair)
    r = residual(p, q)
    assert not r.isnan().any()
    torch.testing.assert_close(r.sum(-1), torch.ones(2))
    tv = total_variation(p, q)
    torch.testing.assert_close(tv, 1 - overlap(p, q), atol=1e-5, rtol=0)
    torch.testing.assert_close(p.minimum(q) + tv[:, None] * r, p, atol=1e-5, rtol=0)


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.3, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0, 0.5),
)


@QUICK
@given(arrays("float32", (2, 2, 9), elements=st.integers(-6, 6).map(lambda n: n / 2)), samplings)
def test_a_warped_row_is_a_distribution_that_keeps_the_likeliest_and_all_its_equals(logits, sampling):
    x = torch.from_numpy(logits)
    p = warp(x, [sampling] * 2).probs()
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 2))
    assert (p.gather(-1, x.argmax(-1, keepdim=True)) > 0).all()
    if sampling.temperature > 0:
        smallest = x.masked_fill(p == 0, torch.inf).amin(-1, keepdim=True)
        assert torch.equal(p > 0, x >= smallest)


@QUICK
@given(rounds())
def test_coins_of_zero_never_keep_a_token_that_the_target_cannot_emit(case):
    class Zero(Philox):
        def coins(self, K):
            return torch.zeros(len(self.seeds), K, dtype=torch.float64)

    p, draft, rng = case
    for rule in ("token", "block", "tree"):
        verdict = RULES[rule](p, draft, Zero(rng.seeds, rng.starts))
        K = draft.tokens.shape[1]
        kept = torch.arange(K) < verdict.accepted[:, None]
        log_p = Distribution(p.logits[:, :K], p.scale[:, :K], p.cutoff[:, :K], p.lse[:, :K], p.point[:, :K]).log_prob(
            draft.tokens
        )
        assert (log_p[kept & real(draft)] > -torch.inf).all()
