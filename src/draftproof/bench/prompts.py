"""The prompts of a benchmark: six kinds of our own text, or a file of yours."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Prompt:
    """`kind` is what results are grouped by."""

    id: str
    kind: str
    prompt: str


def read(path: Path | None = None) -> list[Prompt]:
    """A JSON-lines file of objects with "id", "kind" and "prompt"; without a path, our own."""
    source = files("draftproof.bench") / "prompts.jsonl" if path is None else path
    found = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(Prompt(**json.loads(line)))
        except (ValueError, TypeError):
            raise ValueError(f'{source}, line {number}: wanted {{"id": …, "kind": …, "prompt": …}}') from None
    if not found or len({prompt.id for prompt in found}) < len(found):
        raise ValueError(f"{source} must hold prompts, each with an id of its own")
    return found


def pick(prompts: list[Prompt], kinds: Collection[str] = (), limit: int | None = None) -> list[Prompt]:
    """Those of these kinds (all, if none is named), at most `limit` of each."""
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    wrong = [kind for kind in kinds if kind not in known]
    if wrong:
        raise ValueError(f"there are no prompts of kind {wrong[0]!r}; kinds are {', '.join(known)}")
    chosen = [[p for p in prompts if p.kind == kind][:limit] for kind in known if not kinds or kind in kinds]
    return [prompt for group in chosen for prompt in group]
