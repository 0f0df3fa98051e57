"""Measure vLLM on a CPU with the bundled model: plain, stock speculation and the plug-in, taking turns in one engine.

    OMP_NUM_THREADS=1 python benchmarks/vllm_cpu.py [--limit 3] [--parts sampled greedy calls] [--out FILE]

It needs the environment of `make test-vllm`. One engine serves all contenders, so that they differ in nothing else: for
plain decoding the drafter proposes nothing, and for stock speculation the plug-in's settings are taken off the sampler.
The order rotates from prompt to prompt. Figures are medians over prompts of the ratio to plain, prefill included. Time
is the process' CPU time on one thread, which does not depend on what else the machine does. A call of the verification
is timed on the rows of real steps, beside vLLM's own function with its CPU defect repaired (vllm-project/vllm#55005).
About three minutes.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from draftproof.bench.prompts import pick, read
from draftproof.integrations.vllm import NGram, Suffix
from draftproof.integrations.vllm.settings import Settings
from draftproof.models import bundled

HERE = Path(__file__).parent

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
}
"""Set before vLLM is imported, which happens in functions for that reason."""

K = 4
"""Draft tokens of a round."""
PARTS = ("sampled", "greedy", "calls")
KINDS = ("copying", "code-editing", "chat")
COPIED, BEGUN = 96, 16
"""Tokens of a text to copy, and of the copy that the prompt begins: a small model does not copy when told to."""


@dataclass(frozen=True)
class Contender:
    """A drafter (None: plain decoding) and who verifies it (None: vLLM itself)."""

    drafter: str | None
    rule: str | None


CONTENDERS = {
    "plain": Contender(None, None),
    "stock n-gram": Contender("vLLM n-gram", None),
    "plug-in, n-gram": Contender("vLLM n-gram", "block"),
    "plug-in, our n-gram": Contender("n-gram", "block"),
    "plug-in, suffix": Contender("suffix", "block"),
}


class StockNGram:
    """vLLM's n-gram proposer behind the interface of a custom class."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        config.speculative_config.prompt_lookup_max, config.speculative_config.prompt_lookup_min = 3, 1
        self._proposer = NgramProposer(config)

    def propose(self, sampled: Any, lengths: Any, tokens: Any, slot_mappings: Any = None) -> Any:
        return self._proposer.propose(K, sampled, lengths, tokens, slot_mappings=slot_mappings)


class Nothing:
    def propose(self, sampled: Any, lengths: Any, tokens: Any, slot_mappings: Any = None) -> Any:
        return [[] for _ in sampled]


@dataclass
class Host:
    """The engine, its drafters, and the time spent in verification."""

    llm: Any
    drafters: dict[str | None, Any] = field(default_factory=dict)
    verifying: float = 0.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner

    def set_up(self) -> None:
        config = self.runner.vllm_config
        self.drafters = {
            None: Nothing(),
            "vLLM n-gram": StockNGram(config),
            "n-gram": NGram(config),
            "suffix": Suffix(config),
        }
        sampler = self.runner.rejection_sampler
        forward = sampler.forward

        def timed(*args: Any) -> Any:
            start = time.process_time()
            output = forward(*args)
            self.verifying += time.process_time() - start
            if len(self.calls) < 8:
                self.calls.append(args)
            return output

        sampler.forward = timed

    def use(self, contender: Contender) -> None:
        self.runner.drafter = self.drafters[contender.drafter]
        self.runner.rejection_sampler.draftproof = None if contender.rule is None else Settings(contender.rule)

    def run(self, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> dict[str, Any]:
        """Generate, and return speed, texts, tokens a pass and verification's share of the time."""
        from vllm import SamplingParams

        core = self.llm.llm_engine.engine_core.engine_core
        passes, self.verifying = core.model_executor.draftproof_passes, 0.0
        asked = [
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=i, **sampling)
            for i in range(len(prompts))
        ]
        start = time.process_time()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
        seconds = time.process_time() - start
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        tokens = sum(map(len, texts))
        return {
            "tokens_per_second": tokens / seconds,
            "tokens_per_pass": tokens / (core.model_executor.draftproof_passes - passes),
            "share_of_verification": self.verifying / seconds,
            "texts": texts,
        }


def start() -> Host:
    from vllm import LLM

    llm = LLM(
        model=str(bundled.fetch()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        additional_config={"draftproof": {"rule": "block"}},
        speculative_config={
            "method": "custom_class",
            "model": "draftproof.integrations.vllm.Suffix",
            "num_speculative_tokens": K,
        },
    )
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    execute, executor.draftproof_passes = executor.execute_model, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        executor.draftproof_passes += 1
        return execute(*args, **kwargs)

    executor.execute_model = counted
    host = Host(llm)
    host.set_up()
    return host


def prompts(tokenizer: Any, limit: int) -> dict[str, list[list[int]]]:
    """Return prompts to continue the third copy of a text, to edit code and to chat, as tokens."""

    def encoded(text: str) -> list[int]:
        turn = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))

    def copied(text: str) -> list[int]:
        ids = list(tokenizer(text)["input_ids"])[:COPIED]
        return ids + ids + ids[:BEGUN]

    texts = {kind: [p.prompt for p in pick(read(), [kind], limit)] for kind in ("summarising", "code-editing", "chat")}
    copies = [copied(text) for text in texts.pop("summarising")]
    return {"copying": copies} | {kind: list(map(encoded, each)) for kind, each in texts.items()}


