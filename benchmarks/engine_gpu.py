"""The engine on a GPU: equality with transformers, laws, waits, speed, memory; for a machine without our dev tools.

    PYTHONPATH=src python3 benchmarks/engine_gpu.py --out benchmarks/results/engine_gpu.json

Random weights: no model hub is needed. The law test draws texts of three tokens from a tiny model under every rule and
drafter and compares them with the joint law of plain forwards by a G-test (chi-square tail by its Wilson-Hilferty
approximation, so that nothing but torch is needed); a wrong law stands beside them, and must be found. Waits are what
torch itself reports as synchronisations inside a round, with the line that caused them, and reads of fetched numbers
that had not arrived yet. Speed is of a model of 1B shape whose later layers matter little, so that its first two draft
well: the drafter is those two, for us and for transformers' assisted generation alike.
"""

import argparse
import copy
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import draftproof as dp
from draftproof.core import host
from draftproof.drafters.model import ModelDrafter
from draftproof.engine import batch as batches
from draftproof.models.hf import HFModel

ALPHA = 1e-6


def llama(seed: int, vocab: int, hidden: int, layers: int, heads: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.5 if vocab < 100 else 0.05,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


def first_layers(model: Any, count: int, share: float) -> Any:
    """Make what the later layers add small, in place; and a model of the first layers on copied weights."""
    with torch.no_grad():
        for layer in model.model.layers[count:]:
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:count]
    small = LlamaForCausalLM(config).to(model.device, model.dtype).eval()
    small.load_state_dict(model.state_dict(), strict=False)
    return small


def numbers(n: int, count: int) -> list[int]:
    return torch.randint(10, 4000, (count,), generator=torch.Generator().manual_seed(n)).tolist()


