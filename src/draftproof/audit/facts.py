"""What an audit examined and what it left out, in words; and whether two audits are the same one."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from draftproof.audit.asked import Asked, sampling_dict
from draftproof.audit.certificate import Certificate
from draftproof.audit.decoder import Decoder
from draftproof.audit.drafted import as_drafter
from draftproof.audit.processors import in_use
from draftproof.audit.teacher import Teacher


def facts_of(decoder: Decoder, teacher: Teacher, asked: Asked, drafter: Any) -> dict[str, str]:
    """What was examined, and with what."""
    made = {"decoder": str(getattr(decoder, "name", type(decoder).__name__))}
    made |= {str(k): str(v) for k, v in getattr(decoder, "description", {}).items()}
    made |= {f"target {name}": value for name, value in teacher.describe().items()}
    known = as_drafter(drafter)
    if isinstance(known, Teacher):
        made |= {f"drafter {name}": value for name, value in known.describe().items()}
    shown = sampling_dict(asked.sampling)
    made["sampling"] = ", ".join(f"{name}={shown[name]}" for name in in_use(asked.sampling)) or "temperature=1.0"
    made["seeds"] = f"from {asked.seed} on, one a text"
    made["prompts"] = f"{len(asked.prompts)}, up to {asked.length} tokens after each, {asked.batch} at a time"
    made["ends"] = ", ".join(map(str, asked.ends)) or "none"
    made["tolerance"] = f"{teacher.tolerance(asked.sampling):g} of a probability"
    made["versions"] = ", ".join(f"{name} {_version(name)}" for name in ("draftproof", "torch", "transformers"))
    made["python"] = platform.python_version()
    return made


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def untested(asked: Asked, drafter: Any) -> list[str]:
    """What no audit like this one can speak of."""
    made = ["other prompts, lengths, batches and sampling parameters"]
    if asked.method != "greedy":
        made.append("a bias that no bet points to, and one that is smaller than what would have been seen")
    if asked.method != "greedy" and drafter is None:
        made.append("mixtures with a law that the drafter draws from: none was given")
    if asked.method != "greedy" and isinstance(drafter, str):
        made.append("copied drafts other than what followed the latest longest match")
    if not asked.ends:
        made.append("whether texts stop where they should: no token ends them")
    if asked.method == "bets":
        made.append("positions where a cutoff lies within rounding of a token")
    return made


def check_the_same(resume: Certificate, asked: Asked, facts: dict[str, str]) -> None:
    """Refuse to go on with a certificate of other models or other arguments; only max_tokens may differ."""
    before, now = dict(resume.asked), asked.as_dict()
    changed = [name for name in now if name != "max_tokens" and before.get(name) != now[name]]
    changed += [
        name for name in facts if name.startswith(("target", "drafter")) and facts[name] != resume.tested.get(name)
    ]
    if changed:
        name = changed[0]
        raise ValueError(
            f"the certificate to resume is of another audit: {name} was "
            f"{before.get(name, resume.tested.get(name))!r:.80}, now {now.get(name, facts.get(name))!r:.80}"
        )
