"""Define a request's sampling parameters, and warp logits by them into a distribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.distribution import Distribution, DraftVocab
from draftproof.core.filters import filter_stats
from draftproof.core.penalties import edited, edited_without_sync
from draftproof.core.types import PAD, Draft, History

if TYPE_CHECKING:
    Number = int | float
    Whole = int
else:  # numpy's scalars are taken too, and become Python's
    Number, Whole = Real, Integral

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy, as in vLLM: float32 logits of ordinary size are coarser than such a temperature,
so that its distribution would be the rounding of the logits."""


class FrozenBias(dict[int, float]):
    """A logit bias that cannot be changed, so that sampling parameters can be hashed, copied and pickled."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("logit_bias cannot be changed: make new sampling parameters with dataclasses.replace")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type["FrozenBias"], tuple[dict[int, float]]]:
        return FrozenBias, (dict(self),)


NO_BIAS: Final = FrozenBias()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request, under the names and definitions the field uses.

    temperature         0 is greedy: the most likely token, the first one if several are equal; so is what is below 1e-5
    top_k               only the k most likely tokens; None is off
    top_p               only the most likely tokens that together reach this mass; 1 is off
    min_p               only tokens at least this fraction as likely as the most likely one; 0 is off
    repetition_penalty  divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off
    presence_penalty    subtracted from the logits of tokens seen in the output; 0 is off
    frequency_penalty   subtracted once for each time a token was seen in the output; 0 is off
    logit_bias          added to the logits of these tokens
    seed                makes the request reproducible; None picks a random one
    """

    temperature: Number = 1.0
    top_k: Whole | None = None
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Mapping[Whole, Number] = field(default_factory=lambda: NO_BIAS)
    seed: Whole | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", 0.0, math.inf, "0 is greedy")
        if self.top_k is not None and (not is_whole(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k must be None (off) or a whole number ≥ 1; got {self.top_k!r}")
        self._check_number("top_p", 0.0, 1.0, "1 is off", above=True)
        self._check_number("min_p", 0.0, 1.0, "0 is off")
        self._check_number("repetition_penalty", 0.0, math.inf, "1 is off", above=True)
        self._check_number("presence_penalty", -math.inf, math.inf, "0 is off")
        self._check_number("frequency_penalty", -math.inf, math.inf, "0 is off")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, such as {{42: -5.0}}; got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            if not is_whole(token) or token < 0 or not _real(bias) or math.isnan(bias) or bias == math.inf:
                raise ValueError(
                    f"logit_bias maps token ids ≥ 0 to numbers below infinity; got {{{token!r}: {bias!r}}}"
                )
        if self.seed is not None and (not is_whole(self.seed) or not -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed must be None or a whole number of 64 bits; got {self.seed!r}")
        self._normalise()

    def _normalise(self) -> None:
        """Replace numpy scalars by Python's, a tiny temperature by 0 and a mapping by one that cannot be changed."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        bias = {int(token): float(value) for token, value in values.pop("logit_bias").items()}
        plain = {name: _python_number(value) for name, value in values.items()}
        if plain["temperature"] < GREEDY_BELOW:
            plain["temperature"] = 0.0
        for name, value in {**plain, "logit_bias": FrozenBias(bias) if bias else NO_BIAS}.items():
            object.__setattr__(self, name, value)

    def _check_number(self, name: str, low: float, high: float, hint: str, *, above: bool = False) -> None:
        value = getattr(self, name)
        number = _real(value) and math.isfinite(value)
        if not number or not low <= value <= high or (above and value == low):
            left = f"({low:g}" if above or low == -math.inf else f"[{low:g}"
            right = f"{high:g})" if high == math.inf else f"{high:g}]"
            raise ValueError(f"{name} must be a number in {left}, {right} ({hint}); got {value!r}")

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on the tokens seen before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def neutral(self) -> bool:
        """Whether the distribution is the model's own softmax. The seed does not matter."""
        return all(getattr(self, f.name) == getattr(_NEUTRAL, f.name) for f in fields(self) if f.name != "seed")


def is_whole(value: object) -> bool:
    """Tell whether a value is an integer, of Python or numpy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _python_number(value: Any) -> Any:
    if value is None or type(value) in (int, float):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


_NEUTRAL = SamplingParams()


def only_temperature(sampling: SamplingParams) -> bool:
    """Return whether a row is drawn at a temperature, and nothing else changes its distribution."""
    unfiltered = sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0
    return sampling.temperature > 0 and unfiltered and not sampling.penalises and not sampling.logit_bias


def plain_temperature(sampling: SamplingParams) -> int | float | None:
    """Return the temperature of a row if nothing else changes its distribution, 0 if it is greedy; None otherwise."""
    if sampling.temperature == 0:
        return None if sampling.penalises or sampling.logit_bias else 0.0
    return sampling.temperature if only_temperature(sampling) else None


def any_edits(samplings: Sequence[SamplingParams]) -> bool:
    """Tell whether any of these rows has a bias or a penalty."""
    return any(s.penalises or s.logit_bias for s in samplings)


def warp(
    logits: Float[Tensor, "B J R"],
    samplings: Sequence[SamplingParams],
    history: Sequence[History] | None = None,
    draft: Draft | None = None,
    allowed: Bool[Tensor, "B J R"] | None = None,
    vocab: DraftVocab | None = None,
) -> Distribution:
    """Return the distributions from which plain decoding would draw at every scored position.

    In transformers' order: bias; penalties, at every position with the draft tokens before it counted as seen (at a
    tree node: its ancestors); the allowed tokens; temperature; top-k; top-p on what top-k left; min-p. Ties at a cutoff
    are kept. Position 0 follows the history, position i + 1 follows draft slot i.

    Logits are not copied if no row has a bias, a penalty or a mask.
    """
    if len(samplings) != len(logits):
        raise ValueError(f"samplings must have one entry a row: {len(logits)} rows, {len(samplings)} samplings")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point; got {logits.dtype}")
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if any_edits(samplings):
        logits = edited(logits, samplings, history, draft, vocab)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    filters = {(s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings}
    if len(filters) == 1:  # the usual batch: all rows at once
        parts = filter_stats(logits.flatten(0, 1), *filters.pop())
        scale, cutoff, lse, point = (part.unflatten(0, logits.shape[:2]) for part in parts)
    else:
        each = [
            filter_stats(x, s.temperature, s.top_k, s.top_p, s.min_p) for x, s in zip(logits, samplings, strict=True)
        ]
        scale, cutoff, lse, point = (torch.stack(parts) for parts in zip(*each, strict=True))
    if vocab is not None:
        point = torch.where(point >= 0, vocab.ids[point.clamp_min(0)], point)
    plain = all(s.temperature > 0 and s.top_k is None and s.top_p == 1 and s.min_p == 0 for s in samplings)
    if plain and is_cpu(point.device):
        plain = not bool((point != PAD).any())  # rows too coarse for their temperature are point masses
    return Distribution(logits, scale, cutoff, lse, point, vocab, plain)


def warp_without_sync(
    logits: Float[Tensor, "B J R"],
    samplings: Sequence[SamplingParams],
    histories: Sequence[History] | None,
    vocab: DraftVocab | None = None,
    draft: Draft | None = None,
    allowed: Bool[Tensor, "B J R"] | None = None,
) -> Distribution:
    """Warp logits without a sync; on a GPU bias and penalties use dense counts. Reference: `warp`."""
    if is_cpu(logits.device) or not any_edits(samplings):
        return warp(logits, samplings, histories, draft, allowed, vocab)
    histories = [History([], [])] * len(samplings) if histories is None else histories
    return warp(
        edited_without_sync(logits, samplings, histories, vocab, draft),
        unedited(samplings),
        allowed=allowed,
        vocab=vocab,
    )


def unedited(samplings: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Return the parameters without bias and penalties, for logits that include them already."""
    return [
        replace(s, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=NO_BIAS)
        for s in samplings
    ]
