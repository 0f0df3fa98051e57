"""Latency of the command line. It measures wall-clock time, so run it on an idle machine: `pytest -m slow -s`."""

import subprocess
import sys
import time
from statistics import median

import pytest
import torch

from draftproof.engine.load import load

pytestmark = pytest.mark.slow
COMMAND = (sys.executable, "-m", "draftproof.cli")


def test_help_answers_at_once():
    times = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    print(f"\ndraftproof --help: {median(times):.3f} s (median of {len(times)})")
    assert median(times) < 0.5


@pytest.mark.usefixtures("smollm2")  # skips the test if the model is not cached
def test_the_first_token_comes_soon():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        command = [*COMMAND, "generate", "Why is the sky blue?", "--max-tokens", "4", "--temperature", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
            assert process.stdout.read(1)
            times.append(time.perf_counter() - start)
    print(f"\ngenerate, first token: {median(times):.2f} s (median of {len(times)}; {max(times):.2f} s at most)")
    assert median(times) < 8


def test_streaming_costs_next_to_nothing(smollm2):
    model, tokenizer = smollm2
    engine = load(model, None, tokenizer=tokenizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # then CPU seconds do not depend on what else runs on the machine
    try:
        ratios = [_spent(_streamed, engine) / _spent(_whole, engine) for _ in range(9)]
    finally:
        torch.set_num_threads(threads)
    overhead = median(ratios) - 1
    print(f"\nstreaming adds {overhead:+.2%} to a generation of {TOKENS} tokens (median of {len(ratios)} pairs)")
    assert overhead < 0.02


TOKENS = 48
PROMPT = "Write a short story about a lighthouse keeper."


def _whole(engine):
    engine.generate(PROMPT, max_tokens=TOKENS, temperature=0)


def _streamed(engine):
    for chunk in engine.stream(PROMPT, max_tokens=TOKENS, temperature=0):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()


def _spent(run, engine):
    start = time.process_time()
    run(engine)
    return time.process_time() - start
