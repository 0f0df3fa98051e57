"""Verification: which draft tokens stand, and what follows them. Pure functions of laws, draft and noise."""

from typing import Final, Protocol, runtime_checkable

from draftproof.core.law import Law
from draftproof.core.noise import Noise
from draftproof.core.types import Draft, Verdict
from draftproof.verify.block import block
from draftproof.verify.coupled import coupled
from draftproof.verify.token import token
from draftproof.verify.tree import tree


@runtime_checkable
class Verifier(Protocol):
    """Maps the target's laws, a draft and noise to a verdict whose law is the target's own, exactly.

    p has shape [B, J]: its law at position 0 follows what the row has emitted, at position i + 1 it follows slot i.
    """

    def __call__(self, p: Law, draft: Draft, noise: Noise, /) -> Verdict: ...


RULES: Final[dict[str, Verifier]] = {"token": token, "block": block, "coupled": coupled, "tree": tree}
"""The exact rules by name. Lossy ones have no name: who wants one passes it, from `draftproof.verify.lossy`."""


def resolve(rule: str | Verifier) -> Verifier:
    """The rule of this name, or the rule itself."""
    if not isinstance(rule, str):
        return rule
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))} or a verifier; got {rule!r}")
    return RULES[rule]
