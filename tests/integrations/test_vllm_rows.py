"""Verification on vLLM's ragged rows gives `dp.verify`'s verdicts: by the rules, by the kernels, in greedy batches."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import draftproof as dp
from draftproof.integrations.vllm import runner_v1
from draftproof.integrations.vllm.rows import Layout, cut_by_min_p, processed
from integrations.vllm_batches import SAMPLINGS, Batch, V, batch, kernels_on_cpu, sampling_metadata

LENGTHS = [3, 0, 2, 3, 1]
WARM = [s for s in SAMPLINGS if s.temperature > 0]
SEEDS = range(8)


@pytest.fixture(autouse=True)
def fixed_seeds(monkeypatch):
    """Number the requests' seeds, so that a reference can use the same ones."""
    monkeypatch.setattr(runner_v1, "fresh_seeds", lambda sampling, B, device: torch.arange(B) + 7)


def emitted(made: Batch, rule: str, *, drawn: bool) -> list[list[int]]:
    probs = made.draft_probs if drawn else None
    return runner_v1.emit(rule, made.rows, made.layout, made.drafts, probs, made.metadata).tolist()


def by_verify(made: Batch, rule: str, *, drawn: bool) -> list[list[int]]:
    """Verify each request alone by `dp.verify`."""
    rows, J = [], made.layout.longest + 1
    for b, (start, count) in enumerate(zip(made.layout.starts, made.layout.drafted, strict=True)):
        q = made.draft_probs[start - b : start - b + count].log()[None]
        sampling = made.samplings[b]
        verdict = dp.verify(
            made.rows[None, start : start + count + 1],
            made.drafts[b : b + 1, :count],
            q if drawn and count and sampling.temperature > 0 else None,
            sampling=sampling,
            draft_sampling=dp.SamplingParams(),
            rule=rule,
            seeds=torch.tensor([b + 7]),
            positions=0,
        )
        tokens = verdict.tokens[0].tolist()
        rows.append(tokens + [-1] * (J - len(tokens)))
    return rows


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("lengths", [LENGTHS, [2] * 5])
def test_ragged_rows_get_the_verdicts_of_verify(rule, drawn, lengths):
    for seed in SEEDS:
        made = batch(SAMPLINGS, lengths, seed)
        assert emitted(made, rule, drawn=drawn) == by_verify(made, rule, drawn=drawn)


def test_the_comparison_sees_rows_that_are_shifted_by_one():
    shifted = [replace(made, rows=made.rows.roll(1, 0)) for made in (batch(SAMPLINGS, LENGTHS, s) for s in SEEDS)]
    right = [by_verify(batch(SAMPLINGS, LENGTHS, s), "block", drawn=True) for s in SEEDS]
    assert [emitted(made, "block", drawn=True) for made in shifted] != right


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.parametrize("drawn", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("rule", [pytest.param("token", marks=pytest.mark.slow), "block"])
def test_the_kernels_decide_as_the_rules_do(rule, drawn):
    pytest.importorskip("triton")
    made = batch(SAMPLINGS, LENGTHS)
    with kernels_on_cpu():
        by_kernels = emitted(made, rule, drawn=drawn)
    assert by_kernels == by_verify(made, rule, drawn=drawn)


def test_greedy_batches_take_a_short_way_to_the_same_verdicts():
    for seed in SEEDS:
        made = batch([dp.SamplingParams(temperature=0)] * 5, LENGTHS, seed)
        assert emitted(made, "block", drawn=False) == by_verify(made, "block", drawn=False)


@pytest.mark.parametrize("greedy", [False, True])
def test_a_negative_token_ends_its_draft(greedy):
    made = batch([dp.SamplingParams(temperature=0)] * 5 if greedy else WARM + WARM[:1], [3] * 5)
    best = made.rows.argmax(-1).view(5, 4)
    drafts = best[:, :3].clone()
    drafts[:, 1] = -1
    cut = replace(made, drafts=drafts)
    whole = replace(made, drafts=drafts[:, :1].contiguous(), layout=Layout((1,) * 5))
    whole = replace(whole, rows=made.rows.view(5, 4, V)[:, :2].flatten(0, 1))
    short = emitted(whole, "block", drawn=False)
    assert emitted(cut, "block", drawn=False) == [[*row, -1, -1] for row in short]


@pytest.mark.parametrize("sampling", [dp.SamplingParams(), dp.SamplingParams(temperature=0)])
def test_a_row_without_a_distribution_silences_its_request_only(sampling):
    made = batch([sampling] * 3, [2, 2, 2])
    broken = made.rows.clone()
    broken[3] = torch.nan  # the first row of request 1
    before, after = emitted(made, "token", drawn=False), emitted(replace(made, rows=broken), "token", drawn=False)
    assert after[1] == [-1, -1, -1]
    assert [after[0], after[2]] == [before[0], before[2]]


class Logprobs(NamedTuple):
    """A stand-in for vLLM's: one row for each column of tokens."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


@dataclass
class Output:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: Logprobs | None = None


def test_of_a_step_without_drafts_single_requests_are_silenced():
    """vLLM takes every entry of a single column for a token, so that padding needs a second one."""
    drawn, faulty = torch.tensor([[5], [6], [7]]), torch.tensor([False, True, False])
    silent = runner_v1.silenced(Output(drawn), faulty)
    assert silent.sampled_token_ids.tolist() == [[5, -1], [-1, -1], [7, -1]]
    assert silent.logprobs_tensors is None
    rows = torch.arange(3)
    kept = runner_v1.silenced(Output(drawn, Logprobs(rows, -rows, rows)), faulty)
    valid = (kept.sampled_token_ids >= 0).flatten()
    assert [each[valid].tolist() for each in kept.logprobs_tensors] == [[0, 2], [0, -2], [0, 2]]


class Model:
    """A stand-in for vLLM's model runner, whose sampler writes into the logits."""

    def __init__(self, settings) -> None:
        self.rejection_sampler = SimpleNamespace(draftproof=settings)

    def _sample(self, logits, spec_decode_metadata):
        return Output(logits.nan_to_num_(0).argmax(-1, keepdim=True))


@pytest.mark.parametrize(("settings", "expected"), [(None, [[2], [0]]), ("block", [[2, -1], [-1, -1]])])
def test_a_step_that_vllm_samples_itself_is_watched_if_it_was_asked_for(settings, expected):
    sample = runner_v1._fails_rows_without_a_distribution(Model._sample)
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, -2.0]])
    assert sample(Model(settings), logits.clone(), None).sampled_token_ids.tolist() == expected
    assert sample(Model(settings), logits[:1].clone(), None).sampled_token_ids.tolist() == [[2]]
    assert sample(Model(settings), logits.clone(), object()).sampled_token_ids.tolist() == [[2], [0]]


