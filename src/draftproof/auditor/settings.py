"""Hold the arguments of an audit, get its texts from the decoder, and describe it for the certificate."""

import math
import operator
import platform
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from draftproof.auditor.certificate import Certificate
from draftproof.auditor.drafter import as_drafter
from draftproof.auditor.interface import Decoder, Sample
from draftproof.auditor.reference import ReferenceModel, in_use
from draftproof.auditor.texts import Text
from draftproof.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """The arguments that determine an audit's result, apart from the decoder and the models; `audit` has checked them.

    Text i continues prompt i mod len(prompts) with seed `seed` + i, in calls of `batch` prompts, up to `length`
    tokens or the first token in `ends`.
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

    def texts(self, decoder: Decoder, first: int) -> list[Text]:
        """Ask the decoder for the next batch of texts; `first` is the number of the first one."""
        numbers = range(first, first + self.batch)
        prompts = [self.prompts[i % len(self.prompts)] for i in numbers]
        seeds = [self.seed + i for i in numbers]
        samples = decoder.decode(prompts, self.sampling, max_tokens=self.length, seeds=seeds)
        if len(samples) != len(prompts):
            raise ValueError(f"the decoder gave {len(samples)} samples for {len(prompts)} prompts")
        return [_text(first + i, *pair) for i, pair in enumerate(zip(prompts, samples, strict=True))]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can hold.

        `audit(decoder, target, **AuditRequest.from_dict(saved).arguments())` repeats the audit.
        """
        plain = {"prompts": [list(p) for p in self.prompts], "sampling": sampling_dict(self.sampling)}
        return {**self.arguments(), **plain, "ends": list(self.ends)}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "AuditRequest":
        """Restore a request that `as_dict` saved."""
        prompts = tuple(tuple(prompt) for prompt in saved["prompts"])
        parsed = {"prompts": prompts, "sampling": sampling_from_dict(saved["sampling"]), "ends": tuple(saved["ends"])}
        return cls(**{**saved, **parsed})

    def arguments(self) -> dict[str, Any]:
        """Return the fields as keyword arguments of `audit`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _text(number: int, prompt: tuple[int, ...], sample: Sample) -> Text:
    """Return what the decoder emitted; refuse a sample whose tokens are not whole numbers."""
    if not isinstance(sample, Sample):
        raise ValueError(
            f"text {number}: the decoder must return samples with `tokens` and `rounds`, such as Decoded(tokens); got "
            f"a {type(sample).__name__}"
        )
    try:
        tokens = tuple(map(operator.index, sample.tokens))
    except TypeError as error:
        raise ValueError(f"text {number}: the decoder's tokens must be whole numbers ({error})") from error
    return Text(prompt, tokens, None if sample.rounds is None else tuple(sample.rounds))


def sampling_dict(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters, without the seed, as a dict that JSON can hold."""
    plain = {f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name != "seed"}
    return {**plain, "logit_bias": {str(token): amount for token, amount in sampling.logit_bias.items()}}


def sampling_from_dict(saved: dict[str, Any]) -> SamplingParams:
    """Restore the parameters that `sampling_dict` saved."""
    logit_bias = {int(token): amount for token, amount in saved["logit_bias"].items()}
    return SamplingParams(**{**saved, "logit_bias": logit_bias})


def factor_needed(reached: int | float, wanted: int | float) -> float:
    """Return the factor by which `reached` must grow to be `wanted`; at least 1."""
    return max(1.0, wanted / reached) if reached > 0 else math.inf


def facts_of(decoder: Decoder, reference: ReferenceModel, request: AuditRequest, drafter: Any) -> dict[str, str]:
    """Describe the decoder, the models, the settings and the versions, for the certificate."""
    facts = {"decoder": str(getattr(decoder, "name", type(decoder).__name__))}
    facts |= {str(k): str(v) for k, v in getattr(decoder, "description", {}).items()}
    facts |= {f"target {name}": value for name, value in reference.describe().items()}
    replayed = as_drafter(drafter)
    if isinstance(replayed, ReferenceModel):
        facts |= {f"drafter {name}": value for name, value in replayed.describe().items()}
    parameters = sampling_dict(request.sampling)
    facts["sampling"] = (
        ", ".join(f"{name}={parameters[name]}" for name in in_use(request.sampling)) or "temperature=1.0"
    )
    facts["seeds"] = f"from {request.seed} on, one a text"
    facts["prompts"] = f"{len(request.prompts)}, up to {request.length} tokens after each, {request.batch} at a time"
    facts["ends"] = ", ".join(map(str, request.ends)) or "none"
    tolerance, charge = reference.tolerance(request.sampling), reference.payoff_error(request.sampling)
    facts["tolerance"] = f"{tolerance:g} of a probability" + (f", {charge:g} of a payoff" if charge < tolerance else "")
    facts["versions"] = ", ".join(f"{name} {_version(name)}" for name in ("draftproof", "torch", "transformers"))
    facts["python"] = platform.python_version()
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def untested(request: AuditRequest, drafter: Any) -> list[str]:
    """List what this audit cannot show, for the certificate."""
    lines = ["other prompts, lengths, batches and sampling parameters"]
    if request.method != "greedy":
        lines.append("a bias that no bet points to, and one that is smaller than what would have been seen")
    if request.method != "greedy" and drafter is None:
        lines.append("mixtures with a distribution that the drafter draws from: none was given")
    if request.method != "greedy" and isinstance(drafter, str):
        lines.append("copied drafts other than what followed the latest longest match")
    if not request.ends:
        lines.append("whether texts stop where they should: no token ends them")
    if request.method == "bets":
        lines.append("positions where a cutoff lies within rounding of a token")
    return lines


def check_the_same(resume: Certificate, request: AuditRequest, facts: dict[str, str]) -> None:
    """Refuse to resume a certificate of other models or other arguments; only max_tokens may differ."""
    before, now = dict(resume.asked), request.as_dict()
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
