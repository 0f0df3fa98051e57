"""The counts of an evaluation are the engine's own, and the time limit is checked after every round."""

import time
from types import SimpleNamespace

import pytest

from draftproof.core.sampling import SamplingParams
from draftproof.engine.load import load
from draftproof.train import evaluate
from draftproof.train.evaluate import OVERALL, count_passes, held_out_prompts
from train.tiny_target import Ticks, save_tiny_llama


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load(
        save_tiny_llama(tmp_path_factory.mktemp("tiny-llama")), "suffix", device="cpu", num_draft_tokens=3, max_batch=4
    )


def short_prompts(count):
    """Prompts that fit: the tiny target has 256 positions, one per letter."""
    return [prompt for prompt in held_out_prompts() if len(prompt.text) < 100][:count]


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}])
def test_tokens_and_passes_are_those_of_the_engine(engine, sampling):
    prompts = short_prompts(10)
    found = count_passes(engine, prompts, sampling, max_tokens=12, seed=5)
    samplings = [SamplingParams(**sampling, seed=5 + n) for n in range(10)]
    outputs = engine.generate([prompt.text for prompt in prompts], samplings, max_tokens=12)
    assert found[OVERALL].texts == 10
    assert found[OVERALL].tokens == sum(output.stats.emitted for output in outputs)
    assert found[OVERALL].passes == sum(output.stats.rounds for output in outputs)
    kind = prompts[0].kind
    same = [output for prompt, output in zip(prompts, outputs, strict=True) if prompt.kind == kind]
    assert found[kind].tokens == sum(output.stats.emitted for output in same)


def test_when_the_time_is_over_the_round_is_the_last(engine, monkeypatch):
    clock = SimpleNamespace(monotonic=Ticks(1.0))  # read once before the first round, and once after each
    monkeypatch.setattr(evaluate, "time", clock)
    found = count_passes(engine, short_prompts(10), {"temperature": 1.0}, max_tokens=200, seconds=3.0)
    # The engine takes four at once; one whose prompt begins like another's may start a round later.
    assert 4 * 2 <= found[OVERALL].passes <= 4 * 3


def test_a_first_round_is_always_run(engine):
    began = time.monotonic()
    assert count_passes(engine, short_prompts(4), {"temperature": 1.0}, seconds=0.0)[OVERALL].passes == 4
    assert time.monotonic() - began < 5