def test_a_broken_row_that_the_text_does_not_reach_is_harmless():
    made = batch([dp.SamplingParams(temperature=0)], [2])
    rows = made.rows.clone()
    rows[2] = torch.nan
    wrong = torch.tensor([[int(rows[0].argmin()), 0]])
    assert emitted(replace(made, rows=rows, drafts=wrong), "token", drawn=False) == [[int(rows[0].argmax()), -1, -1]]


def test_min_p_is_cut_before_top_p():
    """With these, vLLM's order leaves one token of four, and transformers' order two."""
    params = dp.SamplingParams(min_p=0.3, top_p=0.7)
    rows, layout = torch.tensor([[0.60, 0.25, 0.10, 0.05]]).log(), Layout((0,))
    cut = cut_by_min_p(rows, layout, sampling_metadata([params]))
    assert (cut[0] > -torch.inf).tolist() == [True, True, False, False]
    drafts = torch.empty(1, 0, dtype=torch.long)
    drawn = {runner_v1.emit("token", rows, layout, drafts, None, sampling_metadata([params])).item() for _ in range(50)}
    assert drawn == {0}
    assert (dp.warp(rows[None], [params]).probs()[0, 0] > 0).tolist() == [True, True, False, False]


class MinTokensLogitsProcessor:
    """A stand-in under the name of vLLM's own: least tokens, output and stop tokens of each request."""

    def __init__(self, min_toks: dict) -> None:
        self.min_toks = min_toks


def edited(made: Batch, **changes) -> torch.Tensor:
    """Return which entries of a batch's rows are forbidden."""
    sampling = made.metadata
    sampling.output_token_ids = [[4, 5]] * len(made.samplings)
    for name, value in changes.items():
        setattr(sampling, name, value)
    rows = processed(made.rows, made.layout, made.drafts.tolist(), sampling)
    return rows == -torch.inf


def test_a_bad_word_is_forbidden_where_the_draft_begins_it():
    made = batch(WARM[:2], [2, 1])
    drafts = torch.tensor([[6, 7], [9, -1]])
    words = {0: [[5, 6, 7], [6, 8], [11]]}
    found = edited(replace(made, drafts=drafts), bad_words_token_ids=words)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [[11], [7, 8, 11], [11], [], []]


def test_stop_tokens_are_forbidden_until_the_text_with_its_draft_is_long_enough():
    made = batch(WARM[:2], [3, 1])
    processor = MinTokensLogitsProcessor({0: (4, [4, 5], {13, 16})})
    procs = SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[processor])
    found = edited(made, logitsprocs=procs)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [[13, 16], [13, 16], [], [], [], []]


def test_allowed_tokens_are_those_of_the_rows_request():
    made = batch(WARM[:2], [1, 2])
    mask = torch.zeros(2, V, dtype=torch.bool)
    mask[1, [3, 4]] = True
    found = edited(made, allowed_token_ids_mask=mask)
    assert [row.nonzero()[:, 0].tolist() for row in found] == [[], [], [3, 4], [3, 4], [3, 4]]


def test_drawn_drafts_become_point_masses_for_some_requests():
    made = batch(WARM, [2, 3, 0, 2])
    tokens = torch.cat([row[:count] for row, count in zip(made.drafts, made.layout.drafted, strict=True)])
    tokens[4] = -1
    before = made.draft_probs.clone()
    found = runner_v1.chosen(made.draft_probs, tokens, made.layout.drafted, [False, True, True, False])
    assert torch.equal(made.draft_probs, before)
    assert torch.equal(found[[0, 1, 5, 6]], before[[0, 1, 5, 6]])
    assert torch.equal(found[2:4], torch.nn.functional.one_hot(tokens[2:4], V).float())


def test_seeds_come_from_the_requests_generator_or_the_default_one(monkeypatch):
    monkeypatch.undo()
    made = sampling_metadata([dp.SamplingParams()] * 3)
    made.generators = {1: torch.Generator().manual_seed(5)}
    first = runner_v1.fresh_seeds(made, 3, torch.device("cpu")).tolist()
    second = runner_v1.fresh_seeds(made, 3, torch.device("cpu")).tolist()
    made.generators = {1: torch.Generator().manual_seed(5)}
    again = runner_v1.fresh_seeds(made, 3, torch.device("cpu")).tolist()
    assert len(set(first + second)) == 6
    assert again[1] == first[1]
    assert again[0] != first[0]
