"""Put a recorded run together: its text by origin of each token, its rounds and their stories; as JSON or as a page."""

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
    """A recorded run, ready to be shown. `settings` are the options of the run, in order of display."""

    prompt: str
    settings: dict[str, str]
    rounds: list[Round]
    output: list[int]
    stats: Stats
    tokenizer: Tokenizer

    def label(self, token: int) -> str:
        return label(self.tokenizer, token)

    def name(self, token: int) -> str:
        """Return a token as it is quoted in a sentence."""
        return f"“{visible(self.label(token))}”"

    def as_dict(self) -> dict[str, Any]:
        """Return the data of the page and of `explain --json`."""
        emitted = 0
        rounds = []
        for round_ in self.rounds:
            rounds.append(_round(self, round_, len(self.output) - emitted))
            emitted += len(round_.tokens)
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


def write_page(explanation: Explanation, path: Path) -> Path:
    """Write the page to a file, creating its folder if necessary, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(explanation), encoding="utf-8")
    return path


def page(explanation: Explanation) -> str:
    """Return the explanation as one self-contained HTML page."""
    parts = {
        "/*STYLE*/": "\n".join(_part(name) for name in ("look.css", "page.css")),
        "/*SCRIPT*/": "\n".join(_part(name) for name in ("drawing.js", "page.js")),
        "/*DATA*/": _embedded_json(explanation),
    }
    html = _part("page.html")
    for mark, part in parts.items():  # the data come last: generated text may contain the other marks
        html = html.replace(mark, part)
    return html


def _part(name: str) -> str:
    return (files("draftproof.explain") / name).read_text(encoding="utf-8")


def _embedded_json(explanation: Explanation) -> str:
    """Return the data as JSON without "<", so that it cannot end its script element."""
    return json.dumps(explanation.as_dict(), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def label(tokenizer: Tokenizer, token: int) -> str:
    """Decode one token by itself. A token that is only part of a character gives �."""
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def visible(text: str) -> str:
    """Replace line breaks and tabs, which would not show inside a line, by symbols."""
    return text.replace("\n", "⏎").replace("\t", "⇥")


def origin(round_: Round) -> str:
    """Return the origin of a round's last token: "plain" if nothing was drafted, else "residual" or "bonus"."""
    if not round_.slots:
        return "plain"
    return "residual" if round_.closing.after_rejection else "bonus"


def _round(explanation: Explanation, round_: Round, emitted: int) -> dict[str, Any]:
    """Return the data of a round of which `emitted` tokens are part of the text, which may end inside a round."""
    text_of, name = explanation.label, explanation.name
    slots = [
        {
            "token": slot.token,
            "label": text_of(slot.token),
            "p": slot.p,
            "q": slot.q,
            "ratio": slot.ratio,
            "chance": slot.chance,
            "coin": slot.coin,
            "judged": slot.judged,
            "fate": round_.fate(i),
            "drawn": slot.drawn,
            "said": slot.kept and i < emitted,
            "candidates": _candidates(slot.candidates, text_of),
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
            "label": text_of(closing.token),
            "p": closing.p,
            "chance": closing.chance,
            "weight": closing.weight,
            "origin": origin(round_),
            "said": round_.kept < emitted,
            "candidates": _candidates(closing.candidates, text_of),
            "story": about_closing(round_, name)._asdict(),
        },
    }


def _candidates(candidates: Iterable[Candidate], text_of: Callable[[int], str]) -> list[dict[str, Any]]:
    return [
        {"token": c.token, "label": text_of(c.token), "p": c.p, "q": c.q, "residual": c.residual} for c in candidates
    ]


def _positions(rounds: list[Round]) -> list[dict[str, int]]:
    """Count, for each position of a draft, the tokens drafted there and those kept."""
    longest = max((len(r.slots) for r in rounds), default=0)
    return [
        {"drafted": sum(len(r.slots) > i for r in rounds), "kept": sum(r.kept > i for r in rounds)}
        for i in range(longest)
    ]


def _pieces(explanation: Explanation) -> Iterable[dict[str, Any]]:
    """Yield the text token by token. A character belongs to the token that completes it; slot -1 is the last token."""
    stream = Detokenizer(explanation.tokenizer)
    tokens = [
        (r, i if i < round_.kept else -1, token)
        for r, round_ in enumerate(explanation.rounds)
        for i, token in enumerate(round_.tokens)
    ]
    for (r, slot, token), _ in zip(tokens, explanation.output, strict=False):
        source = "draft" if slot >= 0 else origin(explanation.rounds[r])
        text = stream.push(token)
        yield {"text": text, "label": explanation.label(token), "round": r, "slot": slot, "origin": source}
