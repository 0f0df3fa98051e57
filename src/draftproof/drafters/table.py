"""Drafters by name."""

from collections.abc import Callable
from typing import Final

from draftproof.drafters import Drafter
from draftproof.drafters.early_exit import early_exit
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import Suffix
from draftproof.models import Model

EARLY_EXIT: Final = "early-exit"


def _prompt_lookup(branches: int) -> Drafter:
    if branches > 1:
        raise ValueError(f'"prompt-lookup" copies one text; for branches={branches} take "ngram", "suffix" or a model')
    return PromptLookup()


DRAFTERS: Final[dict[str, Callable[[int], Drafter]]] = {
    "ngram": lambda branches: NGram(branches=branches, fillers=4),
    "prompt-lookup": _prompt_lookup,
    "suffix": lambda branches: Suffix(branches=branches),
}
"""Those that need no model, made for a number of branches. "early-exit:n" is made of the target."""


def is_name(spec: str) -> bool:
    """Is this one of our names? What is not may still be the name of a model."""
    return spec in DRAFTERS or spec.partition(":")[0] == EARLY_EXIT


def resolve(spec: object, target: Model | None = None, *, branches: int = 1) -> Drafter | None:
    """The drafter of this name, or the drafter itself; None is none. `branches` is for those made here.

    `spec` is what a user wrote, so anything may come; what is neither a name, a Drafter nor None is refused.
    """
    if spec is None:
        return None
    if not isinstance(spec, str):
        if not isinstance(spec, Drafter):
            raise ValueError(f"drafter must have a method propose(contexts, k, noise); {type(spec).__name__} has none")
        return spec
    if spec in DRAFTERS:
        return DRAFTERS[spec](branches)
    name, _, layers = spec.partition(":")
    if name != EARLY_EXIT:
        names = ", ".join(f'"{known}"' for known in (*DRAFTERS, f"{EARLY_EXIT}:n"))
        raise ValueError(f"drafter must be one of {names}, None or a Drafter; got {spec!r}")
    if not layers.isdecimal():
        raise ValueError(f'drafter "{EARLY_EXIT}:n" wants a number of layers, as in "{EARLY_EXIT}:6"; got {spec!r}')
    if target is None:
        raise ValueError(f"drafter {spec!r} is made of the target's own layers: pass the target")
    return early_exit(target, int(layers), branches=branches)
