"""Large and black-box: every token a decoder says is bet on, against the distribution by which the target would have said it.

Valid at any time: it may stop when it has seen enough, go on after that, and be resumed.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch

from draftproof.auditor.bets import Bettor
from draftproof.auditor.certificate import THE_END, Impossible, Verdict
from draftproof.auditor.coverage import Coverage, copies, rejections_needed
from draftproof.auditor.drafter import Drafted
from draftproof.auditor.e_process import STRENGTHS, Wealth, growth_needed
from draftproof.auditor.reference import CUTTING, ReferenceModel, TargetDistributions, cut, in_use, tilted, without
from draftproof.auditor.settings import AuditRequest, share_needed
from draftproof.auditor.texts import Positions, Text

METHOD: Final = "bets on every token"

SUSPENSE: Final = math.log(10.0)
"""The evidence above which nobody is acquitted: an exact decoder gets there one time in ten at most, and an audit that
goes on decides it."""


WHOLE: Final = STRENGTHS[-1]
"""The share at which a defect with a distribution of its own must be visible: nearly all of it, the largest that is bet."""


NEGLIGIBLE: Final = 0.1
"""A known defect is looked for down to this part of the bias that is asked for: whatever changes fewer tokens than that
would keep an exact decoder waiting for ever."""


@dataclass(slots=True)
class Betting:
    """An audit by bets, under way."""

    teacher: ReferenceModel
    bettor: Bettor
    asked: AuditRequest
    alpha: float
    texts: int = 0
    tokens: int = 0
    unbet: int = 0
    coverage: Coverage = field(default_factory=Coverage)
    wealth: Wealth = field(default_factory=Wealth)
    curve: list[tuple[int, float]] = field(default_factory=list)
    found_at: int | None = None
    impossible: Impossible | None = None

    def look(self, texts: Sequence[Text]) -> None:
        """Judge these texts, one table of distributions after the other, and stop where bias is found."""
        if not self.wealth.names:
            self.bettor = replace(self.bettor, traced=any(text.rounds is not None for text in texts))
        self.coverage.note(texts)
        numbers = [self.texts + i for i, text in enumerate(texts) if text.tokens]
        for chunk in self.teacher.chunks([text for text in texts if text.tokens]):
            if self.biased:
                break
            self._judge(chunk, numbers)
            numbers = numbers[len(chunk) :]
        self.texts += len(texts)

    def _judge(self, chunk: Sequence[Text], numbers: Sequence[int]) -> None:
        """`numbers`: which texts of the audit these are."""
        positions = Positions.of(chunk)
        dists = self.teacher.dists(positions, self.asked.sampling)
        drafted = self.bettor.drafted(dists)
        level = -math.log(self.alpha)
        running = self.wealth.play(self.bettor.tickets(dists, drafted), self.bettor.tolerance, level)
        self._replay(dists, drafted)
        self._look_for_the_impossible(dists, numbers)
        self.tokens += len(running)
        if float(running[-1]) >= level and self.impossible is None:
            self.found_at = self.tokens
        self.unbet += int((~dists.clear).sum())
        self.curve.append((self.tokens, round(float(running[-1]), 4)))
        if len(self.curve) > POINTS:
            self.curve = self.curve[1::2]

    def _replay(self, dists: TargetDistributions, drafted: Drafted | None) -> None:
        if self.coverage.source == "trace":
            return
        if drafted is not None:
            self.coverage.replayed(len(dists.p), float((1 - torch.minimum(dists.p, drafted.q).sum(-1)).sum()))
        elif self.bettor.copying:
            self.coverage.replayed(*copies(dists.positions.continuation, dists.positions.token))

    def _look_for_the_impossible(self, dists: TargetDistributions, numbers: Sequence[int]) -> None:
        positions = dists.positions
        over = positions.behind(self.asked.ends)
        where = (dists.impossible | over).nonzero()[:, 0]
        if not len(where) or self.impossible is not None:
            return
        n = int(where[0])
        text = numbers[positions.text_of(n)]
        position, token = int(positions.said[n]), int(positions.token[n])
        culprit = THE_END if bool(over[n]) else _culprit(dists, n, self.asked)
        self.impossible = Impossible(text, position, token, culprit)
        self.found_at = self.tokens + n + 1

    @property
    def biased(self) -> bool:
        return self.found_at is not None

    def progress(self) -> dict[str, Any]:
        """All that is needed to go on, for JSON."""
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "unbet": self.unbet,
            "coverage": asdict(self.coverage),
            "traced": self.bettor.traced,
            "names": list(self.wealth.names),
            "logs": self.wealth.logs.tolist(),
            "growth": self.wealth.growth.tolist(),
            "moved": self.wealth.moved.tolist(),
            "curve": [list(point) for point in self.curve],
            "found_at": self.found_at,
            "impossible": None if self.impossible is None else asdict(self.impossible),
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from there."""
        self.texts, self.tokens, self.unbet = kept["texts"], kept["tokens"], kept["unbet"]
        self.coverage = Coverage(**kept["coverage"])
        self.bettor = replace(self.bettor, traced=kept["traced"])
        numbers = (torch.tensor(kept[name], dtype=torch.float64) for name in ("logs", "growth", "moved"))
        self.wealth = Wealth(tuple(kept["names"]), *numbers)
        self.curve = [(int(n), float(e)) for n, e in kept["curve"]]
        self.found_at = kept["found_at"]
        self.impossible = Impossible(**kept["impossible"]) if kept["impossible"] else None


def decisive(betting: Betting) -> dict[str, float]:
    """The bets by which a clean audit must have been able to win, and the share of its distribution that each must have seen."""
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
    """Whether it is known what was drafted: by a distribution, which is bet on, or by copying. Drafts drawn from a distribution that no
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


POINTS: Final = 512
"""Most points of a curve that is kept."""


def _culprit(dists: TargetDistributions, n: int, asked: AuditRequest) -> str:
    """The parameter without which the token could have come."""
    row = tilted(dists.scores, dists.positions, asked.sampling)[n : n + 1]
    token = int(dists.positions.token[n])
    for name in in_use(asked.sampling):
        if name in CUTTING and bool(cut(row, without(asked.sampling, name))[0, token] > -torch.inf):
            return name
    return "the model"
