"""Audit a decoder by bets: bet on every emitted token against the target's distribution.

Works for any vocabulary, with the decoder as a black box. The error rate holds at any stopping time: an audit may stop
as soon as it has seen enough, continue after that, and be resumed.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch

from draftproof.auditor.bets import Bettor
from draftproof.auditor.certificate import THE_END, Impossible, Verdict, vocabulary
from draftproof.auditor.coverage import Coverage, copies, rejections_needed
from draftproof.auditor.drafter import Drafted
from draftproof.auditor.e_process import STRENGTHS, Wealth, growth_needed
from draftproof.auditor.reference import (
    FILTERING,
    ReferenceModel,
    TargetDistributions,
    filtered,
    in_use,
    tilted,
    without,
)
from draftproof.auditor.settings import AuditRequest, factor_needed
from draftproof.auditor.texts import Positions, Text, within_vocabulary

METHOD: Final = "bets on every token"

SUSPENSE: Final = math.log(10.0)
"""Log evidence above which "no bias found" is withheld: an exact decoder gets there one time in ten at most, and more
tokens decide it."""

WHOLE_DEFECT: Final = STRENGTHS[-1]
"""Share of a known defect's own distribution that must be visible: the largest that is bet, nearly all of it."""

NEGLIGIBLE: Final = 0.1
"""Part of the requested bias: a known defect that would change a smaller share of the tokens is not required to be
visible, as that could take an unbounded number of tokens."""

CURVE_POINTS: Final = 512
"""Points of the evidence curve that are kept at most; beyond that every other one is dropped."""


