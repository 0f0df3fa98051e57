"""Distributions are the same wherever their logits lie."""

import pytest
import torch

import draftproof as dp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLINGS = {
    "penalties": dp.SamplingParams(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1
    ),
    "bias": dp.SamplingParams(temperature=0.8, logit_bias={1: 2.0, 7: -1.0}),
    "filters": dp.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "nucleus": dp.SamplingParams(temperature=1.2, top_p=0.95),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_distribution_on_a_gpu_is_that_on_the_host(name):
    logits = 3 * torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0))
    samplings, seen = [SAMPLINGS[name]] * 2, [([1, 2, 2], [7, 7, 9]), ([], [3])]
    here, there = (dp.warp(part, samplings, seen).probs().cpu() for part in (logits, logits.cuda()))
    assert (here - there).abs().max() < 1e-6
