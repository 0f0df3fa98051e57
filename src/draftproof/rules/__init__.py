"""Verification rules: decide which draft tokens are accepted and draw the token that follows them.

A rule is a pure function of the target's distributions, a draft and random numbers.
"""

from difflib import get_close_matches
from typing import Any, Final, Protocol, runtime_checkable

from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.types import Draft, Verdict
from draftproof.rules.block import block
from draftproof.rules.coupled import coupled
from draftproof.rules.token import token
from draftproof.rules.tree import tree


@runtime_checkable
class Verifier(Protocol):
    """A verification rule: a function that returns a verdict with exactly the target's distribution.

    p has shape [B, J]. At position 0 it is the distribution after the emitted tokens, at position i + 1 after slot i.
    """

    def __call__(self, p: Distribution, draft: Draft, rng: Philox, /) -> Verdict: ...


RULES: Final[dict[str, Verifier]] = {"token": token, "block": block, "coupled": coupled, "tree": tree}
"""The exact rules by name. Lossy rules have no name and are passed as functions, from `draftproof.rules.lossy`."""


def resolve(rule: Any) -> Verifier:
    """Return the rule of this name; return a function as it is."""
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]
    if isinstance(rule, str) or not callable(rule):
        near = get_close_matches(rule, RULES, 1) if isinstance(rule, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))} or a verifier; got {rule!r}{hint}")
    known: Verifier = rule
    return known
