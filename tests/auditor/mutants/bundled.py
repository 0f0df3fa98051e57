"""Mutants of the bundled model: a real vocabulary, with the model's own first layers as the drafter."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from auditor.mutants.mutant import MUTANTS, Mutant
from auditor.mutants.world import World
from draftproof.bench import prompts
from draftproof.core.sampling import SamplingParams
from draftproof.drafters.model import ModelDrafter
from draftproof.models.hf import HFModel
from draftproof.models.tokenizer import encode

LAYERS = 28
"""Layers of the drafter, of the model's 30: drafts are accepted and rejected often enough for a defect to show."""

BUDGETS = {
    "residual_skipped": 2_000,
    "argmax_with_softmax_q": 1_500,
    "min_p_dropped_on_verified_rows": 500,
    "target_at_temperature_one": 1_000,
    "redraws_after_a_mismatch": 6_000,
    "raw_q": 6_000,
}
SAMPLINGS = {"redraws_after_a_mismatch": SamplingParams(temperature=0.8)}
"""Sampling that differs from the tiny worlds': at 0.3 this model copies nearly always or never, and a redraw changes
very little."""


@dataclass(frozen=True)
class Bundled(World):
    """The world of SmolLM2-135M, as the session fixture loads it."""

    model: Any = None
    tokenizer: Any = None

    @property
    def audit_options(self) -> dict[str, Any]:
        return {"batch": 4, "length": 32}

    @property
    def hf(self) -> Any:
        return self.model

    @cached_property
    def target(self) -> HFModel:
        return HFModel(self.model)

    @cached_property
    def draft_hf(self) -> HFModel:  # type: ignore[override]
        return self.target.first_layers(LAYERS)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Return one prompt of each kind in the benchmark."""
        return [encode(p.prompt, self.tokenizer) for p in prompts.pick(prompts.read(), limit=1)]

    def drafter(self, **options: Any) -> ModelDrafter:
        return ModelDrafter(self.draft_hf, vocab_size=self.vocab_size, **options)


def bundled_mutants(model: Any, tokenizer: Any) -> dict[str, Mutant]:
    """Return the mutants of the bundled model, by name."""
    world = Bundled(model.config.vocab_size, model=model, tokenizer=tokenizer)
    mutants = {name: replace(mutant, sampling=SAMPLINGS.get(name, mutant.sampling)) for name, mutant in MUTANTS.items()}
    # the engine of this world ignores end-of-text tokens
    return {name: replace(mutants[name], world=world, budget=budget, ends=()) for name, budget in BUDGETS.items()}
