"""Start vLLM with the plug-in on a tiny target, one engine for each process, and switch what is verified how."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from auditor.vllm_models import HEAD_LAYERS, PROMPTS, V, pair, saved, saved_head
from draftproof.auditor.api import audit
from draftproof.auditor.certificate import Certificate
from draftproof.auditor.decoders import maker
from draftproof.auditor.reference import in_use
from draftproof.core.sampling import SamplingParams
from draftproof.integrations.vllm.settings import Settings
from engine.many_texts import unchecked

OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 64,
    "skip_tokenizer_init": True,
    "additional_config": {"draftproof": {"rule": "block"}},
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ngram": ({"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}, {}),
    "suffix": (
        {"method": "custom_class", "model": "draftproof.integrations.vllm.Suffix"},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False},
    ),
    "drawn": ({"method": "draft_model", "draft_sample_method": "probabilistic"}, {}),
    "argmax": ({"method": "draft_model"}, {}),
    "eagle": ({"method": "eagle3", "draft_sample_method": "probabilistic"}, {}),
    "half": ({"method": "eagle3", "draft_sample_method": "probabilistic"}, {}),
}
"""Speculative configs and further options of `LLM`. "half" is an EAGLE-3 head that can draft every second token."""


@dataclass(frozen=True)
class Host:
    """A vLLM engine in this process."""

    kind: str
    decoder: Any
    target: Any
    drafter: Any

    @property
    def llm(self) -> Any:
        return self.decoder.llm

    @cached_property
    def runner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner

    @contextmanager
    def verified_by(self, rule: str | None) -> Iterator[None]:
        """Verify by another rule, or as stock vLLM does (None)."""
        sampler = self.runner.rejection_sampler
        before, sampler.draftproof = sampler.draftproof, None if rule is None else Settings(rule)
        try:
            yield
        finally:
            sampler.draftproof = before

    @contextmanager
    def undrafted(self) -> Iterator[None]:
        """Propose nothing."""
        drafter, batch = self.runner.drafter, self.runner.input_batch
        drafter.propose = lambda *_args, **_more: [[] for _ in range(batch.num_reqs)]
        try:
            yield
        finally:
            del drafter.propose

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Propose nothing and verify as stock vLLM does: its plain sampler draws every token."""
        with self.undrafted(), self.verified_by(None):
            yield

    def examined(self, sampling: SamplingParams, max_tokens: int, decoder: Any = None, **more: Any) -> Certificate:
        """Audit this engine, or a decoder on it, and print the result: `pytest -rP` shows it."""
        options = {"sampling": sampling, "drafter": self.drafter, "max_tokens": max_tokens, "batch": 64, **more}
        with unchecked():
            found = audit(decoder or self.decoder, self.target, PROMPTS, **options)
        used = {name: getattr(sampling, name) for name in in_use(sampling)} or "temperature 1"
        rule = getattr(self.runner.rejection_sampler.draftproof, "rule", "stock")
        print(
            f"AUDIT {self.kind}, {rule}, {used}: {found.verdict} in {found.tokens} tokens with "
            f"{found.coverage.rejected:.0f} rejections; found at {found.found_at}, smallest {found.smallest_bias}"
        )
        return found

    def generate(self, prompts: Sequence[Sequence[int]], parameters: Any) -> list[Any]:
        """Return vLLM's outputs, one for each prompt; `parameters` are vLLM's own, for all or for each."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with unchecked():
            return [each.outputs[0] for each in self.llm.generate(inputs, parameters, use_tqdm=False)]


def start(kind: str, folder: Path, **more: Any) -> Host:
    """Start an engine of this kind; it verifies by the block rule. `more` are further options of `LLM`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    speculation, options = KINDS[kind]
    layers = HEAD_LAYERS if speculation["method"] == "eagle3" else 2
    folders, (target, model) = saved(folder, layers), pair(layers)
    drafter: Any = kind if kind in ("ngram", "suffix") else model
    if speculation["method"] == "draft_model":
        speculation = {**speculation, "model": str(folders[1])}
    elif speculation["method"] == "eagle3":
        ids = range(0, V, 2 if kind == "half" else 1)
        speculation = {**speculation, "model": str(saved_head(folder, ids))}
        drafter = f"eagle3:{speculation['model']}"
    decoder = maker("vllm")(
        str(folders[0]),
        speculative_config={**speculation, "num_speculative_tokens": 3},
        **{**OPTIONS, **options, **more},
    )
    return Host(kind, decoder, target, drafter)
