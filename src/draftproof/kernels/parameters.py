"""Hold the sampling parameters of a batch as two device tensors: prepared once, updated in place every round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.core.sampling import SamplingParams

FLOATS: Final = ("temperature", "top_p", "min_p", "draft_temperature", "draft_top_p", "draft_min_p")
INTS: Final = ("seeds", "positions", "lengths", "top_k", "draft_top_k", "target_rows", "draft_rows", "spare")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Sampling parameters, one line per request.

    A column is read and written by its name: `parameters["positions"].add_(accepted + 1)`.

    floats    temperature (0: greedy), top_p (1: off), min_p (0: off), and the three that the draft was drawn with
    ints      seeds; positions, the index of the first token the round emits; lengths of the drafts; top_k (0: off)
              and the draft's; target_rows and draft_rows, where a request's logits begin: its index in the batch, or
              its first row if the logits are ragged
    filtered  whether any request, or its draft, may have top_k, top_p or min_p on: False saves two kernels
    warm      whether any request may have a temperature above 0: False saves all of the draft's rows, and all sums
    nucleus   whether any request, or its draft, may have top_p without top_k: False saves three kernels
    """

    floats: Float[Tensor, "B 6"]
    ints: Int[Tensor, "B 8"]
    filtered: bool = True
    warm: bool = True
    nucleus: bool = True

    def __len__(self) -> int:
        return len(self.floats)

    def __getitem__(self, column: str) -> Tensor:
        """Return a view of one column."""
        if column in FLOATS:
            return self.floats[:, FLOATS.index(column)]
        if column in INTS:
            return self.ints[:, INTS.index(column)]
        raise KeyError(f"{column!r} is not a column; choose one of {', '.join(FLOATS + INTS[:-1])}")

    @classmethod
    def empty(cls, B: int, device: torch.device | str, *, filtered: bool = True) -> "Parameters":
        """Return B plain requests: temperature 1, no filters, drafts of length 0, seeds and positions 0."""
        plain = to_device([1.0, 1.0, 0.0] * 2, torch.device(device), torch.float64)
        rows = cls(plain.repeat(B, 1), torch.zeros((B, len(INTS)), dtype=torch.int64, device=device), filtered)
        rows["target_rows"].copy_(torch.arange(B, device=device))
        rows["draft_rows"].copy_(torch.arange(B, device=device))
        return rows

    @classmethod
    def of(
        cls,
        samplings: Sequence[SamplingParams],
        draft_samplings: Sequence[SamplingParams],
        *,
        seeds: Int[Tensor, " B"],
        positions: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"],
    ) -> "Parameters":
        """Build from `SamplingParams` objects, on the device of `lengths`. Bias and penalties are `Edits`."""
        B, device = len(samplings), lengths.device
        if len(draft_samplings) != B:
            raise ValueError(
                f"draft_samplings must be one for each of {B} rows, like samplings; got {len(draft_samplings)}"
            )
        for name, column in (("seeds", seeds), ("positions", positions), ("lengths", lengths)):
            if column.shape != (B,):
                raise ValueError(f"{name} must be [{B}], one for each row; got {list(column.shape)}")
        both = list(zip(samplings, draft_samplings, strict=True))
        floats = [[float(x) for s in pair for x in (s.temperature, s.top_p, s.min_p)] for pair in both]
        ints = [[*(s.top_k or 0 for s in pair), b, b, 0] for b, pair in enumerate(both)]
        per_round = torch.stack(
            [column.to(device, torch.long, non_blocking=True) for column in (seeds, positions, lengths)]
        )
        return cls(
            to_device(floats, device, torch.float64).view(B, len(FLOATS)),
            torch.cat([per_round.T, to_device(ints, device).view(B, len(INTS) - len(per_round))], 1),
            filtered=any(filters(s) for pair in both for s in pair),
            warm=any(s.temperature > 0 for s in samplings),
            nucleus=any(filters(s) and s.top_p < 1 and s.top_k is None for pair in both for s in pair),
        )


def filters(sampling: SamplingParams) -> bool:
    """Return whether a request removes tokens by a filter; a greedy one never does."""
    on = sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0
    return on and sampling.temperature > 0
