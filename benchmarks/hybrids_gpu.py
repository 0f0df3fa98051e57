"""Check and measure hybrid targets on a GPU: greedy texts, distributions, speed, and the cost of a rollback.

    PYTHONPATH=src:tests python benchmarks/hybrids_gpu.py --out benchmarks/results/hybrids_gpu.json

Weights are random, so no model hub is needed. `--device cpu --tokens 48` shows in minutes that all parts run. The
script ends with an error if a greedy token is not the plain forward's, a distribution is not the target's, or the
control, a rollback that does not restore the states, is not found.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import transformers as tf

import draftproof as dp
from draftproof.models.hybrid_cache import HybridCache
from engine_checks import g_test
from engine_models import numbers
from hybrids_cpu import V, model_of, rollback, speed
from models.hybrid_families import hybrid

FAMILIES: Final = {"lfm2": "lfm2", "qwen3_5": "qwen3_5_text", "falcon_h1": "falcon_h1"}
"""Families of hybrids_cpu.py, and the names of their tiny models."""
NEAR: Final = 1e-4
"""Difference of logits below which rounding may swap two tokens."""
ALPHA: Final = 1e-6
SMALL_V, TEMPERATURE = 4, 0.8
PROMPTS: Final = [[3], [1, 2, 3, 0, 1], [2, 0, 1, 0, 3, 3, 2, 1, 0], [0, 1, 0]]


def greedy(model: Any, tokens: int) -> dict[str, Any]:
    """Decode four ragged prompts with drafts, in one batch; count tokens that a plain forward does not prefer."""
    prompts = [numbers(n, n, V) for n in (3, 40, 17, 90)]
    outputs = dp.load(model, "ngram", num_draft_tokens=4).generate(prompts, temperature=0, max_tokens=tokens)
    wrong, near = 0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            text = torch.tensor([[*prompt, *output.tokens]], device=model.device)
            logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        below = logits.amax(-1) - logits.gather(1, text[0, len(prompt) :, None])[:, 0]
        wrong += int((below > NEAR).sum())
        near += int(((below > 0) & (below <= NEAR)).sum())
    drafted, accepted = (sum(getattr(output.stats, name) for output in outputs) for name in ("drafted", "accepted"))
    return {
        "tokens": tokens * len(prompts),
        "drafted": drafted,
        "accepted": accepted,
        "wrong": wrong,
        "near ties": near,
    }


def small_drafter(device: str) -> Any:
    config = tf.LlamaConfig(
        vocab_size=SMALL_V, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    return tf.LlamaForCausalLM(config).eval().to(device)


def p_value(model: Any, texts: int) -> float:
    """Return the p-value of three tokens after each of four prompts, drafted by another model, in ragged batches."""
    engine = dp.load(model, small_drafter(str(model.device)), num_draft_tokens=3, max_batch=400)
    sampling = dp.SamplingParams(temperature=TEMPERATURE)
    samplings = [replace(sampling, seed=7 + 1_000_003 * i) for i in range(len(PROMPTS) * texts)]
    outputs = engine.generate(PROMPTS * texts, samplings, max_tokens=4)
    made = torch.tensor([output.tokens[:3] for output in outputs]) @ torch.tensor([SMALL_V**2, SMALL_V, 1])
    seen = [torch.bincount(made[i :: len(PROMPTS)], minlength=SMALL_V**3) for i in range(len(PROMPTS))]
    wanted = torch.cat([joint(model, prompt) for prompt in PROMPTS]) / len(PROMPTS)
    return g_test(torch.cat(seen), wanted)


def joint(model: Any, prompt: list[int]) -> torch.Tensor:
    """Compute the distribution of three tokens from plain forward passes."""
    dist, texts = torch.ones(1, dtype=torch.float64), torch.tensor([prompt])
    for _ in range(3):
        with torch.no_grad():
            logits = model(texts.to(model.device), use_cache=False).logits[:, -1].double()
        dist = (dist[:, None] * (logits / TEMPERATURE).softmax(-1).cpu()).flatten()
        after = torch.arange(SMALL_V).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(SMALL_V, 0), after], 1)
    return dist


def forget_to_restore(cache: HybridCache) -> None:
    cache._before, cache._calls = None, {}


def control(model: Any, texts: int) -> float:
    """Return the p-value of an engine whose rollbacks leave the states as they are."""
    as_usual = dp.load(model, None)  # probed before the fault is there
    with patch.object(HybridCache, "settle", forget_to_restore):
        found = p_value(model, texts)
    del as_usual
    return found


def measured(model: Any, K: int, length: int) -> dict[str, float]:
    """Return the speed of a dictated text with and without drafts, and the cost of a rollback."""
    plain, suffix = (speed(model, drafter, K, length) for drafter in (None, "suffix"))
    cost = rollback(model, K)
    figures = {
        **cost,
        "rollback_share": cost["ms_rollback"] / cost["ms_pass"],
        "plain": plain["tokens_per_second"],
        "suffix": suffix["tokens_per_second"],
        "ratio": suffix["tokens_per_second"] / plain["tokens_per_second"],
        "accepted": suffix["accepted"],
    }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--texts", type=int, default=1000, help="texts after each prompt in a test of a distribution")
    parser.add_argument("--draft", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": tf.__version__}
    if given.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    for family in given.families:
        tiny = hybrid(FAMILIES[family], SMALL_V, 1.5).to(given.device)
        model = model_of(family).to(given.device)
        row = found[family] = {"greedy": greedy(model, given.tokens)}
        row["p-value"], row["p-value of the control"] = p_value(tiny, given.texts), control(tiny, given.texts)
        half = model if given.device == "cpu" else model.to(torch.bfloat16)
        row["speed"] = measured(half, given.draft, given.tokens)
        print(family, json.dumps(row), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    for family in given.families:
        row = found[family]
        assert row["greedy"]["wrong"] == 0, f"{family}: greedy tokens that a plain forward does not prefer"
        assert row["p-value"] > ALPHA > row["p-value of the control"], f"{family}: {row}"


if __name__ == "__main__":
    main()
