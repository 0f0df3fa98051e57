"""Audit every way in which transformers' `generate` speculates that can be run on random weights.

    python benchmarks/audits/transformers_paths.py                       all of them, about half an hour on one core
    python benchmarks/audits/transformers_paths.py gemma4-assistant      one of them
    python benchmarks/audits/transformers_paths.py --list

Models are tiny and random (tiny_models.py), α = 1e-6. "repaired" paths change one thing, which shows that it is the
cause. Results are added to benchmarks/results/audits.json; docs/audits.md is the table.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_models as tiny
import torch
import transformers as tf

import draftproof as dp
from draftproof.auditor.decoders import maker
from draftproof.auditor.decoders.transformers import Generate
from draftproof.auditor.drafter import TranslatedReference
from draftproof.drafters.tli import TLI
from draftproof.models.hf import HFModel
from draftproof.models.vocabulary_overlap import VocabularyOverlap

RESULTS = Path(__file__).parent.parent / "results" / "audits.json"
PLAIN = dp.SamplingParams()
WARM = dp.SamplingParams(temperature=0.8, top_k=12)
COLD = dp.SamplingParams(temperature=0.3)
GREEDY = dp.SamplingParams(temperature=0)


@dataclass(frozen=True)
class AuditedPath:
    """One audit: the decoder under audit, its target, and what the audit is told of its drafts."""

    decoder: Callable[[], Any]
    target: Callable[[], Any]
    sampling: dp.SamplingParams = PLAIN
    drafter: Callable[[], Any] = lambda: None
    prompts: list[list[int]] = field(default_factory=lambda: tiny.PROMPTS)
    max_tokens: int = 100_000
    bias: float = 0.02
    """Smallest bias that must be found; larger where the bets on the drafts need many tokens."""
    around: Callable[[], Any] | None = None
    """Context manager in which the audit runs."""
    batch: int = 128


def universal_drafts() -> TranslatedReference:
    own, other = tiny.two_tokenizers()
    return TranslatedReference(tiny.llama(len(other)), own, other, len(own))


def universal() -> Any:
    own, other = tiny.two_tokenizers()
    return maker("transformers_universal")(tiny.llama(len(own)), tiny.llama(len(other)), own, other)


def ours_over_two_vocabularies() -> dp.Engine:
    own, other = tiny.two_tokenizers()
    overlap = VocabularyOverlap.of(own, other, vocab_size=len(own), draft_vocab_size=len(other))
    drafter = TLI(HFModel(tiny.llama(len(other)), drafter=True), overlap, vocab_size=len(own))
    return dp.load(tiny.llama(len(own)), drafter, num_draft_tokens=5, max_batch=64)


@contextmanager
def vocabulary_in_order() -> Iterator[None]:
    """Repair universal assisted generation: list the words of a tokenizer in the order of their ids."""
    get_vocab = tf.PreTrainedTokenizerFast.get_vocab
    tf.PreTrainedTokenizerFast.get_vocab = lambda own: dict(sorted(get_vocab(own).items(), key=lambda item: item[1]))
    try:
        yield
    finally:
        tf.PreTrainedTokenizerFast.get_vocab = get_vocab


@contextmanager
def drawn_gemma4_drafts() -> Iterator[None]:
    """Repair Gemma 4's assistant: draw each draft token from the softmax of the logits that are declared."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    get_candidates = Generator.get_candidates

    class Drawn(torch.Tensor):
        def argmax(self, dim: int = -1) -> torch.Tensor:  # type: ignore[override]
            rows = self.as_subclass(torch.Tensor).softmax(-1)
            return rows.flatten(0, -2).multinomial(1).view(rows.shape[:-1])

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = self.assistant_model.forward

        def with_drawn_logits(*inner: Any, **more: Any) -> Any:
            outputs = forward(*inner, **more)
            outputs.logits = outputs.logits.as_subclass(Drawn)
            return outputs

        self.assistant_model.forward = with_drawn_logits
        try:
            tokens, logits = get_candidates(self, *args, **kwargs)
            return tokens, None if logits is None else logits.as_subclass(torch.Tensor)
        finally:
            self.assistant_model.forward = forward

    Generator.get_candidates = drawing
    try:
        yield
    finally:
        Generator.get_candidates = get_candidates


