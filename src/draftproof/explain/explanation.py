"""A recorded run put together: the text by where its tokens came from, the rounds, and what was said of each."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftproof.engine.request import Stats
from draftproof.explain.recorder import Candidate, Round
from draftproof.explain.story import about_closing, about_slot
from draftproof.models.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that a terminal or a page shows. `settings` are lines of what was asked, in order."""

    prompt: str
    settings: dict[str, str]
    rounds: list[Round]
    output: list[int]
    stats: Stats
    tokenizer: Tokenizer

    def label(self, token: int) -> str:
        return label(self.tokenizer, token)

    def name(self, token: int) -> str:
        return f"“{visible(self.label(token))}”"

    def as_dict(self) -> dict[str, Any]:
        """For JSON and for the page."""
        said = 0
        rounds = []
        for round_ in self.rounds:
            rounds.append(_round(self, round_, len(self.output) - said))
            said += len(round_.tokens)
        return {
            "prompt": self.prompt,
            "settings": self.settings,
            "summary": {
                "tokens": len(self.output),
                "passes": self.stats.rounds,
                "drafted": self.stats.drafted,
                "accepted": self.stats.accepted,
                "acceptance_rate": self.stats.acceptance_rate,
                "tokens_per_pass": self.stats.tokens_per_pass,
                "mean_acceptance_length": self.stats.mean_acceptance_length,
            },
            "positions": _positions(self.rounds),
            "rounds": rounds,
            "text": list(_pieces(self)),
        }


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token on its own. One that is only part of a character reads as �."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def visible(text: str) -> str:
    """Line breaks and leading blanks, which a sentence or a small box would swallow."""
    return text.replace("\n", "⏎").replace("\t", "⇥")


def _round(explanation: Explanation, round_: Round, room: int) -> dict[str, Any]:
    """`room`: how many of its tokens were said. A text may end inside a round."""
    words, name = explanation.label, explanation.name
    slots = [
        {
            "token": slot.token,
            "label": words(slot.token),
            "p": slot.p,
            "q": slot.q,
            "ratio": slot.ratio,
            "chance": slot.chance,
            "coin": slot.coin,
            "judged": slot.judged,
            "fate": round_.fate(i),
            "drawn": slot.drawn,
            "said": slot.kept and i < room,
            "candidates": _candidates(slot.candidates, words),
            "story": about_slot(round_, i, name)._asdict(),
        }
        for i, slot in enumerate(round_.slots)
    ]
    closing = round_.closing
    return {
        "slots": slots,
        "kept": round_.kept,
        "as_block": round_.as_block,
        "closing": {
            "token": closing.token,
            "label": words(closing.token),
            "p": closing.p,
            "chance": closing.chance,
            "weight": closing.weight,
            "origin": origin(round_),
            "said": round_.kept < room,
            "candidates": _candidates(closing.candidates, words),
            "story": about_closing(round_, name)._asdict(),
        },
    }


def origin(round_: Round) -> str:
    """Where a closing token came from: "plain" without a draft, "residual" after a rejection, else "bonus"."""
    if not round_.slots:
        return "plain"
    return "residual" if round_.closing.after_rejection else "bonus"


def _candidates(candidates: Iterable[Candidate], words: Callable[[int], str]) -> list[dict[str, Any]]:
    return [{"token": c.token, "label": words(c.token), "p": c.p, "q": c.q, "residual": c.residual} for c in candidates]


def _positions(rounds: list[Round]) -> list[dict[str, int]]:
    """For each place in a draft: how often a token stood there, how often it was kept."""
    longest = max((len(r.slots) for r in rounds), default=0)
    return [
        {"drafted": sum(len(r.slots) > i for r in rounds), "kept": sum(r.kept > i for r in rounds)}
        for i in range(longest)
    ]


def _pieces(explanation: Explanation) -> Iterable[dict[str, Any]]:
    """The text, token by token: characters go with the token that completes them, and `slot` -1 closes a round."""
    stream = Detokenizer(explanation.tokenizer)
    places = [
        (r, i if i < round_.kept else -1, token)
        for r, round_ in enumerate(explanation.rounds)
        for i, token in enumerate(round_.tokens)
    ]
    for (r, slot, token), _ in zip(places, explanation.output, strict=False):
        where = "draft" if slot >= 0 else origin(explanation.rounds[r])
        yield {"text": stream.push(token), "label": explanation.label(token), "round": r, "slot": slot, "origin": where}


def write_page(explanation: Explanation, path: Path) -> Path:
    """Write the page, and the folder it stands in where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(explanation), encoding="utf-8")
    return path


def page(explanation: Explanation) -> str:
    parts = {
        "/*STYLE*/": _part("page.css"),
        "/*SCRIPT*/": "\n".join(_part(name) for name in ("drawing.js", "page.js")),
        "/*DATA*/": _embedded(explanation),
    }
    made = _part("page.html")
    for mark, part in parts.items():  # the data come last: what the model said may contain anything
        made = made.replace(mark, part)
    return made


def _part(name: str) -> str:
    return (files("draftproof.explain") / name).read_text(encoding="utf-8")


def _embedded(explanation: Explanation) -> str:
    """JSON that cannot end its script element."""
    return json.dumps(explanation.as_dict(), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
