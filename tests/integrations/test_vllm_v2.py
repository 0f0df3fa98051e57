"""The hook of vLLM's model runner V2, on synthetic batches in its layout, gives `dp.verify`'s verdicts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import draftproof as dp
from draftproof.integrations.vllm import parameters_v2, runner_v2
from draftproof.kernels import launch as launches
from integrations.vllm_batches import V, batch, kernels_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
SAMPLINGS = [dp.SamplingParams(temperature=t) for t in (0.8, 0.0, 1.0, 1.4)]
LENGTHS = [3, 2, 0, 1]
STATES = [5, 0, 3, 1]  # where each request's state is
K = 3


def arguments(made, *, drawn: bool) -> dict:
    """Return the arguments of vLLM's `rejection_sample` for a batch."""
    starts, B = made.layout.starts, len(made.samplings)
    owners = made.layout.owners(torch.device("cpu"))
    temperature, seeds = torch.zeros(6), torch.zeros(6, dtype=torch.int64)
    temperature[STATES] = torch.tensor([s.temperature for s in made.samplings])
    seeds[STATES] = torch.arange(B) + 7
    sampled = torch.full((len(made.rows),), 11)
    q = torch.randn(6, K, V)
    for b, (start, count) in enumerate(zip(starts, made.layout.drafted, strict=True)):
        sampled[start + 1 : start + 1 + count] = made.drafts[b, :count]
        probs = made.draft_probs[start - b : start - b + count]
        q[STATES[b], :count] = probs.log() * (made.samplings[b].temperature or 1.0)
    scale = torch.tensor([s.temperature or 1.0 for s in made.samplings])[owners]
    local = torch.cat([torch.arange(count + 1) for count in made.layout.drafted])
    return {
        "target_logits": made.rows / scale[:, None],
        "draft_logits": q if drawn else None,
        "draft_sampled": sampled,
        "cu_num_logits": torch.tensor([*starts, len(made.rows)], dtype=torch.int32),
        "pos": local + 40,
        "idx_mapping": torch.tensor(STATES, dtype=torch.int32),
        "expanded_idx_mapping": torch.tensor(STATES, dtype=torch.int32)[owners],
        "expanded_local_pos": local.int(),
        "temperature": temperature,
        "seed": seeds,
        "num_speculative_steps": K,
    }


def by_verify(made, rule: str, *, drawn: bool) -> list[list[int]]:
    texts = []
    for b, (start, count) in enumerate(zip(made.layout.starts, made.layout.drafted, strict=True)):
        q = made.draft_probs[start - b : start - b + count].log()[None]
        verdict = dp.verify(
            made.rows[None, start : start + count + 1],
            made.drafts[b : b + 1, :count],
            q if drawn and count and made.samplings[b].temperature > 0 else None,
            sampling=made.samplings[b],
            draft_sampling=dp.SamplingParams(),
            rule=rule,
            seeds=torch.tensor([b + 7]),
            positions=41,
        )
        texts.append(verdict.tokens[0, : int(verdict.accepted) + 1].tolist())
    return texts


def emitted(rule: str, made, **changes) -> list[list[int]]:
    with kernels_on_cpu():
        tokens, counts = runner_v2.sample(rule, **{**arguments(made, drawn=False), **changes})
    assert tokens.shape == (4, K + 1)
    assert counts.dtype == torch.int32
    return [row[:n] for row, n in zip(tokens.tolist(), counts.tolist(), strict=True)]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_chosen_drafts_get_the_verdicts_of_verify(seed):
    made = batch(SAMPLINGS, LENGTHS, seed)
    assert emitted("block", made) == by_verify(made, "block", drawn=False)


@pytest.mark.parametrize("rule", [pytest.param("token", marks=pytest.mark.slow), "block"])
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_drafts_are_verified_by_the_token_rule(rule, seed):
    made = batch(SAMPLINGS, LENGTHS, seed)
    assert emitted(rule, made, **arguments(made, drawn=True)) == by_verify(made, "token", drawn=True)


def test_the_comparison_sees_another_position():
    made = batch(SAMPLINGS, LENGTHS)
    moved = emitted("block", made, pos=arguments(made, drawn=False)["pos"] + 1)
    assert moved != by_verify(made, "block", drawn=False)


def test_a_negative_draft_token_ends_the_draft():
    made = batch(SAMPLINGS, [3, 3, 3, 3])
    given = arguments(made, drawn=False)
    given["draft_sampled"][[2, 6, 10, 14]] = -1  # the second draft token of each request
    assert all(len(text) <= 2 for text in emitted("block", made, **given))


def test_a_faulty_row_emits_nothing():
    made = batch(SAMPLINGS, LENGTHS)
    logits = arguments(made, drawn=False)["target_logits"].clone()
    logits[made.layout.starts[2]] = torch.nan
    texts = emitted("block", made, target_logits=logits)
    assert texts[2] == []
    assert [texts[b] for b in (0, 1, 3)] == [by_verify(made, "block", drawn=False)[b] for b in (0, 1, 3)]


def test_a_drafter_with_fewer_entries_cuts_the_padded_vocabulary():
    made = batch(SAMPLINGS, LENGTHS)
    given = arguments(made, drawn=True)
    padded = torch.nn.functional.pad(given["target_logits"], (0, 32), value=9.0)
    assert emitted("token", made, **{**given, "target_logits": padded}) == by_verify(made, "token", drawn=True)


class Operations(TorchDispatchMode):
    """Count torch operations that would launch something on a GPU: all but allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += not (function.is_view or function.overloadpacket is torch.ops.aten.empty)
        return result


@pytest.mark.parametrize("drawn", [False, True])
def test_a_call_is_a_few_launches(drawn, monkeypatch):
    """A call with few requests is bound by its launches: 43 torch operations took 0.9 ms of an H200's host."""
    monkeypatch.setattr(launches, "launch", lambda call, workspace: None)
    monkeypatch.setattr(parameters_v2, "arrange", {(4,): lambda *args, **kwargs: None})
    given = arguments(batch(SAMPLINGS, LENGTHS), drawn=drawn)
    with Operations() as operations:
        runner_v2.sample("block", **given)
    assert operations.count <= 5
