"""Measure hybrid targets of about 100M parameters on a CPU: copied text with `suffix` against plain decoding, and the
cost of a rollback.

The weights are random, so a grammar that allows one token at each position dictates the texts: a passage of the prompt,
in which every 16th token is another one. Passes, drafts, rejections and rollbacks are those of real use.

python benchmarks/hybrids_cpu.py [--families lfm2 falcon_h1 …] [--tokens 192] [--threads 2]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode

import draftproof as dp
from draftproof.models.hybrid import HybridModel

V = 16384
COMMON = {"vocab_size": V, "hidden_size": 768, "tie_word_embeddings": True, "max_position_embeddings": 2048}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ATTENTION = {"num_attention_heads": 12, "num_key_value_heads": 4}
SSM = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
DELTA = {
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EVERY_FOURTH = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3

FAMILIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "lfm2": lambda: tf.Lfm2Config(
        **COMMON, **NO_END, **ATTENTION, intermediate_size=2560, block_auto_adjust_ff_dim=False, num_hidden_layers=12,
        layer_types=["conv", "conv", "full_attention"] * 4,
    ),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(
        **COMMON, **NO_END, **ATTENTION, **DELTA, head_dim=64, intermediate_size=2304, num_hidden_layers=12,
        layer_types=EVERY_FOURTH,
    ),
    "falcon_h1": lambda: tf.FalconH1Config(
        **COMMON, **NO_END, **ATTENTION, **SSM, mamba_d_ssm=1536, head_dim=64, intermediate_size=1536,
        num_hidden_layers=10,
    ),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **COMMON, **NO_END, **ATTENTION, **SSM, num_local_experts=0, shared_intermediate_size=2048,
        num_hidden_layers=10,
        layer_types=["linear_attention"] * 4 + ["full_attention"] + ["linear_attention"] * 5,
    ),
    "mamba2": lambda: tf.Mamba2Config(
        vocab_size=V, hidden_size=768, **NO_END, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        num_hidden_layers=24,
    ),
}  # fmt: skip


def model_of(family: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


def dictated(length: int) -> tuple[list[int], list[int]]:
    """Return a prompt, and the text after it: the prompt again with every 16th token changed."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(V, (length,), generator=generator).tolist()
    text = [(token + 1) % V if i % 16 == 15 else token for i, token in enumerate(prompt)]
    return prompt, text


def grammar_for(text: list[int]) -> Callable[[Any], torch.Tensor]:
    masks = torch.zeros((len(text) + 1, V), dtype=torch.bool)
    masks[torch.arange(len(text)), torch.tensor(text)] = True
    masks[len(text)] = True
    return lambda output: masks[min(len(output), len(text))]


def speed(model: tf.PreTrainedModel, drafter: str | None, K: int, length: int) -> dict[str, float]:
    """Return the tokens a second of a dictated text, without its prompt, and how many drafts were accepted."""
    prompt, text = dictated(length)
    engine = dp.load(model, drafter, num_draft_tokens=K)
    best = 0.0
    for _ in range(2):
        out = engine.generate(prompt, temperature=1.0, seed=1, max_tokens=length, allowed=grammar_for(text))
        assert out.tokens == text
        seconds = sum(value for stage, value in out.stats.seconds.items() if stage != "prefill")
        best = max(best, length / seconds)
    return {"tokens_per_second": best, "accepted": out.stats.accepted / max(1, out.stats.drafted)}


class Operations(TorchDispatchMode):
    """Counts the operations that compute something: on a GPU, each is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


def operations(model: tf.PreTrainedModel, K: int) -> dict[str, int]:
    """Return how many operations a pass over K + 1 tokens takes, and undoing its second half."""
    served, T = HybridModel(model), K + 1
    cache = served.new_cache(1)
    with Operations() as of_pass:
        served(torch.arange(T, device=served.device)[None], cache)
    cache.keep(torch.tensor([T // 2]))
    with Operations() as of_rollback:
        cache.settle()
    return {"operations_pass": of_pass.count, "operations_rollback": of_rollback.count}


def rollback(model: tf.PreTrainedModel, K: int, repeats: int = 15) -> dict[str, float]:
    """Return milliseconds of a pass over one token, of one over K + 1, and of undoing its second half."""
    served, T = HybridModel(model), K + 1
    cache = served.new_cache(1, 1024)

    def timed(call: Callable[[], object]) -> float:
        wait = torch.cuda.synchronize if served.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    def score(tokens: int) -> float:
        text = torch.randint(V, (1, tokens), device=served.device)
        return timed(lambda: served(text, cache))

    score(64)
    cache.keep(torch.tensor([64]))
    ones, passes, undone = [], [], []
    for _ in range(repeats):
        ones.append(score(1))
        cache.keep(torch.tensor([1]))
        cache.settle()
        passes.append(score(T))
        cache.keep(torch.tensor([T // 2]))
        undone.append(timed(cache.settle))
    return {"ms_one": 1e3 * median(ones), "ms_pass": 1e3 * median(passes), "ms_rollback": 1e3 * median(undone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--draft", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for family in given.families:
        model = model_of(family)
        cost = rollback(model, given.draft)
        plain, suffix = (speed(model, drafter, given.draft, given.tokens) for drafter in (None, "suffix"))
        row = {
            "family": family,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            **cost,
            "rollback_share": cost["ms_rollback"] / cost["ms_pass"],
            **operations(model, given.draft),
            "plain": plain["tokens_per_second"],
            "suffix": suffix["tokens_per_second"],
            "ratio": suffix["tokens_per_second"] / plain["tokens_per_second"],
            "accepted": suffix["accepted"],
        }
        rows.append(row)
        print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}))
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
