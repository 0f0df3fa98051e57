"""Build the mutants' engines: a tiny target, a drafter near it, repetitive prompts, and the real engine."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers as tf

from draftproof.drafters.interface import Drafter
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.engine.engine import Engine
from draftproof.engine.limits import Limits
from draftproof.models.hf import HFModel
from draftproof.models.interface import Model
from engine.tiny import llama

V = 64
"""Vocabulary size: large enough for an audit by bets, small enough for a cheap forward pass."""

ROWS = 256
"""The engine's batch size."""


@cache
def target(vocab_size: int = V) -> tf.LlamaForCausalLM:
    return llama(vocab_size, max_length=512)


@cache
def draft_model(vocab_size: int = V, *, noise: float = 0.6) -> tf.LlamaForCausalLM:
    """Return the target with Gaussian noise in its output layer: about half of three draft tokens are accepted."""
    model = deepcopy(target(vocab_size))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        head = model.lm_head.weight
        head += torch.randn_like(head) * noise * head.std()
    return model.eval()


@cache
def served(vocab_size: int, which: str) -> HFModel:
    return HFModel((target if which == "target" else draft_model)(vocab_size))


@dataclass(frozen=True)
class World:
    """A tiny target and drafter, and engines of them with one part replaced; a round drafts `drafted` tokens."""

    vocab_size: int = V
    drafted: int = 3

    @property
    def audit_options(self) -> dict[str, Any]:
        """Return options for `audit`: small batches, so that it ends soon after bias is found."""
        return {"batch": 128}

    @property
    def hf(self) -> tf.LlamaForCausalLM:
        return target(self.vocab_size)

    @property
    def draft_hf(self) -> tf.LlamaForCausalLM:
        return draft_model(self.vocab_size)

    @property
    def target(self) -> HFModel:
        return served(self.vocab_size, "target")

    @property
    def prompts(self) -> list[list[int]]:
        """Return short, different prompts with something to copy; only one if the joint distribution is counted."""
        count = 1 if self.vocab_size <= 16 else 32
        return [[(7 * i + j) % 64 % self.vocab_size for j in (0, 1, 2, 3, 0, 1, 2, 5, 0, 1)] for i in range(count)]

    def drafter(self, **options: Any) -> ModelDrafter:
        """Return the production drafter for a draft model."""
        return ModelDrafter(served(self.vocab_size, "drafter"), vocab_size=self.vocab_size, **options)

    def lookup(self) -> PromptLookup:
        """Return the production drafter that copies."""
        return PromptLookup()

    def engine(
        self,
        *,
        drafter: Drafter | None = None,
        rule: Any = "token",
        model: Model | None = None,
        dists: Any = None,
        eos: Sequence[int] = (),
        kind: type[Engine] = Engine,
    ) -> Engine:
        """Build the real engine with any of these parts replaced."""
        engine = kind(
            model or self.target,
            None,
            drafter or self.drafter(),
            rule=rule,
            num_draft_tokens=self.drafted,
            eos=eos,
            limits=Limits(ROWS),
        )
        if dists is not None:
            engine._parts = replace(engine._parts, targets=dists)
        return engine
