"""TLI drafts carry the draft model's distribution over the shared tokens, after any sequence of rounds."""

from dataclasses import replace

import pytest
import torch

from drafters.test_model import WARPS, go_on
from drafters.toy_rounds import Row, rng_of, row
from drafters.two_vocabularies import SHARES, draft_model, overlap_of, small_models, small_pair
from draftproof.core.distribution import propose
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import Draft
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.reencode import Reencoder
from draftproof.drafters.tli import TLI, SharedTokens
from draftproof.models.hf import HFModel
from draftproof.models.vocabulary_overlap import VocabularyOverlap
from engine.tiny import llama

V = 10


def tli(share: float, **options) -> TLI:
    return TLI(HFModel(small_models(share)[1]), overlap_of(*small_pair(share)), vocab_size=V, **options)


def ragged(samplings=WARPS) -> list[Row]:
    numbers = torch.Generator().manual_seed(0)
    return [row(b, torch.randint(V, (2 + 3 * b,), generator=numbers).tolist(), s) for b, s in enumerate(samplings)]


@torch.no_grad()
def expected(share: float, r: Row, drafted: list[int]) -> torch.Tensor:
    """Compute the distribution by definition: a plain pass over the text in draft tokens, restricted, then warped."""
    overlap, model = overlap_of(*small_pair(share)), small_models(share)[1]
    [context] = Reencoder(overlap)([row(0, r.tokens)], lambda request, length: None)
    ids = [*context.tokens, *(overlap.partner[token] for token in drafted)]
    logits = torch.full((V,), -torch.inf)
    for own, its in overlap.partner.items():
        logits[own] = model(torch.tensor([ids])).logits[0, -1, its]
    history = r.history._replace(output=[*r.history.output, *drafted])
    return warp(logits[None, None], [r.sampling], [history]).probs()[0, 0]


def check_distributions(share: float, rows: list[Row], draft: Draft) -> int:
    checked = 0
    for b, r in enumerate(rows):
        for i in range(int(draft.lengths[b])):
            wanted = expected(share, r, draft.tokens[b, :i].tolist())
            torch.testing.assert_close(draft.q.probs()[b, i], wanted, atol=1e-5, rtol=0)
            checked += 1
    return checked


@pytest.mark.parametrize("share", SHARES)
def test_the_distribution_is_the_restricted_one_after_ragged_rounds_with_rejections(share):
    drafter, rows, numbers = tli(share), ragged(), torch.Generator().manual_seed(1)
    checked = 0
    for i in range(5):
        draft = drafter.propose(rows, [(b + i) % 5 for b in range(len(rows))], rng_of(rows))
        checked += check_distributions(share, rows, draft)
        go_on(rows, draft, numbers)
        if i == 1:  # one leaves, one enters, and the order changes
            rows = [rows[3], row(9, [0, 7, 6, 4, 1] * 3, WARPS[1]), *rows[:3]]
    assert checked > 30


@pytest.mark.parametrize("shared", [False, True])
def test_the_tokens_are_drawn_from_that_distribution_with_the_rng_given(shared):
    rows = ragged()
    rng = rng_of(rows, shared=shared)
    draft = tli(0.7).propose(rows, [4] * len(rows), rng)
    everyone = torch.arange(len(rows))
    for j in range(4):
        assert torch.equal(draft.tokens[:, j], propose(draft.q.at(everyone, torch.full_like(everyone, j)), rng, j))


@pytest.mark.parametrize("branches", [1, 2])
def test_with_the_same_vocabulary_it_drafts_token_for_token_what_a_model_drafter_does(branches):
    tokenizer, _ = small_pair(0.7)
    overlap = overlap_of(tokenizer, tokenizer)
    model = HFModel(draft_model(llama(V), overlap, V))
    one, other = TLI(model, overlap, vocab_size=V, branches=branches), ModelDrafter(model, branches=branches)
    rows, numbers = ragged(), torch.Generator().manual_seed(2)
    for i in range(6):
        k = [(b + i) % 5 for b in range(len(rows))]
        mine, its = one.propose(rows, k, rng_of(rows)), other.propose(rows, k, rng_of(rows))
        assert torch.equal(mine.tokens, its.tokens)
        assert torch.equal(mine.lengths, its.lengths)
        real = torch.arange(its.tokens.shape[1]) < its.lengths[:, None]
        # Up to rounding: a model behind another vocabulary is not packed.
        assert mine.q is None or torch.allclose(mine.q.probs()[real], its.q.probs()[real], atol=1e-6)
        go_on(rows, its, numbers)


def test_tokens_that_are_not_shared_have_probability_0_and_are_never_drawn():
    overlap = overlap_of(*small_pair(0.2))
    outside = [token for token in range(V) if token not in overlap.partner]
    rows = [row(b, [0, b % V]) for b in range(200)]
    draft = tli(0.2).propose(rows, [2] * 200, rng_of(rows))
    assert set(draft.tokens.flatten().tolist()) == set(overlap.partner)
    assert bool((draft.q.probs()[..., outside] == 0).all())


def test_top_k_applies_to_what_remains_after_the_restriction():
    """A filter before it could leave nothing to draw, and would not be the distribution that was drawn from."""
    rows = [row(0, [1, 5, 0], SamplingParams(top_k=2))]
    draft = tli(0.7).propose(rows, [1], rng_of(rows))
    assert int((draft.q.probs()[0, 0] > 0).sum()) == 2


def test_a_row_without_any_mass_left_gets_no_draft():
    share = 0.2
    banned = dict.fromkeys(overlap_of(*small_pair(share)).partner, -torch.inf)
    rows = [row(0, [1, 5, 0], SamplingParams(logit_bias=banned)), row(1, [1, 5, 0])]
    draft = tli(share).propose(rows, [3, 3], rng_of(rows))
    assert draft.lengths.tolist() == [0, 3]


def test_the_draft_ends_where_the_draft_models_positions_end():
    drafter = tli(0.7)
    rows = [row(0, [4] * 62)]
    assert drafter.propose(rows, [6], rng_of(rows)).lengths.tolist() == [2]


def test_an_overlap_that_is_not_one_to_one_is_refused():
    overlap = overlap_of(*small_pair(0.7))
    twice = replace(overlap, partner=overlap.partner | {9: next(iter(overlap.partner.values()))})
    with pytest.raises(ValueError, match="two tokens of the target the same draft token"):
        SharedTokens(HFModel(small_models(0.7)[1]), twice, V)


def test_vocabularies_without_a_common_token_are_refused_with_the_overlap():
    overlap = overlap_of(*small_pair(0.2))
    nothing = VocabularyOverlap(overlap.target, overlap.draft, {})
    with pytest.raises(ValueError, match=r"the draft model has 0.0 % of the target's tokens \(0 of 10\), .*branches=1"):
        TLI(HFModel(small_models(0.2)[1]), nothing, vocab_size=V)
