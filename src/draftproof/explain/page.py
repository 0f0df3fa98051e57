"""One self-contained page out of an explanation: style, script and data inside, no network."""

import json
from importlib.resources import files
from pathlib import Path

from draftproof.explain.explanation import Explanation


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
