"""The same defects in the bundled model: its own first layers draft, and the vocabulary is a real one."""

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
"""Of 30: kept often enough to matter, and rejected often enough to err."""

BUDGETS = {
    "residual_skipped": 2_000,
    "argmax_with_softmax_q": 1_500,
    "min_p_dropped_on_verified_rows": 500,
    "target_at_temperature_one": 1_000,
    "redraws_after_a_mismatch": 6_000,
    "raw_q": 6_000,
}
SAMPLINGS = {"redraws_after_a_mismatch": SamplingParams(temperature=0.8)}
"""In place of the tiny worlds': at 0.3 this model copies nearly always or never, and a redraw changes very little."""


@dataclass(frozen=True)
class Bundled(World):
    """SmolLM2-135M, as the fixture of the test session loads it."""

    model: Any = None
    words: Any = None

    @property
    def asked(self) -> dict[str, Any]:
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
        """One of each kind that the bench has."""
        return [encode(p.prompt, self.words) for p in prompts.pick(prompts.read(), limit=1)]

    def drafter(self, **options: Any) -> ModelDrafter:
        return ModelDrafter(self.draft_hf, vocab_size=self.vocab_size, **options)


def bundled_mutants(model: Any, words: Any) -> dict[str, Mutant]:
    world = Bundled(model.config.vocab_size, model=model, words=words)
    mutants = {name: replace(mutant, sampling=SAMPLINGS.get(name, mutant.sampling)) for name, mutant in MUTANTS.items()}
    # an engine of this world goes on behind an end token
    return {name: replace(mutants[name], world=world, budget=budget, ends=()) for name, budget in BUDGETS.items()}
