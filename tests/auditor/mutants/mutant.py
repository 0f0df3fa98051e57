"""What a mutant is: a decoder with one real defect in it, and the settings under which it is to be found."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from auditor.mutants.world import World
from draftproof.auditor.api import audit
from draftproof.auditor.certificate import Certificate
from draftproof.auditor.interface import Decoder
from draftproof.core.sampling import SamplingParams
from engine.many_texts import unchecked

UNFOUND = 20_000
"""Tokens spent on those that are not expected to be found."""

WARM = SamplingParams()
REPETITIVE = SamplingParams(temperature=0.3)
"""Texts that run in circles: copies are often right."""


@dataclass(frozen=True)
class Mutant:
    """`build` makes the decoder. `budget` tokens must do to find it; None: it is not found, and `because` says why."""

    build: Callable[[World], Decoder]
    family: str
    drafts: Literal["model", "lookup"]
    sampling: SamplingParams
    budget: int | None
    because: str = ""
    world: World = field(default_factory=World)
    ends: tuple[int, ...] | None = None
    """The tokens that end a text; None: those of the target, which in a tiny world are none."""

    @property
    def name(self) -> str:
        return self.build.__name__

    def examined(self, **options: Any) -> Certificate:
        """The audit at its default settings, but for where it gives up."""
        world = self.world
        drafter = world.draft_hf if self.drafts == "model" else "prompt-lookup"
        asked = {"sampling": self.sampling, "drafter": drafter, "max_tokens": self.budget or UNFOUND, **world.asked}
        asked["ends"] = self.ends
        with unchecked():
            return audit(self.build(world), world.hf, world.prompts, **{**asked, **options})

    @property
    def says(self) -> str:
        return (self.build.__doc__ or "").strip().split("\n")[0]


MUTANTS: dict[str, Mutant] = {}
"""By name, in the order in which the files define them."""


def mutant(
    family: str,
    *,
    drafts: Literal["model", "lookup"] = "model",
    sampling: SamplingParams = WARM,
    budget: int | None = 6_000,
    because: str = "",
    world: World | None = None,
    ends: tuple[int, ...] | None = None,
) -> Callable[[Callable[[World], Decoder]], Callable[[World], Decoder]]:
    """Enter a function that builds a wrong decoder; its docstring's first line says what is wrong."""

    def enter(build: Callable[[World], Decoder]) -> Callable[[World], Decoder]:
        MUTANTS[build.__name__] = Mutant(build, family, drafts, sampling, budget, because, world or World(), ends)
        return build

    return enter
