"""Compare decoding on a CPU with llama.cpp: the same GGUF file, the same prompts, taking turns.

`make bench-llama` builds llama-cpp-python for this machine in an environment of its own. Each decoder runs in a process
of its own and decodes greedily while the others wait. The speed of a prompt is tokens after the first over seconds
after the first; medians are over prompts, and ratios are of decoders on the same prompt, one after the other. Prompts
of 128 to 4000 tokens are read by plain decoders: the time to their first token.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "llama_cpp.json"
THREADS = 2
CHAT = [
    "Why is the sky blue?",
    "Explain how a bicycle stays upright.",
    "What should I pack for a weekend in the mountains?",
    "Write a short story about a lighthouse keeper.",
    "How do I make a good cup of tea?",
    "What is the difference between a virus and a bacterium?",
]
TEXT = (
    "The river Elbe rises in the Giant Mountains and flows through Bohemia and Germany to the North Sea. It is 1094 "
    "kilometres long. Its largest cities are Dresden, Magdeburg and Hamburg. Ships have used it for centuries."
)
COPYING = [
    f"Repeat the following text exactly, word for word:\n\n{TEXT}",
    "Copy this list and add one item at the end:\n\n" + "\n".join(f"- item number {n}" for n in range(1, 16)),
    "Repeat this code without changes:\n\n```python\ndef mean(values):\n    total = 0.0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n```",
]
DECODERS = {
    "llama.cpp": ("llama", None),
    "llama.cpp, prompt lookup": ("llama", "lookup"),
    "draftproof, plain": ("ours", None),
    "draftproof, head": ("ours", "head"),
    "draftproof, suffix+head": ("ours", "suffix+head"),
    "draftproof, prompt-lookup": ("ours", "prompt-lookup"),
}
PLAIN = "draftproof, plain"
READERS = ("llama.cpp", PLAIN, "draftproof, head")
LENGTHS = (128, 512, 1024, 2048, 4000)
"""Tokens of the prompts whose reading is timed."""


def serve_llama(path: str, draft: str | None) -> None:
    """Decode prompts with llama.cpp: a JSON line of token ids in, a JSON line of times out."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    import llama_cpp

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=10) if draft else None
    llama = llama_cpp.Llama(path, n_ctx=4608, n_threads=THREADS, n_threads_batch=THREADS, verbose=False,
                            draft_model=lookup)  # fmt: skip
    print(json.dumps({"system": llama_cpp.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        asked, start = json.loads(line), time.perf_counter()
        tokens, times = [], []
        for token in llama.generate(asked["prompt"], temp=0.0, top_k=1, reset=True):
            tokens.append(token)
            times.append(time.perf_counter())
            if token in asked["end"] or len(tokens) == asked["tokens"]:
                break
        print(json.dumps({"start": start, "tokens": tokens, "times": times, "memory": peak_memory()}), flush=True)


def serve_ours(draft: str | None, weights: str) -> None:
    """Decode prompts with draftproof, as `serve_llama` does."""
    import torch

    import draftproof as dp

    torch.set_num_threads(THREADS)
    engine = dp.load("smollm2", draft, weights=weights)
    print(json.dumps({"system": f"torch {torch.__version__}, weights {weights}"}), flush=True)
    for line in sys.stdin:
        asked, start = json.loads(line), time.perf_counter()
        tokens: list[int] = []
        times: list[float] = []
        rounds = 0
        for chunk in engine.stream(asked["prompt"], temperature=0, max_tokens=asked["tokens"]):
            tokens += list(chunk.tokens)
            times += [time.perf_counter()] * len(chunk.tokens)
            rounds = chunk.stats.rounds
        made = {"start": start, "tokens": tokens, "times": times, "memory": peak_memory(), "passes": rounds}
        print(json.dumps(made), flush=True)


def peak_memory() -> int:
    """Return the largest resident memory of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return 0


class Worker:
    """A decoder in a process of its own."""

    def __init__(self, python: str, kind: str, draft: str | None, path: str, weights: str) -> None:
        # -P: this file must not be found in place of the package of its name.
        command = [python, "-P", __file__, "--serve", kind, "--draft", draft or "", "--file", path]
        command += ["--weights", weights]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.system = self._line()["system"]

    def decode(self, prompt: list[int], tokens: int, end: list[int]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens, "end": end}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def speed(made: dict[str, Any]) -> float:
    """Return tokens per second after the first chunk of tokens."""
    times = made["times"]
    later = [t for t in times if t > times[0]]
    return len(later) / (times[-1] - times[0]) if later else 0.0


def compare(asked: argparse.Namespace, path: str) -> dict[str, Any]:
    """Let decoders take turns on every prompt; return speeds by kind of prompt, and ratios to the first decoder's."""
    from transformers import AutoTokenizer

    from draftproof.models import bundled

    tokenizer = AutoTokenizer.from_pretrained(bundled.fetch(weights="int4"), local_files_only=True)
    workers = {
        name: Worker(asked.llama_python if kind == "llama" else sys.executable, kind, draft, path, asked.weights)
        for name, (kind, draft) in DECODERS.items()
        if not asked.decoders or name in asked.decoders
    }
    end = [tokenizer.eos_token_id]
    found: dict[str, Any] = {
        "system": {name: worker.system for name, worker in workers.items()}, "memory": {}, "speeds": {}, "ratios": {},
        "to our plain": {}, "all speeds": {},
    }  # fmt: skip
    for kind, prompts in {"chat": CHAT, "copying": COPYING}.items():
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        for prompt in prompts[: asked.prompts]:
            messages = [{"role": "user", "content": prompt}]
            ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
            for repeat in range(asked.repeats + 1):  # the first is a warm-up
                made = {name: worker.decode(ids, asked.tokens, end) for name, worker in workers.items()}
                if repeat and all(len(each["tokens"]) > 8 for each in made.values()):
                    for name, each in made.items():
                        speeds[name].append(speed(each))
                        found["memory"][name] = each["memory"]
        found["speeds"][kind] = {name: statistics.median(values) for name, values in speeds.items()}
        found["all speeds"][kind] = {name: [round(value, 1) for value in values] for name, values in speeds.items()}
        found["ratios"][kind] = ratios(speeds, next(iter(speeds)))
        if PLAIN in speeds:
            found["to our plain"][kind] = ratios(speeds, PLAIN)
    found["first token, s"] = reading(workers, tokenizer.vocab_size, end, asked.repeats)
    return found


def reading(workers: dict[str, Worker], vocabulary: int, end: list[int], repeats: int) -> dict[str, Any]:
    """Let plain decoders take turns at reading prompts that share nothing; return medians, by length and decoder."""
    rng, found = random.Random(0), {}
    for length in LENGTHS:
        seconds: dict[str, list[float]] = {name: [] for name in workers if name in READERS}
        for _ in range(repeats):
            prompt = [rng.randrange(100, vocabulary) for _ in range(length)]
            for name in seconds:
                made = workers[name].decode(prompt, 1, end)
                seconds[name].append(made["times"][0] - made["start"])
        found[str(length)] = {name: statistics.median(values) for name, values in seconds.items()}
    return found


def ratios(speeds: dict[str, list[float]], to: str) -> dict[str, float]:
    """Return each decoder's speed as a multiple of another one's: medians over the turns."""
    return {
        name: statistics.median(a / b for a, b in zip(values, speeds[to], strict=True))
        for name, values in speeds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", default=".venv-llama/bin/python", help="a Python with llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, help="prompts of each kind; default: all")
    parser.add_argument("--decoders", action="append", choices=list(DECODERS), help="default: all")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--draft", default="", help=argparse.SUPPRESS)
    parser.add_argument("--file", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve == "llama":
        return serve_llama(asked.file, asked.draft or None)
    if asked.serve == "ours":
        return serve_ours(asked.draft or None, asked.weights)
    from draftproof.models import bundled

    path = str(bundled.fetch(weights="int4") / "model.gguf")
    found = compare(asked, path)
    asked.out.write_text(json.dumps(found, indent=2) + "\n")
    for kind, speeds in found["speeds"].items():
        for name, value in speeds.items():
            print(f"{kind:8} {name:28} {value:7.1f} tokens/s  {found['ratios'][kind][name]:5.2f} x the first")
    for length, seconds in found["first token, s"].items():
        print(f"{length:>5} tokens read in", ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
    print(json.dumps(found["memory"]), json.dumps(found["system"]))
    return None


if __name__ == "__main__":
    main()
