"""Read the prompts of a benchmark: the six kinds that come with this package, or a file of yours."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a benchmark; results are grouped by `kind`."""

    id: str
    kind: str
    prompt: str


def read(path: Path | None = None) -> list[Prompt]:
    """Read a JSON-lines file of objects with "id", "kind" and "prompt"; without a path, the package's own."""
    source = files("draftproof.bench") / "prompts.jsonl" if path is None else path
    prompts = []
    for number, line in enumerate(source.read_bytes().split(b"\n"), 1):  # not splitlines: JSON may contain U+2028
        if not line.strip():
            continue
        try:
            prompt = Prompt(**json.loads(line.decode("utf-8")))
            prompt.prompt.encode("utf-8")  # refuses a lone surrogate, which a tokenizer would not name
        except (ValueError, TypeError, AttributeError):
            raise ValueError(
                f'{source}, line {number}: wanted {{"id": …, "kind": …, "prompt": …}} with texts in valid UTF-8'
            ) from None
        prompts.append(prompt)
    if not prompts or len({prompt.id for prompt in prompts}) < len(prompts):
        raise ValueError(f"{source} must hold prompts, each with a different id")
    return prompts


def pick(prompts: list[Prompt], kinds: Collection[str] = (), limit: int | None = None) -> list[Prompt]:
    """Return the prompts of these kinds (all, if none is named), at most `limit` of each."""
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise ValueError(f"there are no prompts of kind {unknown[0]!r}; kinds are {', '.join(known)}")
    groups = [[p for p in prompts if p.kind == kind][:limit] for kind in known if not kinds or kind in kinds]
    return [prompt for group in groups for prompt in group]
