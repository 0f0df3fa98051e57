"""Measure generation on a GPU: passes, rounds and tokens per second of an 8B-shaped pair, beside transformers.

    python benchmarks/generation_gpu.py [--parts profile pass reading one batch long head auto service requests
                                                 transformers] [--out FILE]

The pair has random weights in bfloat16. What the target's layers after the fourth add is scaled by --share, and the
output head by 4, so that the first four layers, as a drafter of their own, agree with it about as often as a good small
model would; every matrix is still multiplied.
"""

import argparse
import asyncio
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import draftproof as dp
from draftproof.core.device import AsyncCopy
from draftproof.drafters.head import HeadDrafter
from draftproof.engine.device_round import DeviceRounds, Flight
from draftproof.engine.service import Service
from draftproof.models.device_rows import DeviceRows
from draftproof.models.head.network import FittedHead, Head
from draftproof.models.head.taps import shape_for
from draftproof.models.hf import HFModel
from draftproof.models.rows import Block, Reading

SHAPES = {
    "8B": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8},
    "1B": {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
           "num_attention_heads": 16, "num_key_value_heads": 8},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
DRAFT_LAYERS = 4


def pair(shape: str, share: float) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a target, and its first layers as a drafter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, rope_theta=500000.0, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, initializer_range=0.02, tie_word_embeddings=False, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        target = LlamaForCausalLM(config).eval()
        smaller = copy.deepcopy(config)
        smaller.num_hidden_layers = DRAFT_LAYERS
        if getattr(smaller, "layer_types", None) is not None:
            smaller.layer_types = smaller.layer_types[:DRAFT_LAYERS]
        drafter = LlamaForCausalLM(smaller).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for layer in target.model.layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
        target.lm_head.weight *= 4.0
    drafter.load_state_dict(target.state_dict(), strict=False)
    return target, drafter


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(run: Callable[[], object], times: int = 20) -> float:
    for _ in range(6):
        run()
    found = []
    for _ in range(times):
        sync()
        start = time.perf_counter()
        run()
        sync()
        found.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(found), 3)


def rows_at(model: HFModel, context: int, rows: int) -> DeviceRows:
    """Return rows of so many tokens each, which are made up: a pool is not read before it is written."""
    pages = rows * (context // 64 + 2) + 8
    made = DeviceRows(model, pages)
    for buffer in (*made.pool.keys, *made.pool.values):
        buffer.normal_()
    for row in range(rows):
        made.enter(row, context + 64)
        made.pool.rows[row].length = context
    return made


def passes(target: LlamaForCausalLM, contexts: list[int], batches: list[int]) -> dict[str, Any]:
    """Time a recorded pass, fused and not."""
    found: dict[str, Any] = {}
    for fused in (True, False):
        model = HFModel(target, probed=True, fused=fused)
        if fused:
            found["fused modules"] = str(model.fusion)
        for context in contexts:
            for rows in batches:
                held = rows_at(model, context, rows)
                for width in (1, 5) if fused else (5,):
                    tokens = torch.randint(0, model.vocab_size, (rows, width), device=model.device)
                    block = Block(list(range(rows)), tokens)
                    name = f"{'fused' if fused else 'modules'}, context {context}, {rows} rows of {width}, ms"
                    found[name] = median_ms(lambda: held.score([block]))  # noqa: B023
                    print(name, found[name], flush=True)
                del held
        del model
        torch.cuda.empty_cache()
    return found


def prompts(vocabulary: int, rows: int, length: int = 128) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for _ in range(rows)]


@contextmanager
def busy_times() -> Iterator[list[float]]:
    """Collect the host's seconds between two results that it waits for, without the wait: one number a round."""
    read, busy, ended = AsyncCopy.read, list[float](), time.perf_counter()

    def timed(copy: AsyncCopy) -> Any:
        nonlocal ended
        busy.append(time.perf_counter() - ended)
        numbers = read(copy)
        ended = time.perf_counter()
        return numbers

    with patch.object(AsyncCopy, "read", timed):
        yield busy


@contextmanager
def flights() -> Iterator[list[Flight]]:
    """Collect the rounds that stay on the device, in the order in which they are launched."""
    launch, found = DeviceRounds.launch, list[Flight]()

    def kept(rounds: DeviceRounds, *given: Any) -> Flight | None:
        flight = launch(rounds, *given)
        if flight is not None:
            found.append(flight)
        return flight

    with patch.object(DeviceRounds, "launch", kept):
        yield found


