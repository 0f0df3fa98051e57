"""Verification: which draft tokens stand, and what follows them. Pure functions of distributions, draft and noise."""

from typing import Final, Protocol, runtime_checkable

from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.types import Draft, Verdict
from draftproof.rules.block import block
from draftproof.rules.coupled import coupled
from draftproof.rules.token import token
from draftproof.rules.tree import tree


@runtime_checkable
class Verifier(Protocol):
    """Maps the target's distributions, a draft and noise to a verdict whose distribution is the target's own, exactly.

    p has shape [B, J]: its distribution at position 0 follows what the row has emitted, at position i + 1 it follows slot i.
    """

    def __call__(self, p: Distribution, draft: Draft, rng: Philox, /) -> Verdict: ...


RULES: Final[dict[str, Verifier]] = {"token": token, "block": block, "coupled": coupled, "tree": tree}
"""The exact rules by name. Lossy ones have no name: who wants one passes it, from `draftproof.rules.lossy`."""


def resolve(rule: str | Verifier) -> Verifier:
    """The rule of this name, or the rule itself."""
    if not isinstance(rule, str):
        return rule
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))} or a verifier; got {rule!r}")
    return RULES[rule]
