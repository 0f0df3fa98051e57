"""Whole audits of toy decoders: each verdict, by each method, and the certificate it gives."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

import draftproof as dp
from auditor.toy_decoder import Speaker, pair
from draftproof.auditor import betting
from draftproof.auditor.api import audit
from draftproof.auditor.interface import Decoded, Decoder
from draftproof.auditor.page import page
from draftproof.auditor.reference import ReferenceModel
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round
from draftproof.models.toy import Toy
from engine.tiny import llama

TARGET, DRAFT = pair(24, noise=2.0)
SMALL, SMALL_DRAFT = pair(4)
PROMPTS = [[3, 1], [7, 2, 7]]
HOW = {"sampling": SamplingParams(), "drafter": DRAFT, "bias": 0.1, "length": 16, "batch": 100}


def test_an_exact_decoder_comes_off_clean_and_says_what_would_have_been_seen():
    found = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW)
    assert (found.verdict, found.exit_code) == ("no bias found", 0)
    assert found.smallest_bias is not None
    assert found.smallest_bias <= 0.1
    assert found.tokens < 200_000  # it stops when the answer is clear
    assert found.coverage.source == "trace"
    assert found.coverage.rejected >= 132  # log(1e-6) / log(0.9)
    assert found.log_evidence < found.threshold
    assert "exact" not in str(found)


def test_a_skipped_residual_is_found_and_named():
    found = audit(Speaker(TARGET, DRAFT, keep_residual=False), TARGET, PROMPTS, **HOW)
    assert (found.verdict, found.exit_code) == ("biased", 1)
    assert found.found_by is not None
    assert "both hold likely" in found.found_by or "the drafter's" in found.found_by
    assert found.found_at is not None
    assert found.found_at < 3_000
    assert found.found_by in str(found)


def test_a_mixture_as_large_as_asked_for_is_found_in_the_tokens_that_clear_an_exact_decoder():
    clean = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW)
    found = audit(Speaker(TARGET, DRAFT, mixed=0.1), TARGET, PROMPTS, **HOW, max_tokens=clean.tokens)
    assert found.verdict == "biased"


def test_without_a_trace_coverage_is_replayed_and_without_a_drafter_it_is_unknown():
    untraced = Speaker(TARGET, DRAFT, traced=False)
    replayed = audit(untraced, TARGET, PROMPTS, **HOW)
    assert replayed.verdict == "no bias found"
    assert replayed.coverage.source == "replay"
    traced = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW, max_tokens=replayed.tokens)
    per_token = [c.coverage.rejected / c.tokens for c in (traced, replayed)]
    assert abs(per_token[0] - per_token[1]) < 0.25 * per_token[1]  # replayed drafts have one token, traced ones three
    unknown = audit(untraced, TARGET, PROMPTS, **{**HOW, "drafter": None}, max_tokens=4_000)
    assert (unknown.verdict, unknown.exit_code) == ("not enough evidence", 3)
    assert "unknown" in unknown.reason


def test_too_few_rejections_are_not_enough_evidence_and_it_says_how_many_more_tokens_are():
    found = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **{**HOW, "bias": 0.001}, max_tokens=2_000)
    assert found.verdict == "not enough evidence"
    assert "rejections" in found.reason
    assert found.more_tokens is not None
    assert found.more_tokens > 10_000


def test_no_decoder_is_cleared_whose_drafter_is_unknown():
    """The rounds are reported, but without a distribution to bet on drafts kept too often would go unnoticed."""
    found = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **{**HOW, "drafter": None}, max_tokens=4_000)
    assert found.verdict == "not enough evidence"
    assert "the drafter is unknown" in found.reason


def test_no_decoder_is_cleared_while_the_evidence_is_high(monkeypatch):
    clean = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW)
    monkeypatch.setattr(betting, "SUSPENSE", clean.log_evidence - 1e-6)  # as if that were high
    found = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW, max_tokens=clean.tokens)
    assert (found.verdict, found.tokens) == ("not enough evidence", clean.tokens)
    assert "too high for" in found.reason


def test_a_decoder_that_drafts_nothing_is_never_clean():
    found = audit(Speaker(TARGET, DRAFT, K=0), TARGET, PROMPTS, **HOW, max_tokens=30_000)
    assert found.verdict == "not enough evidence"
    assert found.coverage.drafted == 0
    assert "nothing was drafted in 30,400 rounds" in found.reason


class Fixed:
    """A decoder that always emits the same tokens."""

    def __init__(self, tokens, rounds=None):
        self.sample = Decoded(tuple(tokens), rounds)

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        return [self.sample] * len(prompts)


def test_an_impossible_token_fails_at_once_and_names_the_parameter():
    table = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(5, 1)
    rounds = (Round(3, 3), Round(3, 0))
    found = audit(
        Fixed([0, 1, 0, 4, 0], rounds), Toy(table), [[0]], sampling=SamplingParams(top_k=3), batch=1, method="bets"
    )
    assert found.verdict == "biased"
    assert found.impossible is not None
    assert (found.impossible.position, found.impossible.token, found.impossible.parameter) == (3, 4, "top_k")
    assert found.found_at == 4
    assert "impossible token 4" in found.reason


FOREIGN = {
    "bets": (Toy(torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(5, 1)), SamplingParams()),
    "joint": (SMALL, SamplingParams()),
    "greedy": (Toy(torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(5, 1)), SamplingParams(temperature=0)),
}


@pytest.mark.parametrize("token", [99, -1, 2**70])
@pytest.mark.parametrize("method", FOREIGN)
def test_a_token_outside_the_vocabulary_is_a_bias_and_the_certificate_says_which_and_where(method, token):
    """A token of probability 0: no decoder with the target's distribution emits it."""
    target, sampling = FOREIGN[method]
    how = {"sampling": sampling, "batch": 2, "max_tokens": 8, "method": method}
    found = audit(Fixed([0, 0, 0, token, 0], (Round(3, 2), Round(2, 1))), target, [[0], [1]], **how)
    assert (found.verdict, found.exit_code) == ("biased", 1)
    assert found.impossible is not None
    assert (found.impossible.text, found.impossible.position, found.impossible.token) == (0, 3, token)
    last = target.vocab_size - 1
    assert found.reason.endswith(
        f"token {token} at position 3 of text 0: the vocabulary (ids 0 to {last}) rules it out"
    )
    assert found.found_at == (None if method == "greedy" else 4)
    assert found.tokens == 4
    assert dp.Certificate.from_dict(found.as_dict()) == found
    assert "<!doctype html>" in page(found)
    first = audit(Fixed([token]), target, [[0], [1]], **how)  # nothing comes before it that could be bet on
    assert (first.verdict, first.tokens, first.impossible.position) == ("biased", 1, 0)
    assert "<!doctype html>" in page(first)


