"""What a bet that wins speaks for, in words."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "toward the drafter's law": "drafts are kept too often, or tokens come from the drafter",
        "toward what both hold likely": "after a rejection the target is drawn from and not the residual",
        "away from the drafter's law": "drafts are kept too rarely, or the residual closes rounds that kept all",
        "toward the drafter's first choice, judged as drawn": "drafts are argmaxes, and are judged as if drawn",
        "toward the drafter's first choice": "likely drafts are kept too often",
        "away from the drafter's first choice": "good drafts are thrown away",
        "toward later tokens after a rejection": "the coin that rejected a draft also draws its replacement",
        "toward drafts judged by their raw law": "q is the drafter's law without the sampling parameters",
        "toward copied text, judged twice": "after a mismatch the token is drawn once more",
        "toward copied text": "copied drafts are kept too often",
        "away from copied text": "copied drafts are kept too rarely",
        "toward a flatter law": "the temperature is too high or not applied",
        "toward a sharper law": "the temperature is too low, or applied twice",
        "toward the likeliest token": "some tokens are greedy",
        "away from the likeliest token": "the likeliest token loses mass",
        "away from the tail beyond 24 bits": "the noise has too few bits to reach rare tokens",
        "toward what was said before": "a penalty is ignored, or drafts repeat the text",
        "away from what was said before": "a penalty is applied twice",
        "toward the last token again": "a token is emitted twice: a wrong rollback",
        "with penalties a round late": "penalties do not count the drafted tokens before a position",
    }
)


def hint(bet: str) -> str:
    """What a bet that wins speaks for; empty where its name says all."""
    return next((text for name, text in HINTS.items() if bet.startswith(name)), "")
