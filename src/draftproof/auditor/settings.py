"""What is asked of an audit, and which texts that means."""

import math
import platform
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from draftproof.auditor.certificate import Certificate
from draftproof.auditor.drafter import as_drafter
from draftproof.auditor.interface import Decoder
from draftproof.auditor.reference import ReferenceModel, in_use
from draftproof.auditor.texts import Text
from draftproof.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """The arguments of an audit that make up its result, the decoder and the models apart.

    Text i continues prompt i modulo their number with seed `seed` + i, in calls of `batch` prompts, up to `length`
    tokens or the first of `ends`.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    alpha: float
    bias: float
    max_tokens: int
    length: int
    batch: int
    seed: int
    method: str
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ValueError(f"prompts must be lists of token ids, none of them empty; got {len(self.prompts)} prompts")
        for name in ("alpha", "bias"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"{name} must lie between 0 and 1; got {value!r}")
        for name in ("max_tokens", "length", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1; got {getattr(self, name)}")

    def texts(self, decoder: Decoder, first: int) -> list[Text]:
        """The next batch of texts, from number `first` on."""
        numbers = range(first, first + self.batch)
        prompts = [self.prompts[i % len(self.prompts)] for i in numbers]
        seeds = [self.seed + i for i in numbers]
        said = decoder.decode(prompts, self.sampling, max_tokens=self.length, seeds=seeds)
        if len(said) != len(prompts):
            raise ValueError(f"the decoder gave {len(said)} samples for {len(prompts)} prompts")
        return [
            Text(prompt, tuple(s.tokens), None if s.rounds is None else tuple(s.rounds))
            for prompt, s in zip(prompts, said, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """As JSON can keep it: `audit(decoder, target, **AuditRequest.from_dict(kept).arguments())` is the same audit."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {"prompts": [list(p) for p in self.prompts], "sampling": sampling_dict(self.sampling)}
        return {**kept, **plain, "ends": list(self.ends)}

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "AuditRequest":
        prompts = tuple(tuple(prompt) for prompt in kept["prompts"])
        made = {"prompts": prompts, "sampling": sampling_of(kept["sampling"]), "ends": tuple(kept["ends"])}
        return cls(**{**kept, **made})

    def arguments(self) -> dict[str, Any]:
        """For `audit`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def sampling_dict(sampling: SamplingParams) -> dict[str, Any]:
    kept = {f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name != "seed"}
    return {**kept, "logit_bias": {str(token): amount for token, amount in sampling.logit_bias.items()}}


def sampling_of(kept: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        **{**kept, "logit_bias": {int(token): amount for token, amount in kept["logit_bias"].items()}}
    )


def share_needed(reached: int | float, wanted: int | float) -> float:
    """How many times what was reached is wanted; at least once."""
    return max(1.0, wanted / reached) if reached > 0 else math.inf


def facts_of(decoder: Decoder, teacher: ReferenceModel, asked: AuditRequest, drafter: Any) -> dict[str, str]:
    """What was examined, and with what."""
    made = {"decoder": str(getattr(decoder, "name", type(decoder).__name__))}
    made |= {str(k): str(v) for k, v in getattr(decoder, "description", {}).items()}
    made |= {f"target {name}": value for name, value in teacher.describe().items()}
    known = as_drafter(drafter)
    if isinstance(known, ReferenceModel):
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


def untested(asked: AuditRequest, drafter: Any) -> list[str]:
    """What no audit like this one can speak of."""
    made = ["other prompts, lengths, batches and sampling parameters"]
    if asked.method != "greedy":
        made.append("a bias that no bet points to, and one that is smaller than what would have been seen")
    if asked.method != "greedy" and drafter is None:
        made.append("mixtures with a distribution that the drafter draws from: none was given")
    if asked.method != "greedy" and isinstance(drafter, str):
        made.append("copied drafts other than what followed the latest longest match")
    if not asked.ends:
        made.append("whether texts stop where they should: no token ends them")
    if asked.method == "bets":
        made.append("positions where a cutoff lies within rounding of a token")
    return made


def check_the_same(resume: Certificate, asked: AuditRequest, facts: dict[str, str]) -> None:
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
