"""Large and black-box: every token a decoder says is bet on, against the law by which the target would have said it.

Valid at any time: it may stop when it has seen enough, go on after that, and be resumed.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch

from draftproof.audit.asked import Asked
from draftproof.audit.bets import Bettor
from draftproof.audit.certificate import THE_END, Impossible
from draftproof.audit.coverage import Coverage, copies
from draftproof.audit.drafted import Drafted
from draftproof.audit.positions import Positions, Text
from draftproof.audit.processors import CUTTING, cut, in_use, tilted, without
from draftproof.audit.teacher import Laws, Teacher
from draftproof.audit.wealth import Wealth

POINTS: Final = 512
"""Most points of a curve that is kept."""


@dataclass(slots=True)
class Betting:
    """An audit by bets, under way."""

    teacher: Teacher
    bettor: Bettor
    asked: Asked
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
        """Judge these texts, one table of laws after the other, and stop where bias is found."""
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
        laws = self.teacher.laws(positions, self.asked.sampling)
        drafted = self.bettor.drafted(laws)
        level = -math.log(self.alpha)
        running = self.wealth.play(self.bettor.tickets(laws, drafted), self.bettor.tolerance, level)
        self._replay(laws, drafted)
        self._look_for_the_impossible(laws, numbers)
        self.tokens += len(running)
        if float(running[-1]) >= level and self.impossible is None:
            self.found_at = self.tokens
        self.unbet += int((~laws.clear).sum())
        self.curve.append((self.tokens, round(float(running[-1]), 4)))
        if len(self.curve) > POINTS:
            self.curve = self.curve[1::2]

    def _replay(self, laws: Laws, drafted: Drafted | None) -> None:
        if self.coverage.source == "trace":
            return
        if drafted is not None:
            self.coverage.replayed(len(laws.p), float((1 - torch.minimum(laws.p, drafted.q).sum(-1)).sum()))
        elif self.bettor.copying:
            self.coverage.replayed(*copies(laws.positions.continuation, laws.positions.token))

    def _look_for_the_impossible(self, laws: Laws, numbers: Sequence[int]) -> None:
        positions = laws.positions
        over = positions.behind(self.asked.ends)
        where = (laws.impossible | over).nonzero()[:, 0]
        if not len(where) or self.impossible is not None:
            return
        n = int(where[0])
        text = numbers[positions.text_of(n)]
        position, token = int(positions.said[n]), int(positions.token[n])
        culprit = THE_END if bool(over[n]) else _culprit(laws, n, self.asked)
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


def _culprit(laws: Laws, n: int, asked: Asked) -> str:
    """The parameter without which the token could have come."""
    row = tilted(laws.scores, laws.positions, asked.sampling)[n : n + 1]
    token = int(laws.positions.token[n])
    for name in in_use(asked.sampling):
        if name in CUTTING and bool(cut(row, without(asked.sampling, name))[0, token] > -torch.inf):
            return name
    return "the model"
