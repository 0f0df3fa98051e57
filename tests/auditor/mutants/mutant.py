"""Define mutants: decoders with one real defect, and the settings under which an audit must find it."""

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
"""Tokens spent on a mutant that is not expected to be found."""

WARM = SamplingParams()
REPETITIVE = SamplingParams(temperature=0.3)
"""A temperature at which texts repeat themselves, so that copied drafts are often accepted."""


@dataclass(frozen=True)
class Mutant:
    """A decoder with a defect.

    build    makes the decoder
    budget   tokens within which it must be found; None: it is not found, and `because` says why
    ends     the end-of-text tokens; None: those of the target, which in a tiny world are none
    """

    build: Callable[[World], Decoder]
    family: str
    drafts: Literal["model", "lookup"]
    sampling: SamplingParams
    budget: int | None
    because: str = ""
    world: World = field(default_factory=World)
    ends: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.build.__name__

    def examined(self, **options: Any) -> Certificate:
        """Audit the mutant at default settings, apart from `max_tokens` and the world's own."""
        world = self.world
        drafter = world.draft_hf if self.drafts == "model" else "prompt-lookup"
        default = {"sampling": self.sampling, "drafter": drafter, "max_tokens": self.budget or UNFOUND}
        default |= {**world.audit_options, "ends": self.ends}
        with unchecked():
            return audit(self.build(world), world.hf, world.prompts, **{**default, **options})

    @property
    def says(self) -> str:
        """Return what the mutant does wrong: the first line of its builder's docstring."""
        return (self.build.__doc__ or "").strip().split("\n")[0]


MUTANTS: dict[str, Mutant] = {}
"""All mutants by name, in order of definition."""


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
    """Register a function that builds a wrong decoder; the first line of its docstring says what is wrong."""

    def register(build: Callable[[World], Decoder]) -> Callable[[World], Decoder]:
        MUTANTS[build.__name__] = Mutant(build, family, drafts, sampling, budget, because, world or World(), ends)
        return build

    return register
