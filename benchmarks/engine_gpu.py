"""The engine on a GPU: greedy equality with transformers, a law test, memory; for a machine without our dev tools.

    PYTHONPATH=src python3 benchmarks/engine_gpu.py --out benchmarks/results/engine_gpu.json

Random weights: no model hub is needed. The law test draws 200 000 texts of three tokens from a tiny model under every
rule and drafter and compares them with the joint law of plain forwards by a G-test (chi-square tail by its
Wilson-Hilferty approximation, so that nothing but torch is needed).
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import draftproof as dp
from draftproof.drafters.model import ModelDrafter
from draftproof.models.hf import HFModel


def llama(seed: int, vocab: int, hidden: int, layers: int, heads: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.5 if vocab < 100 else 0.05,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


def greedy_equality(max_tokens: int = 128) -> dict[str, Any]:
    """Tokens equal to transformers' own greedy generation, float32, for every drafter; and how many rows parted."""
    model = llama(0, 4096, 512, 8, 8, torch.float32)
    prompts = [
        torch.randint(10, 4000, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 40, 17, 90)
    ]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
        wanted.append(out[0, len(prompt) :].tolist())
    parted = {}
    for drafter in (None, "ngram", "suffix", "early-exit:2", llama(0, 4096, 512, 2, 8, torch.float32)):
        engine = dp.load(model, drafter, num_draft_tokens=4)
        outputs = engine.generate(prompts, temperature=0, max_tokens=max_tokens)
        name = drafter if isinstance(drafter, str) or drafter is None else "model"
        parted[str(name)] = sum(o.tokens != w for o, w in zip(outputs, wanted, strict=True))
    return parted


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


def laws(texts: int = 200_000, batch: int = 20_000) -> dict[str, float]:
    """p-values of the joint law of three tokens; far below 1e-6 would be a bias."""
    V, temperature = 6, 0.8
    model, small = llama(1, V, 32, 2, 2, torch.float32), llama(2, V, 32, 1, 2, torch.float32)
    prompt = [1, 2, 3, 1, 2]
    law = joint(model, prompt, V, temperature)
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
    return values


def speed() -> dict[str, Any]:
    """A 1B-shaped model in bfloat16: tokens a second, one row, and the memory of eight rows."""
    model = llama(3, 32000, 2048, 16, 16, torch.bfloat16)
    prompt = torch.randint(10, 4000, (64,), generator=torch.Generator().manual_seed(0)).tolist() * 2
    found: dict[str, Any] = {}
    ids = torch.tensor([prompt], device="cuda")
    for name, call in {
        "transformers": lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=128
        ),
        "plain": lambda: dp.load(model, None).generate(prompt, temperature=0, max_tokens=128),
        "suffix": lambda: dp.load(model, "suffix").generate(prompt, temperature=0, max_tokens=128),
    }.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found[f"{name} tok/s"] = 128 / (time.perf_counter() - start)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dp.load(model, "suffix").generate([prompt] * 8, temperature=0.8, max_tokens=128)
    found["peak MiB over the weights, 8 rows"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=200_000)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": "PYTHONPATH=src python3 benchmarks/engine_gpu.py",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    for name, part in (
        ("greedy rows that part from transformers", greedy_equality),
        ("p-values of the joint law", lambda: laws(options.texts)),
        ("speed", speed),
    ):
        try:
            result[name] = part()
        except Exception as error:
            result[name] = f"failed: {type(error).__name__}: {error}"
        print(name, result[name], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
