"""A head's distribution, recomputed from the text alone, is the one that was drawn from, and the bets on it decide.

Audits at α = 1e-6, seeds fixed; "no bias found" requires that a mixture of 0.05 with the head's distribution would have
been found. The controls, a head that declares another distribution and a skipped residual, must be found.
"""

import pytest
import torch

import draftproof as dp
from draftproof.auditor.drafter import HeadReference, as_drafter, resolve_head
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.models.head import file as headfile
from draftproof.models.toy import Toy
from engine.many_texts import unchecked
from engine.test_head_distribution import COLD, REDUCED, RawDistribution
from engine.tiny import PROMPT, V, llama
from engine.tiny_heads import IDS, on_target, trained

PROMPTS = [list(PROMPT), [3, 4, 3, 4, 3], [6], [1, 2] * 9]  # the last is longer than one chunk of the drafter
SAMPLINGS = {
    "plain": SamplingParams(),
    "cut": SamplingParams(temperature=0.7, top_k=4, top_p=0.9),
    "wary": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={2: 1.5, 4: -0.5}),
}


class Recording(HeadDrafter):
    """A drafter that records the distribution of each draft's first token, by the text before it."""

    def __init__(self, head):
        super().__init__(head)
        self.dists = {}

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        for b, context in enumerate(contexts):
            if int(draft.lengths[b]):
                self.dists[tuple(context.tokens)] = draft.q.probs()[b, 0].double()
        return draft


def recomputed(texts: list[Text], sampling: SamplingParams) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the head's distribution at every position of the texts, by the text before it."""
    positions = Positions.of(texts)
    dists = HeadReference(on_target(REDUCED), llama()).dists(positions, sampling).p.double()
    rows = zip(positions.before.tolist(), positions.length.tolist(), strict=True)
    return {tuple(row[:n]): dist for (row, n), dist in zip(rows, dists, strict=True)}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_the_distribution_is_the_one_that_was_drawn_from(sampling):
    drafter = Recording(on_target(REDUCED))
    samples = dp.load(llama(), drafter, num_draft_tokens=3).decode(PROMPTS, sampling, max_tokens=20, seeds=range(4))
    texts = [Text(tuple(prompt), tuple(each.tokens)) for prompt, each in zip(PROMPTS, samples, strict=True)]
    found = recomputed(texts, sampling)
    assert len(drafter.dists) > 20
    for text, q in drafter.dists.items():
        assert torch.allclose(found[text], q, atol=1e-5)
    others = [found[text] for text in list(drafter.dists)[1:]]
    apart = [(a - b).abs().sum() / 2 for a, b in zip(others, drafter.dists.values(), strict=False)]
    assert max(apart) > 0.2, "distributions of different texts must differ, or a wrong position would not show"


def test_it_is_zero_outside_the_heads_vocabulary_and_uniform_where_the_head_has_no_input():
    [dist] = HeadReference(on_target(REDUCED), llama()).probs([5], [0], SamplingParams())
    wanted = torch.zeros(V, dtype=dist.dtype)
    wanted[list(IDS[:REDUCED])] = 1 / REDUCED
    assert torch.allclose(dist, wanted)
    later = HeadReference(on_target(REDUCED), llama()).probs([5, 1], [0, 2], SamplingParams())
    assert not later[:, list(IDS[REDUCED:])].any()


# ------------------------------------------------------------------------------------------------------ whole audits

HOW = {"method": "bets", "alpha": 1e-6, "bias": 0.05, "length": 12, "batch": 250, "max_tokens": 60_000}


def audited(drafter, rule, sampling, known, **how) -> dp.Certificate:
    engine = dp.load(llama(), drafter, rule=rule, num_draft_tokens=3, max_batch=250)
    with unchecked():
        return dp.audit(engine, llama(), PROMPTS[:2], sampling=sampling, drafter=known, **HOW | how)


@pytest.mark.statistical
@pytest.mark.parametrize("sampling", [SamplingParams(), COLD], ids=["plain", "cold"])
def test_an_exact_engine_is_cleared_by_the_bet_on_the_heads_distribution(sampling):
    found = audited(HeadDrafter(on_target(REDUCED)), "block", sampling, on_target(REDUCED))
    assert found.verdict == "no bias found"
    assert found.smallest_bias == found.visible["toward the drafter's distribution"]
    assert found.tested["drafter model"] == "a head of 6 tokens"


@pytest.mark.statistical
def test_an_exact_engine_that_copies_in_some_rows_is_cleared():
    both = Switch(Suffix(), HeadDrafter(on_target(REDUCED)), enough=3)
    assert audited(both, "block", SamplingParams(), on_target(REDUCED), bias=0.1).verdict == "no bias found"


@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_head_that_declares_another_distribution_is_found(rule):
    found = audited(RawDistribution(on_target(REDUCED)), rule, COLD, on_target(REDUCED))
    assert found.verdict == "biased"


@pytest.mark.statistical
def test_a_skipped_residual_is_found_and_named_and_much_sooner_than_without_the_distribution():
    found, blind = (
        audited(HeadDrafter(on_target(REDUCED)), dp.lossy.unadjusted, SamplingParams(), known)
        for known in (on_target(REDUCED), "ngram")
    )
    assert (found.verdict, blind.verdict) == ("biased", "biased")
    assert "both hold likely" in found.found_by
    assert 5 * found.found_at < blind.found_at


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["head", "suffix+head"])
def test_a_head_may_be_given_by_name(name, tmp_path):
    meta = headfile.meta_for(llama(), IDS, target="tiny", training={}, licence="")
    headfile.save(tmp_path, trained(), meta)
    named = resolve_head(f"{name}:{tmp_path}", llama())
    dist, wanted = (
        each.probs(PROMPT, [1, 2], SamplingParams()) for each in (named, HeadReference(on_target(), llama()))
    )
    assert torch.allclose(dist, wanted, atol=1e-2)  # its file is in float16
    assert resolve_head("ngram", llama()) == "ngram"


def test_a_head_needs_a_target_resolve_head():
    for drafter in ("head", on_target()):
        with pytest.raises(ValueError, match="the target is a Toy"):
            resolve_head(drafter, Toy.random(V))


@pytest.mark.parametrize("name", ["auto", "early-exit:1", "my drafter"])
def test_a_name_that_does_not_determine_a_distribution_is_refused(name):
    with pytest.raises(ValueError, match="the name of one that copies"):
        as_drafter(resolve_head(name, llama()))
