"""Latency of the command line. It measures wall-clock time, so run it on an idle machine: `pytest -m slow -s`."""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch

from draftproof.engine.load import load
from models.int4_models import needs_int4

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
    assert median(times) < 4


MEASURED = """
import sys
from draftproof.cli.main import main
try:
    main(["generate", "Why is the sky blue?", "--max-tokens", "64"])
except SystemExit:
    pass
imported = {"transformers", "torch._dynamo", "sympy"} & set(sys.modules)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024, *imported)
"""


@needs_int4
@pytest.mark.usefixtures("smollm2")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_the_command_takes_little_memory_on_four_bits():
    done = subprocess.run([sys.executable, "-c", MEASURED], check=True, capture_output=True, text=True)
    peak, *imported = done.stdout.split("\n")[-2].split()
    print(f"\ngenerate, peak memory: {peak} MB")
    assert not imported
    assert int(peak) <= 600


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
