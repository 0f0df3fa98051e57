"""A head's distribution, found again from the text alone: it is the one that was drawn from, and the bets on it decide.

Audits at α = 1e-6, seeds fixed; a clean one must have been able to see a mixture of 0.05 with the head's distribution. The
controls, a head that lies about its distribution and a residual that is skipped, must be found.
"""

import pytest
import torch

import draftproof as dp
from draftproof.auditor.drafter import HeadTeacher, as_drafter, with_states
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

PROMPTS = [list(PROMPT), [3, 4, 3, 4, 3], [6], [1, 2] * 9]  # the last is more than the drafter reads at a time
SAMPLINGS = {
    "plain": SamplingParams(),
    "cut": SamplingParams(temperature=0.7, top_k=4, top_p=0.9),
    "wary": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={2: 1.5, 4: -0.5}),
}


class Watched(HeadDrafter):
    """Notes what the first token of each draft was drawn from, by the text before it."""

    def __init__(self, head):
        super().__init__(head)
        self.dists = {}

    def propose(self, contexts, k, rng):
        draft = super().propose(contexts, k, rng)
        for b, context in enumerate(contexts):
            if int(draft.lengths[b]):
                self.dists[tuple(context.tokens)] = draft.q.probs()[b, 0].double()
        return draft


def found_again(texts: list[Text], sampling: SamplingParams) -> dict[tuple[int, ...], torch.Tensor]:
    """The head's distribution at every position of the texts, by the text before it."""
    positions = Positions.of(texts)
    dists = HeadTeacher(on_target(REDUCED), llama()).dists(positions, sampling).p.double()
    rows = zip(positions.before.tolist(), positions.length.tolist(), strict=True)
    return {tuple(row[:n]): dist for (row, n), dist in zip(rows, dists, strict=True)}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_the_distribution_is_the_one_that_was_drawn_from(sampling):
    drafter = Watched(on_target(REDUCED))
    said = dp.load(llama(), drafter, num_draft_tokens=3).decode(PROMPTS, sampling, max_tokens=20, seeds=range(4))
    texts = [Text(tuple(prompt), tuple(each.tokens)) for prompt, each in zip(PROMPTS, said, strict=True)]
    found = found_again(texts, sampling)
    assert len(drafter.dists) > 20
    for text, q in drafter.dists.items():
        assert torch.allclose(found[text], q, atol=1e-5)
    others = [found[text] for text in list(drafter.dists)[1:]]
    apart = [(a - b).abs().sum() / 2 for a, b in zip(others, drafter.dists.values(), strict=False)]
    assert max(apart) > 0.2, (
        "distributions of different texts are far apart, so a distribution of the wrong position would show"
    )


def test_it_is_zero_where_the_head_says_nothing_and_even_where_it_has_read_nothing():
    [dist] = HeadTeacher(on_target(REDUCED), llama()).probs([5], [0], SamplingParams())
    wanted = torch.zeros(V, dtype=dist.dtype)
    wanted[list(IDS[:REDUCED])] = 1 / REDUCED
    assert torch.allclose(dist, wanted)
    later = HeadTeacher(on_target(REDUCED), llama()).probs([5, 1], [0, 2], SamplingParams())
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
def test_so_is_one_that_copies_in_some_rows():
    both = Switch(Suffix(), HeadDrafter(on_target(REDUCED)), enough=3)
    assert audited(both, "block", SamplingParams(), on_target(REDUCED), bias=0.1).verdict == "no bias found"


@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_head_that_lies_about_its_distribution_is_found(rule):
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
def test_a_head_may_be_named(name, tmp_path):
    meta = headfile.meta_for(llama(), IDS, target="tiny", training={}, licence="")
    headfile.save(tmp_path, trained(), meta)
    named = with_states(f"{name}:{tmp_path}", llama())
    dist, wanted = (each.probs(PROMPT, [1, 2], SamplingParams()) for each in (named, HeadTeacher(on_target(), llama())))
    assert torch.allclose(dist, wanted, atol=1e-2)  # its file is in float16
    assert with_states("ngram", llama()) == "ngram"


def test_a_head_needs_a_target_with_states():
    for drafter in ("head", on_target()):
        with pytest.raises(ValueError, match="the target is a Toy"):
            with_states(drafter, Toy.random(V))


@pytest.mark.parametrize("name", ["auto", "early-exit:1", "my drafter"])
def test_a_name_that_does_not_tell_the_distribution_is_refused(name):
    with pytest.raises(ValueError, match="the name of one that copies"):
        as_drafter(with_states(name, llama()))