class Changing(Speaker):
    """An exact decoder whose text number 120 ends with a token outside the vocabulary."""

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        samples = super().decode(prompts, sampling, max_tokens=max_tokens, seeds=seeds)
        return [replace(s, tokens=(*s.tokens[:-1], 24)) if n == 120 else s for n, s in zip(seeds, samples, strict=True)]


def test_the_text_of_a_token_outside_the_vocabulary_is_counted_over_all_batches_and_resuming_changes_nothing():
    found = audit(Changing(TARGET, DRAFT), TARGET, PROMPTS, **{**HOW, "bias": 0.01})
    assert found.impossible is not None
    assert (found.impossible.text, found.impossible.position, found.texts) == (120, 15, 121)
    assert found.found_at == found.tokens == 121 * 16
    again = audit(Changing(TARGET, DRAFT), TARGET, PROMPTS, **{**HOW, "bias": 0.01}, resume=found)
    assert again == found


def test_what_happens_first_decides_if_a_bet_wins_before_an_impossible_token_of_the_same_chunk():
    table = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]]).repeat(5, 1)
    how = {"sampling": SamplingParams(top_k=3), "batch": 1, "method": "bets"}
    found = audit(Fixed([2] * 60 + [4]), Toy(table), [[0]], **how)
    assert found.found_by is not None
    assert found.impossible is None
    assert found.found_at == found.tokens < 60
    assert f"won after {found.tokens} tokens" in found.reason
    other = audit(Fixed([2, 4] + [2] * 60), Toy(table), [[0]], **how)
    assert other.impossible is not None
    assert (other.found_by, other.found_at) == (None, 2)
    assert other.found_at <= other.tokens
    blurred = torch.tensor([[3.0, 2.0, 1.0, 1.0 - 1e-6, -1.0]]).repeat(5, 1)
    unclear = audit(Fixed([2] * 60), Toy(blurred), [[0]], **how, max_tokens=60)
    assert unclear.unbet <= unclear.tokens


