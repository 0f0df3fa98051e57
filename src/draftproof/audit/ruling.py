"""From evidence to a verdict: when an audit by bets is settled, what it says, and what is missing where it is not."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from draftproof.audit.asked import share_needed
from draftproof.audit.betting import Betting
from draftproof.audit.certificate import Verdict
from draftproof.audit.coverage import rejections_needed
from draftproof.audit.positions import Text
from draftproof.audit.wealth import STRENGTHS, growth_needed

METHOD: Final = "bets on every token"

SUSPENSE: Final = math.log(10.0)
"""The evidence above which nobody is acquitted: an exact decoder gets there one time in ten at most, and an audit that
goes on decides it."""


WHOLE: Final = STRENGTHS[-1]
"""The share at which a defect with a law of its own must be visible: nearly all of it, the largest that is bet."""


NEGLIGIBLE: Final = 0.1
"""A known defect is looked for down to this part of the bias that is asked for: whatever changes fewer tokens than that
would keep an exact decoder waiting for ever."""


def decisive(betting: Betting) -> dict[str, float]:
    """The bets by which a clean audit must have been able to win, and the share of its law that each must have seen."""
    bettor, small = betting.bettor, negligible(betting)
    defects = [name for name in bettor.defects if name not in small]
    return dict.fromkeys(bettor.mixtures, betting.asked.bias) | dict.fromkeys(defects, WHOLE)


def negligible(betting: Betting) -> dict[str, float]:
    """The defects that would have changed too few of these tokens to be looked for, and the share that they change."""
    wealth, least = betting.wealth, NEGLIGIBLE * betting.asked.bias
    shares = dict(zip(wealth.names, (wealth.moved / max(betting.tokens, 1)).tolist(), strict=True))
    return {name: shares[name] for name in betting.bettor.defects if name in shares and shares[name] < least}


def visible(betting: Betting) -> float | None:
    """The smallest mixture with what is drafted that would have been found; None where none would."""
    seen = betting.wealth.visible(betting.alpha)
    shares = [seen.get(name) for name in betting.bettor.mixtures]
    known = [share for share in shares if share is not None]
    return max(known) if len(known) == len(shares) else None


def unseen(betting: Betting) -> list[str]:
    """The decisive bets that would not have found what they are to find."""
    seen = betting.wealth.visible(betting.alpha)
    return [name for name, share in decisive(betting).items() if (seen.get(name) or math.inf) > share]


def covered(betting: Betting) -> bool:
    """Whether enough drafts were rejected for the bias that is asked for."""
    return betting.coverage.rejected >= rejections_needed(betting.asked.bias, betting.alpha)


def known(betting: Betting) -> bool:
    """Whether it is known what was drafted: by a law, which is bet on, or by copying. Drafts drawn from a law that no
    bet knows can be kept far too often and look like nothing."""
    return betting.bettor.copying or betting.bettor.drafter is not None


def settled(betting: Betting) -> bool:
    """Whether more tokens would change nothing: bias was found, or would have been, and nothing points to any."""
    if betting.biased or not known(betting) or not covered(betting) or betting.wealth.log_evidence > SUSPENSE:
        return betting.biased
    return not unseen(betting)


def ruling(betting: Betting) -> tuple[Verdict, str]:
    """The verdict as it stands, and what decides it."""
    if betting.impossible is not None:
        i = betting.impossible
        where = f"impossible token {i.token} at position {i.position} of text {i.text}"
        return "biased", f"{where}: {i.parameter} keeps it out"
    if betting.biased:
        return "biased", f"the bet “{winner(betting)}” won after {betting.found_at:,} tokens"
    if settled(betting):
        return "no bias found", f"no bet won, and a bias of {visible(betting):.3g} would have been seen"
    return "not enough evidence", missing(betting)


def winner(betting: Betting) -> str:
    by_bet = betting.wealth.by_bet()
    return max(by_bet, key=lambda name: by_bet[name])


def missing(betting: Betting) -> str:
    asked, coverage, seen = betting.asked.bias, betting.coverage, visible(betting)
    if coverage.source == "unknown":
        return "how much was drafted is unknown: give a drafter to replay, or a decoder that tells its rounds"
    if not known(betting):
        return "who drafted is unknown: give the drafter, a model or a head, or the name of one that copies"
    if not covered(betting):
        needed = rejections_needed(asked, betting.alpha)
        return f"{coverage.rejected:,.0f} rejections were seen, and a bias of {asked:g} needs {needed:,}"
    if betting.wealth.log_evidence > SUSPENSE:
        evidence = math.exp(betting.wealth.log_evidence)
        return f"the evidence stands at {evidence:.3g}, too much to acquit and too little to convict: resume the audit"
    if betting.unbet > betting.tokens / 2:
        where = f"at {betting.unbet:,} of {betting.tokens:,} positions"
        return f"{where} a cutoff lay within rounding of a token: audit in float32, or without top_k, top_p and min_p"
    if seen is not None and seen <= asked:
        return f"what the bet “{unseen(betting)[0]}” looks for would not have been seen yet"
    smallest = "no bias" if seen is None else f"only a bias of {seen:.3g} or more"
    return f"{smallest} would have been seen, and {asked:g} was asked for"


def more_tokens(betting: Betting) -> int | None:
    """How many more tokens like those seen would settle it; None where it is settled or cannot be told."""
    if settled(betting) or betting.coverage.source == "unknown" or not known(betting) or not betting.tokens:
        return None
    bias, wealth = betting.asked.bias, betting.wealth
    wanted = growth_needed(len(wealth.names), betting.alpha)
    factors = [share_needed(wealth.growth_at(name, share), wanted) for name, share in decisive(betting).items()]
    factors.append(share_needed(betting.coverage.rejected, rejections_needed(bias, betting.alpha)))
    most = max(factors)
    return None if math.isinf(most) or most <= 1 else math.ceil(betting.tokens * (most - 1))


def findings(betting: Betting) -> dict[str, Any]:
    """What a certificate says of an audit by bets."""
    verdict, reason = ruling(betting)
    return {
        "verdict": verdict,
        "reason": reason,
        "method": METHOD,
        "tokens": betting.tokens,
        "texts": betting.texts,
        "coverage": deepcopy(betting.coverage),
        "log_evidence": betting.wealth.log_evidence,
        "bet_alpha": betting.alpha,
        "found_by": winner(betting) if betting.biased and betting.impossible is None else None,
        "found_at": betting.found_at,
        "impossible": betting.impossible,
        "bets": betting.wealth.by_bet(),
        "visible": betting.wealth.visible(betting.alpha),
        "smallest_bias": visible(betting),
        "decisive": decisive(betting),
        "negligible": negligible(betting),
        "more_tokens": more_tokens(betting),
        "unbet": betting.unbet,
        "curve": list(betting.curve),
    }


@dataclass(frozen=True, slots=True)
class ByBets:
    """An audit by bets alone."""

    betting: Betting

    def look(self, texts: Sequence[Text]) -> None:
        self.betting.look(texts)

    def settled(self) -> bool:
        return settled(self.betting)

    def findings(self) -> dict[str, Any]:
        return findings(self.betting)

    def progress(self) -> dict[str, Any]:
        return self.betting.progress()

    def restore(self, kept: dict[str, Any]) -> None:
        self.betting.restore(kept)
