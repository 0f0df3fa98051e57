"""What is asked of an audit, and which texts that means."""

import math
from dataclasses import dataclass, fields
from typing import Any

from draftproof.audit.decoder import Decoder
from draftproof.audit.positions import Text
from draftproof.core.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of an audit that make up its result, the decoder and the models apart.

    Text i continues prompt i modulo their number with seed `seed` + i, in calls of `batch` prompts, up to `length`
    tokens or the first of `ends`.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
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
        """As JSON can keep it: `audit(decoder, target, **Asked.from_dict(kept).arguments())` is the same audit."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {"prompts": [list(p) for p in self.prompts], "sampling": sampling_dict(self.sampling)}
        return {**kept, **plain, "ends": list(self.ends)}

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "Asked":
        prompts = tuple(tuple(prompt) for prompt in kept["prompts"])
        made = {"prompts": prompts, "sampling": sampling_of(kept["sampling"]), "ends": tuple(kept["ends"])}
        return cls(**{**kept, **made})

    def arguments(self) -> dict[str, Any]:
        """For `audit`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def sampling_dict(sampling: Sampling) -> dict[str, Any]:
    kept = {f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name != "seed"}
    return {**kept, "logit_bias": {str(token): amount for token, amount in sampling.logit_bias.items()}}


def sampling_of(kept: dict[str, Any]) -> Sampling:
    return Sampling(**{**kept, "logit_bias": {int(token): amount for token, amount in kept["logit_bias"].items()}})


def share_needed(reached: int | float, wanted: int | float) -> float:
    """How many times what was reached is wanted; at least once."""
    return max(1.0, wanted / reached) if reached > 0 else math.inf