def test_a_token_after_the_end_of_its_text_fails_at_once():
    """Under either method; the end-of-text token itself may be emitted, and may occur in the prompt."""
    for sampling, method in ((SamplingParams(), "bets"), (SamplingParams(temperature=0), "greedy")):
        how = {"sampling": sampling, "batch": 1, "max_tokens": 4, "method": method}
        toy = Toy(torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1))
        found = audit(Fixed([0, 0, 0]), toy, [[0]], **how, ends=(0,))
        assert (found.verdict, found.exit_code) == ("biased", 1)
        assert found.impossible is not None
        assert (found.impossible.position, found.impossible.parameter) == (1, "the end of the text")
        assert "the end of the text rules it out" in found.reason
        assert audit(Fixed([0]), toy, [[0]], **how, ends=(0,)).verdict == "not enough evidence"
        assert audit(Fixed([0, 0, 0]), toy, [[0]], **how, ends=()).verdict == "not enough evidence"


def test_the_ends_are_the_targets_own_unless_given():
    model = llama(24)
    assert ReferenceModel(model).ends == ()
    ending = deepcopy(model)
    for eos, ends in ((7, (7,)), ([7, 9], (7, 9))):
        ending.generation_config.eos_token_id = eos
        assert ReferenceModel(ending).ends == ends
    overrunning = Fixed([3, 9, 3])
    found = audit(overrunning, ending, [[1]], sampling=SamplingParams(), batch=1, max_tokens=3)
    assert found.verdict == "biased"
    assert found.tested["ends"] == "7, 9"
    ignored = audit(overrunning, ending, [[1]], sampling=SamplingParams(), batch=1, max_tokens=3, ends=())
    assert ignored.verdict == "not enough evidence"
    assert any("no token ends them" in line for line in ignored.untested)


def test_a_token_within_rounding_of_a_cutoff_is_neither_bet_on_nor_impossible():
    table = torch.tensor([[3.0, 2.0, 1.0, 1.0 - 1e-6, -1.0]]).repeat(5, 1)
    found = audit(
        Fixed([0, 3, 2]), Toy(table), [[0]], sampling=SamplingParams(top_k=3), batch=1, method="bets", max_tokens=3
    )
    assert found.verdict == "not enough evidence"
    assert found.unbet == 3
    assert set(found.bets.values()) == {0.0}


def test_a_dtype_too_coarse_for_its_cutoffs_is_named_as_the_reason():
    coarse = Toy(TARGET.table.bfloat16())
    how = {**HOW, "sampling": SamplingParams(top_k=12), "method": "bets"}
    engine = dp.load(Toy(coarse.table.float()), "prompt-lookup", num_draft_tokens=3, max_batch=100)
    found = audit(engine, coarse, PROMPTS, **how, max_tokens=6_000)
    assert found.verdict == "not enough evidence"
    assert "audit in float32" in found.reason


def test_the_joint_distribution_of_a_small_vocabulary_is_counted_out():
    how = {"sampling": SamplingParams(), "drafter": SMALL_DRAFT, "bias": 0.05, "batch": 2_000}
    clean = audit(Speaker(SMALL, SMALL_DRAFT), SMALL, [[0, 1]], **how)
    assert clean.verdict == "no bias found"
    assert clean.smallest_bias == pytest.approx(0.05, rel=0.05)
    assert set(clean.p_values) == {"joint distribution of three tokens, prompt 0", "third token, prompt 0"}
    assert min(clean.p_values.values()) > 1e-6
    wrong = audit(Speaker(SMALL, SMALL_DRAFT, keep_residual=False), SMALL, [[0, 1]], **how)
    assert wrong.verdict == "biased"
    assert wrong.tokens < clean.tokens  # the bets see it long before the counts are complete


class Swapping(Speaker):
    """A decoder that in one of six texts emits 3 for 2, and 2 for 3, as the third token."""

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        samples = super().decode(prompts, sampling, max_tokens=max_tokens, seeds=seeds)
        return [self._swapped(s) if i % 6 == 0 else s for i, s in enumerate(samples)]

    def _swapped(self, sample):
        other = {2: 3, 3: 2}.get(sample.tokens[2], sample.tokens[2])
        return Decoded((*sample.tokens[:2], other, *sample.tokens[3:]), sample.rounds)