def gemma4_decoder() -> Any:
    return maker("transformers_assisted")(*tiny.gemma4())


def assisted() -> Any:
    assistant = tiny.noisy_llama()
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return maker("transformers_assisted")(tiny.llama(), assistant)


def early_exit() -> Generate:
    return Generate(tiny.llama(), "transformers, early exit", {"assistant_early_exit": 1}, {"layers": "1"})


def own_llama() -> Any:
    return tiny.llama(len(tiny.two_tokenizers()[0]))


WORDY: dict[str, Any] = {"target": own_llama, "drafter": universal_drafts, "prompts": tiny.WORD_PROMPTS, "batch": 32}
PATHS: dict[str, AuditedPath] = {
    "plain": AuditedPath(lambda: maker("transformers_plain")(tiny.llama()), tiny.llama, max_tokens=20_000),
    "assisted": AuditedPath(assisted, tiny.llama, PLAIN, tiny.noisy_llama, bias=0.05),
    "assisted-top-k": AuditedPath(assisted, tiny.llama, WARM, tiny.noisy_llama, bias=0.05),
    "assisted-greedy": AuditedPath(assisted, tiny.llama, GREEDY, tiny.noisy_llama, max_tokens=2_000),
    "early-exit": AuditedPath(early_exit, tiny.llama, PLAIN, lambda: HFModel(tiny.llama()).first_layers(1), bias=0.05),
    "prompt-lookup": AuditedPath(
        lambda: maker("transformers_lookup")(tiny.llama()), tiny.llama, COLD, lambda: "prompt-lookup"
    ),
    "universal": AuditedPath(universal, sampling=PLAIN, **WORDY),
    "universal-repaired": AuditedPath(universal, sampling=PLAIN, around=vocabulary_in_order, **WORDY),
    "universal-greedy": AuditedPath(universal, sampling=GREEDY, max_tokens=2_000, **WORDY),
    "gemma4-assistant": AuditedPath(gemma4_decoder, lambda: tiny.gemma4()[0], PLAIN, tiny.gemma4_drafts),
    "gemma4-assistant-repaired": AuditedPath(
        gemma4_decoder,
        lambda: tiny.gemma4()[0],
        PLAIN,
        tiny.gemma4_drafts,
        around=drawn_gemma4_drafts,
        max_tokens=20_000,
    ),
    "gemma4-assistant-greedy": AuditedPath(gemma4_decoder, lambda: tiny.gemma4()[0], GREEDY, max_tokens=2_000),
    "draftproof-tli": AuditedPath(ours_over_two_vocabularies, sampling=PLAIN, **WORDY),
}


def run(name: str, path: AuditedPath) -> dict[str, Any]:
    """Audit one path; return its row of the table."""
    start = time.perf_counter()
    around = contextmanager(lambda: iter([None])) if path.around is None else path.around

    def show(certificate: dp.Certificate) -> None:
        print(f"  {name}: {certificate.tokens:,} tokens, log evidence {certificate.log_evidence:.1f}", flush=True)

    with around():
        found = dp.audit(
            path.decoder(), path.target(), path.prompts, sampling=path.sampling, drafter=path.drafter(), length=16,
            batch=path.batch, max_tokens=path.max_tokens, bias=path.bias, watch=show,
        )  # fmt: skip
    return {
        "verdict": found.verdict,
        "reason": found.reason,
        "tokens": found.found_at or found.tokens,
        "found_by": found.found_by,
        "smallest_bias": found.smallest_bias,
        "asked_for": path.bias,
        "drafted": found.coverage.drafted,
        "accepted": found.coverage.kept,
        "rejected": found.coverage.rejected,
        "sampling": found.tested["sampling"],
        "decoder": found.tested["decoder"],
        "versions": {"transformers": tf.__version__, "torch": torch.__version__},
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="names of paths; default: all")
    parser.add_argument("--list", action="store_true", help="list the names and exit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(PATHS))
        return
    for name in options.paths or PATHS:
        row = run(name, PATHS[name])
        print(f"{name}: {row['verdict']} ({row['reason']})", flush=True)
        results = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps(results | {name: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