def table(host: Host, kinds: dict[str, list[list[int]]], max_tokens: int, **sampling: Any) -> dict[str, Any]:
    """Let the contenders take turns on every prompt; return medians for each kind and contender."""
    names, figures = list(CONTENDERS), {}
    for kind, texts in kinds.items():
        runs: list[dict[str, Any]] = []
        for turn, tokens in enumerate(texts):
            run = {}
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                host.use(CONTENDERS[name])
                run[name] = host.run([tokens], max_tokens, **sampling)
            runs.append(run)
        figures[kind] = {name: summary(runs, name, greedy=sampling["temperature"] == 0) for name in names}
        for name, each in figures[kind].items():
            print(kind, name, each, flush=True)
    return figures


def summary(runs: list[dict[str, Any]], name: str, *, greedy: bool) -> dict[str, float]:
    ratios = sorted(run[name]["tokens_per_second"] / run["plain"]["tokens_per_second"] for run in runs)
    stock = [run[name]["tokens_per_second"] / run["stock n-gram"]["tokens_per_second"] for run in runs]
    figures = {
        "to_plain": round(statistics.median(ratios), 3),
        "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3),
        "to_stock": round(statistics.median(stock), 3),
        "tokens_per_pass": round(statistics.mean(run[name]["tokens_per_pass"] for run in runs), 2),
        "share_of_verification": round(statistics.median(run[name]["share_of_verification"] for run in runs), 4),
    }
    if greedy:
        figures["texts_unlike_plain"] = sum(run[name]["texts"] != run["plain"]["texts"] for run in runs)
    return figures


@contextmanager
def repaired() -> Iterator[None]:
    """Replace the function whose CPU version discards its result by one in torch."""
    from vllm.v1.sample import rejection_sampler

    broken = rejection_sampler.expand_batch_to_tokens

    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        each = x.repeat_interleave(counts.long(), output_size=num_tokens)
        return torch.where(each == replace_from, torch.full_like(each, replace_to), each)

    rejection_sampler.expand_batch_to_tokens = expand
    try:
        yield
    finally:
        rejection_sampler.expand_batch_to_tokens = broken


def calls(host: Host, texts: list[list[int]], B: int, **sampling: Any) -> dict[str, Any]:
    """Time single calls on the arguments of real steps, vLLM's and ours in turns; return medians in milliseconds."""
    host.use(CONTENDERS["plug-in, suffix"])
    host.calls = []
    run = host.run((texts * B)[:B], 24, **sampling)
    forward = type(host.runner.rejection_sampler).forward
    sampler = host.runner.rejection_sampler
    times: dict[str, list[float]] = {"stock, repaired": [], "plug-in": []}
    with repaired():
        for _ in range(12):
            for args in host.calls[-4:]:
                for name, settings in (("stock, repaired", None), ("plug-in", Settings("block"))):
                    sampler.draftproof = settings
                    metadata, draft_probs, logits, *more = args
                    begin = time.process_time()
                    forward(sampler, metadata, draft_probs, logits.clone(), *more)
                    times[name].append(1e3 * (time.process_time() - begin))
    rows = [sum(args[0].num_draft_tokens) + B for args in host.calls[-4:]]
    medians = {name: round(statistics.median(each), 3) for name, each in times.items()}
    share = round(run["share_of_verification"], 4)
    return {**medians, "rows": rows, "share_of_verification": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "vllm_cpu.json")
    options = parser.parse_args()
    if torch.get_num_threads() > 1:
        parser.error("set OMP_NUM_THREADS=1: CPU time is compared, and waiting threads would count")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    host = start()
    kinds = prompts(host.llm.get_tokenizer(), options.limit)
    for contender in CONTENDERS.values():
        host.use(contender)
        host.run([kinds["chat"][0]], 8, temperature=0.8)  # first passes allocate
    chosen, editing = {kind: kinds[kind] for kind in options.kinds}, kinds["code-editing"]
    measured: dict[str, Any] = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "vllm": version("vllm-cpu"),
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
        },
        "draft_tokens": K,
        "prompts_of_each_kind": options.limit,
    }
    for part, temperature in (("sampled", 0.8), ("greedy", 0.0)):
        if part in options.parts:
            measured[part] = table(host, chosen, options.max_tokens, temperature=temperature)
    if "calls" in options.parts:
        measured["calls"] = {
            "B = 1, greedy": calls(host, editing, 1, temperature=0.0),
            "B = 1, temperature": calls(host, editing, 1, temperature=0.8),
            "B = 8, temperature": calls(host, editing, 8, temperature=0.8),
            "B = 8, top-k + top-p": calls(host, editing, 8, temperature=0.8, top_k=50, top_p=0.95),
            "B = 8, greedy": calls(host, editing, 8, temperature=0.0),
        }
        print(json.dumps(measured["calls"], indent=2))
    options.out.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
