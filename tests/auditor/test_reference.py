"""The reference distributions, compared with one full forward pass per prefix and no batching."""

import pytest
import torch

from draftproof.auditor.reference import MAX_POSITIONS, ReferenceModel, fingerprint, reachable, supported
from draftproof.auditor.texts import Positions, Text
from draftproof.core.sampling import SamplingParams
from draftproof.models.hf import HFModel
from draftproof.models.toy import Toy
from engine.plain_distribution import next_distributions
from engine.tiny import PROMPT, V, llama
from models.int4_models import int4_llama, needs_int4

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(min_p=0.15, top_p=0.95, top_k=6),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4),
    SamplingParams(logit_bias={2: 1.5, 5: -2}, temperature=0.8),
]
TEXTS = [Text(PROMPT, (3, 3, 1, 4)), Text(PROMPT[:3], (5, 0, 5, 5, 2, 1)), Text((7,), (6,))]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("wrap", [lambda model: model, HFModel], ids=["transformers", "Model"])
def test_distributions_are_those_of_every_prefix_on_its_own(sampling, wrap):
    dists = ReferenceModel(wrap(llama())).dists(Positions.of(TEXTS), sampling)
    wanted = [
        next_distributions(llama(), [[*t.prompt, *t.tokens[:i]]], sampling, len(t.prompt))[0]
        for t in TEXTS
        for i in range(len(t.tokens))
    ]
    assert torch.allclose(dists.p.double(), torch.stack(wanted), atol=2e-6)


def test_texts_come_in_chunks_that_fit():
    chunks = list(ReferenceModel(llama()).chunks(TEXTS * 3000))
    assert [text for chunk in chunks for text in chunk] == TEXTS * 3000
    assert len(chunks) == 3
    assert all(sum(len(text.tokens) for text in chunk) <= MAX_POSITIONS for chunk in chunks)


def test_greedy_sampling_has_no_distribution_to_bet_on():
    with pytest.raises(ValueError, match="temperature 0 draws nothing"):
        ReferenceModel(llama()).dists(Positions.of(TEXTS), SamplingParams(temperature=0))


def test_tolerance_follows_type_and_temperature():
    assert ReferenceModel(llama()).tolerance(SamplingParams()) == 1e-4
    assert ReferenceModel(llama()).tolerance(SamplingParams(temperature=0.5)) == 2e-4
    assert ReferenceModel(Toy.random(4)).tolerance(SamplingParams(temperature=2.0)) == 1e-4
    assert ReferenceModel(Toy(torch.zeros(3, 3).bfloat16())).tolerance(SamplingParams()) == 1e-1


def test_a_fingerprint_changes_with_the_weights():
    assert fingerprint(llama()) == fingerprint(llama())
    assert fingerprint(Toy.random(V, seed=1)) != fingerprint(Toy.random(V, seed=2))


STEPS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize("sampling", [SamplingParams(top_k=3), SamplingParams(min_p=0.1), SamplingParams(top_p=0.9)])
def test_a_cutoff_is_clear_where_tokens_are_far_from_it(sampling):
    kept, clear = supported(STEPS, sampling, 1e-4)
    assert (kept > -torch.inf).sum() == 3
    assert clear.tolist() == [True]
    possible = [bool(reachable(STEPS, torch.tensor([t]), sampling, 1e-4)) for t in range(5)]
    assert possible == [True, True, True, False, False]


MASS = float(STEPS.softmax(-1)[0, :3].sum())


@pytest.mark.parametrize(
    ("scores", "sampling"),
    [
        (torch.tensor([[2.0, 1.0, 0.0, -1e-5, -2.0]]), SamplingParams(top_k=3)),
        (STEPS, SamplingParams(top_p=MASS - 1e-6)),
        (STEPS, SamplingParams(top_p=MASS + 1e-6)),
        (STEPS, SamplingParams(min_p=float(torch.tensor(-3.0).exp()) * (1 + 1e-5))),
        (torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0]]), SamplingParams(top_p=0.5)),
    ],
    ids=["top-k", "top-p just there", "top-p just beyond", "min-p", "ties"],
)
def test_a_cutoff_within_rounding_is_not_clear_and_lets_the_next_token_by(scores, sampling):
    _, clear = supported(scores.double(), sampling, 1e-4)
    assert clear.tolist() == [False]
    assert bool(reachable(scores.double(), torch.tensor([3]), sampling, 1e-4))


@needs_int4
def test_on_four_bits_a_bet_is_charged_the_error_of_its_payoff():
    """Cutoffs keep the tolerance of a single probability; a tolerance that is given counts for both."""
    warm, cold = SamplingParams(), SamplingParams(temperature=0.5)
    four, own = ReferenceModel(int4_llama(V)), ReferenceModel(llama())
    assert (four.tolerance(warm), four.payoff_error(warm), four.payoff_error(cold)) == (0.1, 0.02, 0.04)
    assert own.payoff_error(warm) == own.tolerance(warm) == 1e-4
    given = ReferenceModel(int4_llama(V), tolerance=0.05)
    assert given.payoff_error(warm) == given.tolerance(warm) == 0.05