def test_counts_see_what_no_bet_points_to():
    """Two tokens are exchanged at one position of a few texts, which no drafter or temperature would do."""
    how = {"sampling": SamplingParams(), "drafter": SMALL_DRAFT, "bias": 0.03, "batch": 2_000, "length": 3}
    found = audit(Swapping(SMALL, SMALL_DRAFT), SMALL, [[0, 1]], **how)
    assert found.verdict == "biased"
    assert found.found_by == "joint distribution of three tokens, prompt 0"
    assert found.log_evidence < found.threshold


def test_greedy_decoding_is_compared_token_by_token():
    engine = dp.load(TARGET, "prompt-lookup", num_draft_tokens=3, max_batch=100)
    how = {"sampling": SamplingParams(temperature=0), "bias": 0.1, "batch": 100, "length": 16}
    prompts = [[a, b, a] for a in range(24) for b in range(24)]
    clean = audit(engine, TARGET, prompts, **how)
    assert clean.verdict == "no bias found"
    assert clean.coverage.rejected > 100
    other = audit(engine, DRAFT, prompts, **how)
    assert other.verdict == "biased"
    assert other.impossible is not None
    assert other.impossible.position == 0


def test_a_near_tie_is_counted_and_not_held_against_it():
    table = torch.tensor([[3.0, 3.0 - 1e-6, 1.0]]).repeat(3, 1)
    found = audit(Fixed([1, 0, 1]), Toy(table), [[0]], sampling=SamplingParams(temperature=0), batch=1, max_tokens=3)
    assert found.near_ties == 2
    assert found.verdict == "not enough evidence"


def test_resuming_is_the_same_as_never_having_stopped():
    decoder = Speaker(TARGET, DRAFT)
    how = {**HOW, "bias": 0.001}
    whole = audit(decoder, TARGET, PROMPTS, **how, max_tokens=8_000)
    half = audit(decoder, TARGET, PROMPTS, **how, max_tokens=3_000)
    assert half.tokens < whole.tokens
    again = audit(decoder, TARGET, PROMPTS, **how, max_tokens=8_000, resume=dp.Certificate.from_dict(half.as_dict()))
    assert again.tokens == whole.tokens
    assert again.bets == pytest.approx(whole.bets, abs=1e-9)
    assert again.curve == whole.curve
    assert again.coverage == whole.coverage


@pytest.mark.parametrize(("name", "value"), [("seed", 5), ("alpha", 1e-3), ("sampling", SamplingParams(top_k=3))])
def test_another_audit_is_not_resumed(name, value):
    half = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW, max_tokens=1_000)
    with pytest.raises(ValueError, match=f"another audit: {name}"):
        audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **{**HOW, name: value}, resume=half)


def test_another_target_is_not_resumed():
    half = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **HOW, max_tokens=1_000)
    with pytest.raises(ValueError, match="another audit: target weights"):
        audit(Speaker(TARGET, DRAFT), DRAFT, PROMPTS, **HOW, resume=half)


def test_a_certificate_is_shown_after_every_batch():
    seen = []
    last = audit(Speaker(TARGET, DRAFT), TARGET, PROMPTS, **{**HOW, "bias": 0.001}, max_tokens=6_000, watch=seen.append)
    assert [c.tokens for c in seen] == [1_600, 3_200, 4_800, 6_400]
    assert seen[-1] is last
    drafted = [c.coverage.drafted for c in seen]
    assert drafted == sorted(set(drafted))  # a certificate does not change after it was passed to `watch`


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_the_engine_is_a_decoder_and_comes_off_clean(rule):
    engine = dp.load(TARGET, DRAFT, rule=rule, num_draft_tokens=3, max_batch=200)
    assert isinstance(engine, Decoder)
    found = dp.audit(engine, TARGET, PROMPTS, **{**HOW, "batch": 200, "bias": 0.2})
    assert found.verdict == "no bias found"
    assert found.tested["rule"] == rule


def test_a_silent_decoder_a_short_trace_and_an_object_that_is_no_model_are_refused():
    with pytest.raises(ValueError, match="emitted no token"):
        audit(Fixed([]), TARGET, PROMPTS, **HOW)
    with pytest.raises(ValueError, match="rounds for 1 tokens, and 3 were emitted"):
        audit(Fixed([1, 2, 3], (Round(2, 0),)), TARGET, PROMPTS, **HOW)
    with pytest.raises(ValueError, match="target must be a transformers model or a Model"):
        audit(Fixed([1]), object(), PROMPTS, **HOW)
