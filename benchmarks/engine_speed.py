"""Measure speed on a device against transformers, CUDA runtime calls and memory. Parts of engine_gpu.py.

The model has the shape of a 1B model; its later layers matter little, so its first two draft well. They are the drafter
for us and for transformers' assisted generation alike. The head is untrained: only its time per round is meaningful.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

import draftproof as dp
from engine_checks import Found, K
from engine_models import Scale, billion, drafters, first_layers, numbers

CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "Synchronize")


def speed(scale: Scale) -> Found:
    """Measure tokens per second of one row in bfloat16, the better of two runs; the most important first."""
    model = billion(scale)
    small, count = first_layers(model, 2, 0.1), scale.of(192, 8)
    prompt = numbers(0, scale.of(128, 16), model.config.vocab_size)
    yield "transformers, greedy", _transformers(model, prompt, count, scale.device, do_sample=False)
    for how in ("replayed", "launched"):
        made = drafters(model, small, graphs=how == "replayed")
        for name in ("none", "model", "head", "suffix"):
            for temperature in (0.0, 0.8):
                engine = dp.load(model, made[name](), num_draft_tokens=K, graphs=how == "replayed")
                yield f"{name}, T = {temperature}, {how}", _ours(engine, prompt, count, temperature, scale.device)
        if how == "replayed":
            yield from _assisted(model, small, prompt, count, scale.device)
    for name in ("model", "suffix"):
        engine = dp.load(model, drafters(model, small)[name](), num_draft_tokens="auto")
        yield f"{name}, auto, T = 0.8, replayed", _ours(engine, prompt, count, 0.8, scale.device)


def _ours(engine: Any, prompt: list[int], count: int, temperature: float, device: str) -> dict[str, Any]:
    outputs: list[Any] = []
    sampling = dp.SamplingParams(temperature=temperature, seed=1)
    rate = timed(lambda n: outputs.append(engine.generate(prompt, sampling, max_tokens=n)), count, device)
    stats = outputs[-1].stats
    return {
        "tok/s": round(rate, 1),
        "tokens a pass": round(stats.tokens_per_pass, 2),
        "ms a round": round(1000 * stats.tokens_per_pass / rate, 2),
        "seconds": {stage: round(s, 3) for stage, s in stats.seconds.items()},
    }


def _transformers(model: Any, prompt: list[int], count: int, device: str, **options: Any) -> float:
    ids = torch.tensor([prompt], device=device)
    options = {"attention_mask": torch.ones_like(ids), **options}
    return round(timed(lambda n: model.generate(ids, max_new_tokens=n, **options), count, device), 1)


def _assisted(model: Any, small: Any, prompt: list[int], count: int, device: str) -> Found:
    small.generation_config.num_assistant_tokens = K
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    assistant = {"assistant_model": small}
    yield "transformers assisted, greedy", _transformers(model, prompt, count, device, do_sample=False, **assistant)
    warm = {"do_sample": True, "temperature": 0.8, "top_k": 0}
    yield "transformers assisted, T = 0.8", _transformers(model, prompt, count, device, **warm, **assistant)


def timed(call: Callable[[int], Any], count: int, device: str) -> float:
    """Return tokens per second, the better of two runs after a short one that compiles."""
    call(min(count, 24))
    best = 0.0
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        call(count)
        synchronize(device)
        best = max(best, count / (time.perf_counter() - start))
    return best


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def launches(scale: Scale) -> Found:
    """Count the calls of the CUDA runtime in a round, by name."""
    from torch.profiler import ProfilerActivity, profile

    rounds, activities = 8, [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if scale.device == "cuda" else []
    model = billion(scale)
    made = drafters(model, first_layers(model, 2, 0.1))
    prompt = numbers(0, scale.of(128, 16), model.config.vocab_size)
    for name in ("none", "model", "head", "suffix"):
        engine = dp.load(model, made[name](), num_draft_tokens=K)
        stream = engine.stream(prompt, temperature=0.8, seed=1, max_tokens=400)
        for _ in range(8):  # CUDA graphs are captured by now
            next(stream)
        with profile(activities=activities) as seen:
            for _ in range(rounds):
                next(stream)
        stream.close()
        events = [e for e in seen.key_averages() if any(call in e.key for call in CALLS)]
        yield name, {e.key: e.count / rounds for e in events}


def memory(scale: Scale) -> Found:
    """Measure the memory of eight rows beyond the weights, at its peak and after the run."""
    if scale.device != "cuda":
        yield "skipped", "only on a GPU"
        return
    model = billion(scale)
    prompts = [numbers(n, 128, model.config.vocab_size) for n in range(8)]
    for graphs in (True, False):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        dp.load(model, "suffix", num_draft_tokens=K, graphs=graphs).generate(prompts, temperature=0.8, max_tokens=128)
        peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        how = "replayed" if graphs else "launched"
        yield f"MiB, {how}", {"at most": round(peak / 2**20, 1), "afterwards": round(after / 2**20, 1)}
