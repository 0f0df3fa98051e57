"""Where the mutants live: a tiny target, a drafter near it, prompts that repeat themselves, and the real engine."""

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
from draftproof.engine.engine import Engine, Limits
from draftproof.models.hf import HFModel
from draftproof.models.interface import Model
from engine.tiny import llama

V = 64
"""Large enough that a vocabulary is bet on and not enumerated, small enough that a pass costs next to nothing."""

ROWS = 256
"""Requests side by side: the engine's batch."""


@cache
def target(vocab_size: int = V) -> tf.LlamaForCausalLM:
    return llama(vocab_size, max_length=512)


@cache
def draft_model(vocab_size: int = V, *, rng: float = 0.6) -> tf.LlamaForCausalLM:
    """The target with noise in its head: of three drafted tokens about half are kept."""
    model = deepcopy(target(vocab_size))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        head = model.lm_head.weight
        head += torch.randn_like(head) * rng * head.std()
    return model.eval()


@cache
def served(vocab_size: int, which: str) -> HFModel:
    return HFModel((target if which == "target" else draft_model)(vocab_size))


@dataclass(frozen=True)
class World:
    """Everything an engine is made of can be replaced; what is not is the real thing. A round drafts `drafted`."""

    vocab_size: int = V
    drafted: int = 3

    @property
    def asked(self) -> dict[str, Any]:
        """How an audit takes its texts from here: not many at a time, so that it ends soon after it has found one."""
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
        """Short, different, and with something in them to copy. One where the joint distribution is counted: it is of one."""
        count = 1 if self.vocab_size <= 16 else 32
        return [[(7 * i + j) % 64 % self.vocab_size for j in (0, 1, 2, 3, 0, 1, 2, 5, 0, 1)] for i in range(count)]

    def drafter(self, **options: Any) -> ModelDrafter:
        """The production drafter for a draft model."""
        return ModelDrafter(served(self.vocab_size, "drafter"), vocab_size=self.vocab_size, **options)

    def lookup(self) -> PromptLookup:
        """The production drafter that copies."""
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
        """The real engine with one thing replaced."""
        made = kind(
            model or self.target,
            None,
            drafter or self.drafter(),
            rule=rule,
            num_draft_tokens=self.drafted,
            eos=eos,
            limits=Limits(ROWS),
        )
        if dists is not None:
            made._parts = replace(made._parts, dists=dists)
        return made