@dataclass(slots=True)
class Betting:
    """An audit by bets, in progress."""

    reference: ReferenceModel
    bettor: Bettor
    request: AuditRequest
    alpha: float
    texts: int = 0
    tokens: int = 0
    unbet: int = 0
    coverage: Coverage = field(default_factory=Coverage)
    wealth: Wealth = field(default_factory=Wealth)
    curve: list[tuple[int, float]] = field(default_factory=list)
    found_at: int | None = None
    impossible: Impossible | None = None

    def update(self, texts: Sequence[Text]) -> None:
        """Bet on these texts chunk by chunk, and stop when bias is found."""
        if not self.wealth.names:
            self.bettor = replace(self.bettor, traced=any(text.rounds is not None for text in texts))
        known, outside = within_vocabulary(texts, self.reference.vocab_size)
        self.coverage.note(known)
        numbers = [self.texts + i for i, text in enumerate(known) if text.tokens]
        for chunk in self.reference.chunks([text for text in known if text.tokens]):
            if self.biased:
                break
            self._bet(chunk, numbers)
            numbers = numbers[len(chunk) :]
        if outside is not None and not self.biased:  # the tokens before it have been bet on
            where = self.texts + outside.text, outside.position, outside.token
            self.impossible = Impossible(*where, vocabulary(self.reference.vocab_size))
            self.tokens += 1
            self.found_at = self.tokens
        self.texts += len(known)

    def _bet(self, chunk: Sequence[Text], numbers: Sequence[int]) -> None:
        """Bet on one chunk; `numbers` are the numbers of its texts within the audit."""
        positions = Positions.of(chunk)
        dists = self.reference.dists(positions, self.request.sampling)
        drafted = self.bettor.drafted(dists)
        level = -math.log(self.alpha)
        running = self.wealth.play(self.bettor.tickets(dists, drafted), self.bettor.tolerance, level)
        settled = len(running)  # fewer than all positions if a bet won
        self._replay(dists, drafted)
        self._find_impossible(dists, numbers, settled)
        self.tokens += settled
        if float(running[-1]) >= level and self.impossible is None:
            self.found_at = self.tokens
        self.unbet += int((~dists.clear[:settled]).sum())
        self.curve.append((self.tokens, round(float(running[-1]), 4)))
        if len(self.curve) > CURVE_POINTS:
            self.curve = self.curve[1::2]

    def _replay(self, dists: TargetDistributions, drafted: Drafted | None) -> None:
        if self.coverage.source == "trace":
            return
        if drafted is not None:
            self.coverage.replayed(len(dists.p), float((1 - torch.minimum(dists.p, drafted.q).sum(-1)).sum()))
        elif self.bettor.copying:
            self.coverage.replayed(*copies(dists.positions.continuation, dists.positions.token))

    def _find_impossible(self, dists: TargetDistributions, numbers: Sequence[int], settled: int) -> None:
        """Find the first impossible token among the `settled` positions; one after a bet has won decides nothing."""
        positions = dists.positions
        ended = positions.after_end(self.request.ends)
        where = (dists.impossible | ended)[:settled].nonzero()[:, 0]
        if not len(where) or self.impossible is not None:
            return
        n = int(where[0])
        text = numbers[positions.text_of(n)]
        position, token = int(positions.output_index[n]), int(positions.token[n])
        culprit = THE_END if bool(ended[n]) else _culprit(dists, n, self.request)
        self.impossible = Impossible(text, position, token, culprit)
        self.found_at = self.tokens + n + 1

    @property
    def biased(self) -> bool:
        return self.found_at is not None

    def settled(self) -> bool:
        """Return whether the verdict is final: bias was found, or would have been and nothing points to any."""
        if self.biased or not known(self) or not covered(self) or self.wealth.log_evidence > SUSPENSE:
            return self.biased
        return not unseen(self)

    def findings(self) -> dict[str, Any]:
        """Return the fields of a certificate that this method fills."""
        verdict, reason = verdict_of(self)
        return {
            "verdict": verdict,
            "reason": reason,
            "method": METHOD,
            "tokens": self.tokens,
            "texts": self.texts,
            "coverage": deepcopy(self.coverage),
            "log_evidence": self.wealth.log_evidence,
            "bet_alpha": self.alpha,
            "found_by": winner(self) if self.biased and self.impossible is None else None,
            "found_at": self.found_at,
            "impossible": self.impossible,
            "bets": self.wealth.by_bet(),
            "visible": self.wealth.visible(self.alpha),
            "smallest_bias": visible(self),
            "decisive": decisive(self),
            "negligible": negligible(self),
            "more_tokens": more_tokens(self),
            "unbet": self.unbet,
            "curve": list(self.curve),
        }

    def progress(self) -> dict[str, Any]:
        """Return the state that `restore` needs, as JSON can hold it."""
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

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `progress` returned."""
        self.texts, self.tokens, self.unbet = saved["texts"], saved["tokens"], saved["unbet"]
        self.coverage = Coverage(**saved["coverage"])
        self.bettor = replace(self.bettor, traced=saved["traced"])
        numbers = (torch.tensor(saved[name], dtype=torch.float64) for name in ("logs", "growth", "moved"))
        self.wealth = Wealth(tuple(saved["names"]), *numbers)
        self.curve = [(int(n), float(e)) for n, e in saved["curve"]]
        self.found_at = saved["found_at"]
        self.impossible = Impossible(**saved["impossible"]) if saved["impossible"] else None


def decisive(betting: Betting) -> dict[str, float]:
    """Return the bets that must be able to win before "no bias found", and the share that each must be able to find."""
    bettor, small = betting.bettor, negligible(betting)
    defects = [name for name in bettor.defects if name not in small]
    return dict.fromkeys(bettor.mixtures, betting.request.bias) | dict.fromkeys(defects, WHOLE_DEFECT)


def negligible(betting: Betting) -> dict[str, float]:
    """Return the known defects that would change too few tokens to be required, and the share that they change."""
    wealth, least = betting.wealth, NEGLIGIBLE * betting.request.bias
    shares = dict(zip(wealth.names, (wealth.moved / max(betting.tokens, 1)).tolist(), strict=True))
    return {name: shares[name] for name in betting.bettor.defects if name in shares and shares[name] < least}


def visible(betting: Betting) -> float | None:
    """Return the smallest share of a mixture with the drafts that would have been found; None if none would."""
    seen = betting.wealth.visible(betting.alpha)
    shares = [seen.get(name) for name in betting.bettor.mixtures]
    found = [share for share in shares if share is not None]
    return max(found) if len(found) == len(shares) else None


def unseen(betting: Betting) -> list[str]:
    """List the decisive bets that would not yet have found their share."""
    seen = betting.wealth.visible(betting.alpha)
    return [name for name, share in decisive(betting).items() if (seen.get(name) or math.inf) > share]


def covered(betting: Betting) -> bool:
    """Return whether enough drafts were rejected for the requested bias."""
    return betting.coverage.rejected >= rejections_needed(betting.request.bias, betting.alpha)


def known(betting: Betting) -> bool:
    """Return whether the drafter is known: a distribution to bet on, or copying.

    If drafts come from a distribution that no bet uses, keeping them far too often goes unnoticed.
    """
    return betting.bettor.copying or betting.bettor.drafter is not None


def verdict_of(betting: Betting) -> tuple[Verdict, str]:
    """Return the current verdict and the reason for it."""
    if betting.impossible is not None:
        i = betting.impossible
        where = f"impossible token {i.token} at position {i.position} of text {i.text}"
        return "biased", f"{where}: {i.parameter} rules it out"
    if betting.biased:
        return "biased", f"the bet “{winner(betting)}” won after {betting.found_at:,} tokens"
    if betting.settled():
        return "no bias found", f"no bet won, and a bias of {visible(betting):.3g} would have been seen"
    return "not enough evidence", missing(betting)


def winner(betting: Betting) -> str:
    """Return the name of the bet with the most evidence."""
    by_bet = betting.wealth.by_bet()
    return max(by_bet, key=lambda name: by_bet[name])


def missing(betting: Betting) -> str:
    """Say what keeps the verdict at "not enough evidence"."""
    bias, coverage, seen = betting.request.bias, betting.coverage, visible(betting)
    if coverage.source == "unknown":
        return "how much was drafted is unknown: give a drafter to replay, or a decoder that reports its rounds"
    if coverage.source == "trace" and not coverage.drafted:
        return f"nothing was drafted in {coverage.rounds:,} rounds: plain decoding has no drafts that could be verified"
    if not known(betting):
        return "the drafter is unknown: give the draft model, the head, or the name of a drafter that copies"
    if not covered(betting):
        needed = rejections_needed(bias, betting.alpha)
        return f"{coverage.rejected:,.0f} rejections were seen, and a bias of {bias:g} needs {needed:,}"
    if betting.wealth.log_evidence > SUSPENSE:
        evidence = math.exp(betting.wealth.log_evidence)
        return (
            f"the evidence is {evidence:.3g}, too high for “no bias found” and too low for “biased”: resume the audit"
        )
    if betting.unbet > betting.tokens / 2:
        where = f"at {betting.unbet:,} of {betting.tokens:,} positions"
        return f"{where} a cutoff lay within rounding of a token: audit in float32, or without top_k, top_p and min_p"
    if seen is not None and seen <= bias:
        return f"the defect of the bet “{unseen(betting)[0]}” would not have been seen yet"
    smallest = "no bias" if seen is None else f"only a bias of {seen:.3g} or more"
    return f"{smallest} would have been seen, and {bias:g} was asked for"


def more_tokens(betting: Betting) -> int | None:
    """Estimate how many more tokens would settle the audit; None if it is settled or no estimate is possible."""
    if betting.settled() or betting.coverage.source == "unknown" or not known(betting) or not betting.tokens:
        return None
    bias, wealth = betting.request.bias, betting.wealth
    wanted = growth_needed(len(wealth.names), betting.alpha)
    factors = [factor_needed(wealth.growth_at(name, share), wanted) for name, share in decisive(betting).items()]
    factors.append(factor_needed(betting.coverage.rejected, rejections_needed(bias, betting.alpha)))
    most = max(factors)
    return None if math.isinf(most) or most <= 1 else math.ceil(betting.tokens * (most - 1))


def _culprit(dists: TargetDistributions, n: int, request: AuditRequest) -> str:
    """Name the parameter that rules the token out; "the model" if none does."""
    row = tilted(dists.scores, dists.positions, request.sampling)[n : n + 1]
    token = int(dists.positions.token[n])
    for name in in_use(request.sampling):
        if name in FILTERING and bool(filtered(row, without(request.sampling, name))[0, token] > -torch.inf):
            return name
    return "the model"
