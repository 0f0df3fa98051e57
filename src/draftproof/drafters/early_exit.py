"""Guess with the target's own first layers: no second model, no further weights, the head and norm of the target.

Its cache is its own: reading the prompt costs these layers twice. A shared one would save that, and would tie the
drafter to the target's rows and to a verify pass that writes every drafted slot again.
"""

from typing import Protocol, runtime_checkable

from draftproof.drafters.model import ModelDrafter
from draftproof.models import Model


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut after a layer."""

    def first_layers(self, count: int) -> Model: ...


def early_exit(target: Model, layers: int, *, confidence: float = 0.0, branches: int = 1) -> ModelDrafter:
    """A drafter of the target's first `layers` layers."""
    if not isinstance(target, Layered):
        raise ValueError(
            f"early-exit:{layers} needs a target with layers to leave early (first_layers), and a "
            f"{type(target).__name__} has none: use another drafter"
        )
    return ModelDrafter(
        target.first_layers(layers), vocab_size=target.vocab_size, confidence=confidence, branches=branches
    )
