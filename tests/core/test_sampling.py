"""`warp` returns the distributions that plain decoding with transformers' own processors draws from."""

import copy
import itertools
import math
import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import draftproof as dp
from draftproof.core.distribution import DraftVocab
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import Draft, History

V = 3000


def reference(logits, s, prompt, output):
    """Return one position's probabilities by transformers' processors, and by OpenAI's formula for what they lack."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = logits[None].clone()
    for token, bias in s.logit_bias.items():
        scores[0, token] += bias
    before, after = LogitsProcessorList(), LogitsProcessorList()
    if s.repetition_penalty != 1:
        before.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    seen = torch.tensor([prompt + output])
    scores = before(seen, scores) if len(seen[0]) else scores
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=scores.shape[-1])
    scores = scores - s.presence_penalty * (counts > 0) - s.frequency_penalty * counts
    if s.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1])[0].float()
    if s.temperature != 1:
        after.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k is not None:
        after.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        after.append(TopPLogitsWarper(s.top_p))
    if s.min_p > 0:
        after.append(MinPLogitsWarper(s.min_p))
    return after(seen, scores).softmax(-1)[0]


def borderline(p, q, top_p):
    """Tell whether rounding may move a token across the edge: the mass before it is within 1e-5 of top_p."""
    before = p.sort(descending=True).values.double().cumsum(0)
    return ((before - top_p).abs() < 1e-5).any()


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.7, top_k=50),
    SamplingParams(top_k=1),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=0.5, top_p=0.3),
    SamplingParams(temperature=2.5, top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.1),
    SamplingParams(top_p=0.95, min_p=0.02),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.8, temperature=0.7, top_k=20),
    SamplingParams(presence_penalty=1.5, frequency_penalty=-0.5),
    SamplingParams(logit_bias={3: 5.0, 7: -math.inf, 11: -2.0}),
    SamplingParams(0.9, 64, 0.92, 0.01, 1.1, 0.4, 0.3, {5: 4.0}),
]


@pytest.mark.parametrize("s", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_agrees_with_transformers_at_every_scored_position(s):
    g = torch.Generator().manual_seed(3)
    B, K = 3, 4
    logits = torch.randn((B, K + 1, V), generator=g) * 2.5
    draft = Draft(torch.randint(V, (B, K), generator=g), torch.tensor([4, 2, 0]))
    draft.tokens[0, 1] = draft.tokens[0, 0]  # drafted twice: counted twice
    history = [
        History(torch.randint(V, (9,), generator=g).tolist(), draft.tokens[b, :1].tolist() * b) for b in range(B)
    ]
    dist = warp(logits, [s] * B, history, draft)
    ours = dist.probs()
    for b, j in itertools.product(range(B), range(K + 1)):
        output = list(history[b].output) + draft.tokens[b, : min(j, int(draft.lengths[b]))].tolist()
        theirs = reference(logits[b, j], s, list(history[b].prompt), output)
        assert (ours[b, j] - theirs).abs().max() < 1e-6
        same = torch.equal(ours[b, j] > 0, theirs > 0)
        assert same or borderline(
            reference(logits[b, j], SamplingParams(s.temperature, s.top_k), [], []), ours, s.top_p
        )
        tokens = torch.randint(V, (5,), generator=g)
        at = dist.at(torch.tensor([b]), torch.tensor([j]))
        torch.testing.assert_close(
            at.log_probs(tokens[None]).exp()[0].float(), ours[b, j, tokens], atol=1e-7, rtol=1e-5
        )


def test_rows_of_one_batch_may_all_differ():
    logits = torch.randn((len(SAMPLINGS), 2, V), generator=torch.Generator().manual_seed(0)) * 3
    history = [History([1, 2], [3])] * len(SAMPLINGS)
    together = warp(logits, SAMPLINGS, history).probs()
    for b, s in enumerate(SAMPLINGS):
        alone = warp(logits[b : b + 1], [s], history[:1]).probs()[0]
        torch.testing.assert_close(together[b], alone, atol=1e-7, rtol=0)


def test_ties_at_a_cutoff_are_all_kept():
    logits = torch.tensor([[[3.0, 2.0, 2.0, 2.0, 1.0, 0.0]]])
    assert (warp(logits, [SamplingParams(top_k=2)]).probs() > 0).sum() == 4
    assert (warp(logits, [SamplingParams(top_p=0.5)]).probs() > 0).sum() == 4
    flat = torch.zeros(1, 1, 5000)
    assert (warp(flat, [SamplingParams(top_p=0.1)]).probs() > 0).all()
    torch.testing.assert_close(warp(flat, [SamplingParams(top_k=7)]).probs(), torch.full((1, 1, 5000), 1 / 5000))


def test_a_tie_beyond_the_k_largest_counts_in_top_p():
    """Five equal tokens, k = 2: top-k keeps all five, so each has a fifth of the mass and top-p sees that."""
    dist = warp(torch.tensor([[[1.0] * 5 + [0.0]]]), [SamplingParams(top_k=2, top_p=0.5)])
    torch.testing.assert_close(dist.probs()[0, 0], torch.tensor([0.2] * 5 + [0.0]))


def test_greedy_takes_the_first_of_equals():
    assert warp(torch.tensor([[[0.0, 2.0, 2.0]]]), [SamplingParams(temperature=0)]).point.tolist() == [[1]]


def test_masked_tokens_have_no_probability_and_filters_work_on_what_is_left():
    logits = torch.tensor([[[9.0, 3.0, 2.0, 1.0]]])
    allowed = torch.tensor([[[False, True, True, True]]])
    probs = warp(logits, [SamplingParams(top_k=2)], allowed=allowed).probs()[0, 0]
    torch.testing.assert_close(probs, torch.tensor([-math.inf, 3.0, 2.0, -math.inf]).softmax(0))
    assert warp(logits, [SamplingParams(temperature=0)], allowed=allowed).point.tolist() == [[1]]


def test_logits_are_held_by_reference_where_nothing_edits_them():
    logits = torch.randn(2, 3, 50)
    assert warp(logits, [SamplingParams(temperature=0.7, top_k=5)] * 2).logits.data_ptr() == logits.data_ptr()
    before = logits.clone()
    warp(logits, [SamplingParams(repetition_penalty=2.0)] * 2, [History([1], [2])] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_a_distribution_has_a_nan_normaliser(bad):
    logits = torch.randn(3, 1, 700)
    logits[1, 0, 650] = bad
    for s in (
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.1),
    ):
        assert warp(logits, [s] * 3).lse.isnan()[:, 0].tolist() == [False, True, False]
    nothing = torch.full((1, 1, 9), -math.inf)
    assert warp(nothing, [SamplingParams(top_k=3, top_p=0.5)]).lse.isnan().all()


def test_at_a_tree_node_only_its_ancestors_count_as_seen():
    logits = torch.zeros(1, 4, 10)
    draft = Draft(torch.tensor([[3, 4, 5]]), torch.tensor([3]), parents=torch.tensor([[-1, -1, 1]]))
    probs = warp(logits, [SamplingParams(presence_penalty=1.0)], [History([], [])], draft).probs()[0]
    lowered = [set((row < row.max() - 1e-6).nonzero()[:, 0].tolist()) for row in probs]
    assert lowered == [set(), {3}, {4}, {4, 5}]


def test_a_draft_vocabulary_has_target_ids_and_is_zero_outside():
    ids = torch.tensor([7, 2, 9])
    dist = warp(torch.tensor([[[0.0, 1.0, 2.0]]]), [SamplingParams()], vocab=DraftVocab.of(ids, 12))
    dense = torch.zeros(12).index_copy(0, ids, torch.tensor([0.0, 1.0, 2.0]).softmax(0))
    torch.testing.assert_close(dist.probs()[0, 0], dense)
    assert dist.vocab_size == 12
    assert dist.log_prob(torch.tensor([[3]])).item() == -math.inf
    assert (
        warp(
            torch.tensor([[[0.0, 1.0, 2.0]]]), [SamplingParams(temperature=0)], vocab=DraftVocab.of(ids, 12)
        ).point.item()
        == 9
    )
    penalised = warp(
        torch.zeros(1, 1, 3),
        [SamplingParams(presence_penalty=1.0)],
        [History([], [2, 11])],
        vocab=DraftVocab.of(ids, 12),
    ).probs()[0, 0]
    assert penalised[2] < penalised[7] == penalised[9]


def test_small_temperatures_keep_their_precision():
    """scale · logit in float32 would be off by whole units at T = 1e-5; the distribution must still be the softmax."""
    logits = torch.tensor([[[30.0, 30.00001, 29.9]]])
    exact = (logits.double() / 1e-5).softmax(-1)
    torch.testing.assert_close(
        warp(logits, [SamplingParams(temperature=1e-5)]).probs().double(), exact, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, r"temperature must be a number in \[0, inf\).*got -0.1"),
        ("temperature", math.nan, "temperature"),
        ("temperature", "warm", "temperature"),
        ("top_k", 0, "top_k must be None .off. or a whole number ≥ 1; got 0"),
        ("top_k", 2.5, "top_k"),
        ("top_p", 0, r"top_p must be a number in \(0, 1\] .1 is off.; got 0"),
        ("top_p", 1.1, "top_p"),
        ("min_p", -1, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("presence_penalty", math.inf, "presence_penalty"),
        ("frequency_penalty", None, "frequency_penalty"),
        ("logit_bias", {-1: 2.0}, "logit_bias.*-1"),
        ("logit_bias", {1: math.nan}, "logit_bias"),
        ("seed", 1.5, "seed"),
        ("seed", 2**64, "seed"),
    ],
)
def test_a_wrong_value_names_the_field_the_value_and_the_range(field, value, words):
    # The tests execute annotations, so a wrong type raises TypeError before our own check is reached.
    with pytest.raises((ValueError, TypeError), match=words):
        SamplingParams(**{field: value})


GPU_SAMPLINGS = {
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "bias": SamplingParams(temperature=0.8, logit_bias={1: 2.0, 7: -1.0}),
    "filters": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "nucleus": SamplingParams(temperature=1.2, top_p=0.95),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", GPU_SAMPLINGS)
def test_distributions_on_a_gpu_equal_those_on_the_cpu(name):
    logits = 3 * torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0))
    samplings, seen = [GPU_SAMPLINGS[name]] * 2, [History([1, 2, 2], [7, 7, 9]), History([], [3])]
    on_cpu, on_gpu = (warp(part, samplings, seen).probs().cpu() for part in (logits, logits.cuda()))
    assert (on_cpu - on_gpu).abs().max() < 1e-6


def test_penalties_without_history_are_refused():
    with pytest.raises(ValueError, match=r"row 1 asks for a penalty.*history"):
        warp(torch.zeros(2, 1, 5), [SamplingParams(), SamplingParams(presence_penalty=1.0)])


@pytest.mark.parametrize("temperature", [9e-6, 1e-8, 1e-20, 1e-37, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0)) * 8
    tiny = warp(logits, [SamplingParams(temperature=temperature)] * 2)
    assert torch.equal(tiny.point, logits.argmax(-1))
    tokens = logits.argmax(-1)[:, 1:]
    impossible = logits.argmin(-1)[:, :2]
    for rule in ("token", "block", "coupled"):
        for draft in (tokens, impossible):
            verdict = dp.verify(logits, draft, sampling=SamplingParams(temperature=temperature), rule=rule)
            assert set(verdict.tokens[verdict.tokens >= 0].tolist()) <= set(logits.argmax(-1).flatten().tolist())


@pytest.mark.parametrize("size", [1e6, 1e12, 3e38])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_logits_too_coarse_for_their_temperature_give_the_limit(size, options):
    """Exponents of such logits would overflow: an infinite log-sum-exp is no distribution, and was taken for one."""
    logits = torch.randn(1, 2, 300, generator=torch.Generator().manual_seed(1))
    logits = (logits / logits.abs().max() * size).float()
    dist = warp(logits, [SamplingParams(temperature=1e-3, **options)])
    assert torch.equal(dist.probs().argmax(-1), logits.argmax(-1))
    torch.testing.assert_close(dist.probs().sum(-1), torch.ones(1, 2))
    assert dp.verify(logits, logits.argmax(-1)[:, :1], sampling=SamplingParams(temperature=1e-3)).accepted.tolist() == [
        1
    ]


def test_sampling_parameters_can_be_copied_pickled_hashed_and_listed():
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.5, 7: -2}, seed=4)
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert len({params, replace(params), SamplingParams()}) == 2
    assert asdict(params)["logit_bias"] == {3: 1.5, 7: -2.0}
    with pytest.raises(TypeError, match="cannot be changed"):
        params.logit_bias[3] = 0.0


def test_numpy_scalars_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(7), logit_bias={np.int64(2): np.float32(1)}
    )
    assert params == SamplingParams(temperature=0.5, top_k=3, seed=7, logit_bias={2: 1.0})
    assert type(params.top_k) is int


def test_a_row_with_a_negative_entry_is_not_a_distribution():
    rows = torch.tensor([[0.5, 0.5], [-0.1, 1.1], [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]])
    assert dp.Distribution.of(rows).lse.isnan().tolist() == [False, True, True, True, True]