def gaps(found: list[Flight]) -> dict[str, float]:
    """Return how long the device waits between two rounds, by its own clock, and the share of a round that it is."""
    pairs = list(pairwise(found[1:]))  # the first follows the reading of the prompt
    between = [before.marks[-1].seconds_until(after.marks[0]) for before, after in pairs]
    rounds = [before.marks[0].seconds_until(after.marks[0]) for before, after in pairs]
    if not pairs:
        return {}
    return {
        "between rounds, median µs": round(1e6 * statistics.median(between), 1),
        "between rounds, share of a round": round(sum(between) / sum(rounds), 4),
        "from one round to the next, median ms": round(1e3 * statistics.median(rounds), 3),
    }


def tokens_per_second(
    engine: dp.Engine,
    texts: list[list[int]],
    temperature: float,
    tokens: int,
    *,
    seeded: bool = True,
    k: int | str | None = None,
    **more: Any,
) -> Any:
    """Return the best of two runs after a warm-up, with what a round took."""
    seeds = range(len(texts)) if seeded else [None] * len(texts)
    samplings = [dp.SamplingParams(temperature=temperature, seed=seed, **more) for seed in seeds]
    engine.generate(texts, samplings, max_tokens=24, num_draft_tokens=k)
    best: dict[str, Any] = {}
    for _ in range(2):
        sync()
        with busy_times() as busy, flights() as flown:
            start = time.perf_counter()
            outputs = engine.generate(texts, samplings, max_tokens=tokens, num_draft_tokens=k)
            sync()
            seconds = time.perf_counter() - start
        made = sum(len(output.tokens) for output in outputs)
        rounds = max(output.stats.rounds for output in outputs)
        if not best or made / seconds > best["tokens/s"]:
            stages: dict[str, float] = {}
            for output in outputs:
                for stage, value in output.stats.seconds.items():
                    stages[stage] = stages.get(stage, 0.0) + value
            reading = stages.get("prefill", 0.0)
            device = stages.get("draft", 0.0) + stages.get("score", 0.0)
            best = {
                "tokens/s": round(made / seconds, 1),
                "steady ms a round": round(1e3 * (seconds - reading) / rounds, 2),
                "device ms a round": round(1e3 * device / rounds, 2),
                "host ms a round, median": round(1e3 * statistics.median(busy), 3),
                **gaps(flown),
                "tokens a pass": round(statistics.mean(output.stats.tokens_per_pass for output in outputs), 2),
                "ms a round": round(1e3 * seconds / rounds, 2),
                "ms a round, by stage": {name: round(1e3 * v / rounds, 2) for name, v in stages.items() if v},
                "failed": [output.error for output in outputs if output.error][:1],
            }
    return best