def greedy_equality(max_tokens: int = 128) -> dict[str, Any]:
    """Rows that part from transformers' own greedy generation, float32, for every drafter, replayed and launched."""
    model = llama(0, 4096, 512, 8, 8, torch.float32)
    prompts = [numbers(n, n) for n in (3, 40, 17, 90)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
        wanted.append(out[0, len(prompt) :].tolist())
    found: dict[str, Any] = {}
    for graphs in (True, False):
        served = HFModel(model, graphs=graphs)
        for drafter in (None, "ngram", "suffix", "early-exit:2", llama(0, 4096, 512, 2, 8, torch.float32)):
            engine = dp.load(served, drafter, num_draft_tokens=4)
            outputs = engine.generate(prompts, temperature=0, max_tokens=max_tokens)
            name = drafter if isinstance(drafter, str) or drafter is None else "model"
            parted = sum(o.tokens != w for o, w in zip(outputs, wanted, strict=True))
            found[f"{name}, {'replayed' if graphs else 'launched'}"] = parted
        if graphs:
            found["recording refused"] = served.recorder.refusal
    return found


def g_test(seen: torch.Tensor, law: torch.Tensor) -> float:
    """The p-value, by the Wilson-Hilferty normal approximation of the chi-square tail."""
    expected = law.double().cpu() * seen.sum()
    small = expected < 5
    s = torch.cat([seen[~small].double(), seen[small].sum()[None].double()])
    e = torch.cat([expected[~small], expected[small].sum()[None]])
    s, e = s[e > 0], e[e > 0]
    g, k = float(2 * torch.special.xlogy(s, s / e).sum()), len(s) - 1
    z = ((g / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def joint(model: Any, prompt: list[int], V: int, temperature: float) -> torch.Tensor:
    """The law of three tokens, from plain forwards."""
    law = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([prompt])
    for _ in range(3):
        with torch.no_grad():
            p = (model(texts.cuda()).logits[:, -1].double() / temperature).softmax(-1).cpu()
        law = (law[:, None] * p).flatten()
        texts = torch.cat([texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]], 1)
    return law


def laws(texts: int, batch: int = 20_000) -> dict[str, float]:
    """p-values of the joint law of three tokens; below 1e-6 is a bias, and the control must be."""
    V, temperature = 6, 0.8
    model, small = llama(1, V, 32, 2, 2, torch.float32), llama(2, V, 32, 1, 2, torch.float32)
    prompt = [1, 2, 3, 1, 2]
    law, other = joint(model, prompt, V, temperature), joint(model, prompt, V, temperature * 1.1)
    values = {}
    for rule in ("token", "block", "coupled", "tree"):
        for name in ("model", "ngram"):
            drafter = (
                ModelDrafter(HFModel(small), vocab_size=V, branches=2 if rule == "tree" else 1)
                if name == "model"
                else name
            )
            engine = dp.load(model, drafter, rule=rule, num_draft_tokens=3, max_batch=batch)
            counts = torch.zeros(V**3, dtype=torch.long)
            for start in range(0, texts, batch):
                samplings = [dp.Sampling(temperature=temperature, seed=start + i) for i in range(batch)]
                for output in engine.generate([prompt] * batch, samplings, max_tokens=3):
                    a, b, c = output.tokens
                    counts[(a * V + b) * V + c] += 1
            values[f"{rule} {name}"] = g_test(counts, law)
            print(f"law {rule} {name}: p = {values[f'{rule} {name}']:.3f}", flush=True)
    values["control: a law of another temperature"] = g_test(counts, other)
    return values


def waits() -> dict[str, Any]:
    """Of every drafter and rule: the most waits in a round, and which lines torch says waited besides the fetch."""
    model, small = llama(0, 4096, 512, 4, 8, torch.float32), llama(0, 4096, 512, 2, 8, torch.float32)
    samplings = [dp.Sampling(temperature=0.8, seed=1), dp.Sampling(temperature=0, seed=2)]
    samplings += [dp.Sampling(top_k=20, seed=3), dp.Sampling(top_p=0.9, min_p=0.02, seed=4)]
    found = {}
    for rule in ("block", "token", "coupled", "tree"):
        for drafter in (None, "ngram", "suffix", "early-exit:2", small):
            name = drafter if isinstance(drafter, str) or drafter is None else "model"
            engine = dp.load(model, drafter, rule=rule, num_draft_tokens=4)
            engine.generate([numbers(9, 40)] * 4, samplings, max_tokens=24)  # kernels are compiled, and this waits
            found[f"{name} {rule}"] = _watched(
                lambda e=engine: e.generate([numbers(9, 40)] * 4, samplings, max_tokens=24)
            )
    return found


def _watched(call: Callable[[], Any]) -> dict[str, Any]:
    advance, read, rounds, late, lines = batches.advance, host.Fetch.read, [], [], set()

    def fetched(fetch: Any) -> Any:
        late.append(not fetch._arrived.query())
        return read(fetch)

    def counted(*args: Any) -> Any:
        late.clear()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                rows = advance(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        told = [w for w in caught if "synchroniz" in str(w.message)]
        lines.update(f"{Path(w.filename).name}:{w.lineno}" for w in told)
        rounds.append((sum(late), len(told)))
        return rows

    batches.advance, host.Fetch.read = counted, fetched
    try:
        call()
    finally:
        batches.advance, host.Fetch.read = advance, read
    return {
        "rounds": len(rounds),
        "fetches waited for, at most": max(n for n, _ in rounds),
        "other waits in a round, at most": max(n for _, n in rounds),
        "at": sorted(lines)[:12],
    }


def timed(call: Callable[[], Any], count: int) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def speed(count: int = 256) -> dict[str, Any]:
    """A 1B-shaped model in bfloat16, one row: tokens a second; and the memory of eight rows."""
    model = llama(3, 32000, 2048, 16, 16, torch.bfloat16)
    small = first_layers(model, 2, 0.1)
    prompt = numbers(0, 64) * 2
    ids = torch.tensor([prompt], device="cuda")
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count}
    small.generation_config.num_assistant_tokens = 4
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    found: dict[str, Any] = {
        "transformers, greedy": timed(lambda: model.generate(ids, do_sample=False, **given), count),
        "transformers assisted, greedy": timed(
            lambda: model.generate(ids, do_sample=False, assistant_model=small, **given), count
        ),
        "transformers assisted, T = 0.8": timed(
            lambda: model.generate(ids, do_sample=True, temperature=0.8, top_k=0, assistant_model=small, **given), count
        ),
    }
    for graphs in (True, False):
        served, drafts = HFModel(model, graphs=graphs), HFModel(small, graphs=graphs)
        how = "replayed" if graphs else "launched"
        for name, drafter, k in (
            ("plain", None, 0),
            ("model, 4", ModelDrafter(drafts, vocab_size=32000), 4),
            ("model, auto", ModelDrafter(drafts, vocab_size=32000), "auto"),
            ("suffix, auto", "suffix", "auto"),
        ):
            for temperature in (0.0, 0.8):
                engine = dp.load(served, drafter, num_draft_tokens=k)
                outputs: list[Any] = []
                sampling = dp.Sampling(temperature=temperature, seed=1)
                rate = timed(
                    lambda e=engine, s=sampling, o=outputs: o.append(e.generate(prompt, s, max_tokens=count)), count
                )
                stats = outputs[-1].stats
                found[f"{name}, T = {temperature}, {how}"] = {
                    "tok/s": round(rate, 1),
                    "tokens a pass": round(stats.tokens_per_pass, 2),
                    "seconds": {stage: round(s, 3) for stage, s in stats.seconds.items()},
                }
                print(name, temperature, how, found[f"{name}, T = {temperature}, {how}"], flush=True)
        found[f"recording refused, {how}"] = served.recorder.refusal
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dp.load(model, "suffix").generate([prompt] * 8, temperature=0.8, max_tokens=128)
    found["peak MiB over the weights, 8 rows"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def launches(rounds: int = 8) -> dict[str, float]:
    """Calls of the CUDA runtime in a round of the 1B shape, by name."""
    from torch.profiler import ProfilerActivity, profile

    model = llama(3, 32000, 2048, 16, 16, torch.bfloat16)
    small = first_layers(model, 2, 0.1)
    engine = dp.load(model, ModelDrafter(HFModel(small), vocab_size=32000), num_draft_tokens=4)
    stream = engine.stream(numbers(0, 64) * 2, temperature=0.8, seed=1, max_tokens=400)
    for _ in range(12):
        next(stream)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            next(stream)
    wanted = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "Synchronize")
    counts = {e.key: e.count / rounds for e in seen.key_averages() if any(name in e.key for name in wanted)}
    stream.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=40_000)
    parser.add_argument("--only", nargs="*", default=None, help="greedy, waits, speed, launches, laws")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "PYTHONPATH=src python3 benchmarks/engine_gpu.py",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    for short, name, part in (
        ("greedy", "greedy rows that part from transformers", greedy_equality),
        ("waits", "waits", waits),
        ("speed", "speed, tok/s", speed),
        ("launches", "runtime calls in a round", launches),
        ("laws", "p-values of the joint law", lambda: laws(options.texts)),
    ):
        if options.only is not None and short not in options.only:
            continue
        start = time.perf_counter()
        try:
            result[name] = part()
        except Exception as error:
            import traceback

            traceback.print_exc()
            result[name] = f"failed: {type(error).__name__}: {error}"
        result.setdefault("seconds", {})[short] = round(time.perf_counter() - start, 1)
        print(name, result[name], flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