def generation(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, batches: list[int], tokens: int, context: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    V = target.config.vocab_size
    for rows in batches:
        texts = prompts(V, rows, context)
        for name, draft, k in (("plain", None, "auto"), ("K = 4", drafter, 4), ("auto", drafter, "auto")):
            engine = dp.load(target, draft, num_draft_tokens=k, max_batch=rows, kv_memory=0.3)
            for temperature in (0.0, 0.8) if rows == 1 else (0.8,):
                key = f"{name}, {rows} rows, T = {temperature}, prompt {context}"
                # the lengths of a seeded request must not depend on the machine
                found[key] = tokens_per_second(engine, texts, temperature, tokens, seeded=name != "auto")
                print(key, found[key], flush=True)
            if rows == 1 and name == "K = 4":
                key = f"{name}, {rows} rows, T = 0.8, top-k 50, top-p 0.9"
                found[key] = tokens_per_second(engine, texts, 0.8, tokens, top_k=50, top_p=0.9)
                print(key, found[key], flush=True)
            del engine
            torch.cuda.empty_cache()
    return found


def heads(target: LlamaForCausalLM, batches: list[int], tokens: int) -> dict[str, Any]:
    """Time rounds with a head of the trained kind, over a quarter of the vocabulary; untrained, it is hardly accepted.

    What counts is the time of a round: a trained head takes as long.
    """
    found: dict[str, Any] = {}
    V = target.config.vocab_size
    fitted = FittedHead.on(Head(shape_for(target), seed=0), torch.arange(V // 4), target)
    found["bytes"] = sum(weight.nbytes for part in (fitted.head, fitted.rows) for weight in part.parameters())
    for rows in batches:
        texts = prompts(V, rows)
        for k in (1, 2, 4):
            drafter = HeadDrafter(fitted)
            engine = dp.load(target, drafter, num_draft_tokens=k, max_batch=rows, kv_memory=0.3)
            found[f"K = {k}, {rows} rows, T = 0.8"] = tokens_per_second(engine, texts, 0.8, tokens)
            print(k, rows, found[f"K = {k}, {rows} rows, T = 0.8"], flush=True)
            del engine
            torch.cuda.empty_cache()
    return found


def automatic(target: LlamaForCausalLM, drafter: LlamaForCausalLM, batches: list[int], tokens: int) -> dict[str, Any]:
    """Compare "auto" with fixed draft lengths and with plain decoding, in one engine for each number of rows.

    The contenders take turns, each turn with prompts of its own; of each, all tokens over all seconds count.
    """
    found: dict[str, Any] = {}
    for rows in batches:
        turns = max(4, 8 // rows)
        texts = prompts(target.config.vocab_size, rows * turns)
        engine = dp.load(target, drafter, max_batch=rows, kv_memory=0.3)
        contenders, spent = (0, 2, 4, 6, "auto"), dict[Any, list[float]]()
        for k in contenders:
            engine.generate(texts[:rows], temperature=0.8, max_tokens=tokens, num_draft_tokens=k)
        for turn in range(turns):
            for k in contenders:
                sync()
                start = time.perf_counter()
                given = texts[turn * rows : (turn + 1) * rows]
                made = engine.generate(given, temperature=0.8, max_tokens=tokens, num_draft_tokens=k)
                sync()
                assert all(len(output.tokens) == tokens for output in made)
                spent.setdefault(k, []).append(time.perf_counter() - start)
        speeds = {str(k): round(rows * tokens * turns / sum(seconds), 1) for k, seconds in spent.items()}
        best = max(value for name, value in speeds.items() if name != "auto")
        found[f"{rows} rows"] = {
            **speeds, "auto / best fixed": round(speeds["auto"] / best, 3),
            "auto / plain": round(speeds["auto"] / speeds["0"], 3),
            "seconds of each turn": {str(k): [round(each, 3) for each in seconds] for k, seconds in spent.items()},
        }  # fmt: skip
        print(rows, found[f"{rows} rows"], flush=True)
        del engine
        torch.cuda.empty_cache()
    return found


def service(target: LlamaForCausalLM, tokens: int, rows: int = 32) -> dict[str, Any]:
    """Compare so many callers of a service with one call of the library."""
    texts = prompts(target.config.vocab_size, rows)
    engine = dp.load(target, None, max_batch=rows, kv_memory=0.3)
    sampling = dp.SamplingParams(temperature=0.8)

    def threads() -> float:
        with engine.service() as served, ThreadPoolExecutor(rows) as callers:
            start = time.perf_counter()
            streams = [served.submit(text, sampling, max_tokens=tokens) for text in texts]
            made = sum(callers.map(lambda stream: sum(len(chunk.tokens) for chunk in stream), streams))
            return made / (time.perf_counter() - start)

    async def caller(served: Service, text: list[int]) -> int:
        return sum([len(chunk.tokens) async for chunk in served.submit(text, sampling, max_tokens=tokens)])

    async def all_callers(served: Service) -> int:
        return sum(await asyncio.gather(*(caller(served, text) for text in texts)))

    def coroutines() -> float:
        with engine.service() as served:
            start = time.perf_counter()
            return asyncio.run(all_callers(served)) / (time.perf_counter() - start)

    def one_call() -> float:
        start = time.perf_counter()
        made = engine.generate(texts, sampling, max_tokens=tokens)
        return sum(len(output.tokens) for output in made) / (time.perf_counter() - start)

    contenders = {"library": one_call, f"{rows} threads": threads, f"{rows} coroutines": coroutines}
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(6):
        for name, run in contenders.items():
            speed = run()
            if turn:  # the first is a warm-up
                speeds[name].append(speed)
    typical = {name: statistics.median(values) for name, values in speeds.items()}
    found: dict[str, Any] = {f"{name}, tokens/s": round(speed, 1) for name, speed in typical.items()}
    found |= {f"{name} / library": round(speed / typical["library"], 3) for name, speed in typical.items()}
    found["all turns"] = {name: [round(value, 1) for value in values] for name, values in speeds.items()}
    return found


def requests(target: LlamaForCausalLM, drafter: LlamaForCausalLM) -> dict[str, Any]:
    """Run 1000 requests of mixed lengths, and look at the memory and the slowest round."""
    engine = dp.load(target, drafter, num_draft_tokens=3, max_batch=16, kv_memory=2**30)
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(4, 60, (1000, 2), generator=generator).tolist()
    texts = [torch.randint(target.config.vocab_size, (n,), generator=generator).tolist() for n, _ in sizes]
    held = []
    for at in range(0, 1000, 100):
        engine.generate(texts[at : at + 100], temperature=0.8, max_tokens=[m for _, m in sizes[at : at + 100]])
        sync()
        held.append(torch.cuda.memory_allocated() >> 10)
    return {"KiB held after each 100 requests": held}


def beside_transformers(target: LlamaForCausalLM, drafter: LlamaForCausalLM, tokens: int) -> dict[str, Any]:
    """Time transformers plain, assisted, and compiled with a static cache; ours is measured in the same process."""
    ids = torch.tensor(prompts(target.config.vocab_size, 1), device=target.device)
    mask = torch.ones_like(ids)

    def speed(**options: Any) -> float:
        target.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options)
        sync()
        start = time.perf_counter()
        target.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **options)
        sync()
        return round(tokens / (time.perf_counter() - start), 1)

    return {
        "plain, tokens/s": speed(),
        "assisted, tokens/s": speed(assistant_model=drafter),
        "static cache and compile, tokens/s": speed(cache_implementation="static"),  # generate compiles the pass
    }


def profiled(target: LlamaForCausalLM) -> dict[str, Any]:
    """Return the kernels of a recorded pass over 5 tokens by time, and how much of it is none of them."""
    from torch.profiler import ProfilerActivity, profile

    model = HFModel(target, probed=True)
    held = rows_at(model, 1024, 1)
    tokens = torch.randint(0, model.vocab_size, (1, 5), device=model.device)
    for _ in range(6):
        held.score([Block([0], tokens)])
    sync()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        for _ in range(4):
            held.score([Block([0], tokens)])
        sync()
    rows = [
        (event.key[:80], round(event.self_device_time_total / 4, 1), event.count / 4)
        for event in run.key_averages()
        if event.self_device_time_total > 0
    ]
    rows.sort(key=lambda row: -row[1])
    return {"kernels a pass": sum(row[2] for row in rows), "µs a pass": sum(row[1] for row in rows), "top": rows[:22]}


def reading(target: LlamaForCausalLM) -> dict[str, Any]:
    """Time reading a prompt of 4096 tokens in chunks."""
    model = HFModel(target, probed=True)
    held = DeviceRows(model, 200)
    text = prompts(model.vocab_size, 1, 4096)[0]
    times = []
    for n in range(3):
        held.enter(n, 4100)
        sync()
        start = time.perf_counter()
        for at in range(0, 4096, 512):
            held.score([], reading=[Reading(n, text[at : at + 512])])
        sync()
        times.append(round(1e3 * (time.perf_counter() - start), 1))
        held.leave(n)
    return {"4096 tokens in chunks of 512, ms": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["pass", "one", "batch", "transformers", "profile", "reading"])
    parser.add_argument("--shape", default="8B", choices=SHAPES)
    parser.add_argument("--share", type=float, default=0.04)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024, 4096])
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target, drafter = pair(options.shape, options.share)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "profile": lambda: profiled(target),
        "pass": lambda: passes(target, options.contexts, [1]),
        "reading": lambda: reading(target),
        "one": lambda: generation(target, drafter, [1], options.tokens, 128),
        "batch": lambda: generation(target, drafter, options.batches, options.tokens, 128),
        "long": lambda: generation(target, drafter, options.batches, 64, 4096),
        "head": lambda: heads(target, [1, *options.batches], options.tokens),
        "auto": lambda: automatic(target, drafter, options.batches, options.tokens),
        "service": lambda: service(target, options.tokens),
        "requests": lambda: requests(target, drafter),
        "transformers": lambda: beside_transformers(target, drafter, options.tokens),
    }
    found: dict[str, Any] = {"shape": options.shape, "share": options.share}
    for name in options.parts:
        start = time.perf_counter()
        found[name] = parts[name]()
        print(f"{name} took {time.perf_counter() - start:.1f} s", json.dumps(found[name], indent=1), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
