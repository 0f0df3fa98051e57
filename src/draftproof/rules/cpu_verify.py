"""Verify the rows of a round on a CPU that are greedy or drawn at a temperature, and nothing else, with compiled loops.

Written with torch, such a round is about a hundred small calls, which take longer than the arithmetic. The loops are in
compiled_rules.py and need numba (`draftproof[cpu]`). A row is served or left to the reference for what it is itself,
never for its neighbours, so that its bits are its own.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import is_cpu
from draftproof.core.draw import CHUNK, LARGE_VOCABULARY, WHOLE_VECTORS
from draftproof.core.rng import Philox
from draftproof.core.types import PAD, Draft

COMPILED_RULES: Final = ("token", "block", "coupled")
"""Rules that are compiled, by name."""

SMALLEST_VOCABULARY: Final = LARGE_VOCABULARY
"""Tokens from which rows are served: for a toy, loading the machine code takes longer than all its rounds."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Verdicts of the rows that were served; what the others have here is not one."""

    tokens: Int[Tensor, "B J"]
    accepted: Int[Tensor, " B"]
    served: list[bool]


@cache
def loops() -> ModuleType | None:
    """Return the compiled loops; None where there is no numba, or torch does not share its threads."""
    if find_spec("numba") is None or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return None
    from draftproof.rules import compiled_rules

    return compiled_rules


def has_compiled(rule: object, draft: Draft, logits: Float[Tensor, "B J V"]) -> bool:
    """Tell whether rows of such logits and drafts can be served: float32 on a CPU, chains, and a rule by name."""
    return (
        isinstance(rule, str)
        and rule in COMPILED_RULES
        and is_cpu(logits.device)
        and logits.shape[-1] >= SMALLEST_VOCABULARY
        and _holds(logits, tuple(logits.shape), torch.float32)
        and draft.parents is None
        and (rule == "coupled" or not draft.shared_rng)
        and _is_well_formed(draft, *logits.shape)
        and loops() is not None
    )


def _is_well_formed(draft: Draft, B: int, J: int, V: int) -> bool:
    """Tell whether the tensors of a draft are what the loops read, which have their addresses alone.

    A drafter may make them in any way; what is wrong with them is for the reference to say.
    """
    places, q = (B, J - 1), draft.q
    numbers = _holds(draft.tokens, places, torch.long) and _holds(draft.lengths, (B,), torch.long)
    if not numbers or q is None:
        return numbers
    R = q.logits.shape[-1]
    return (
        _holds(q.logits, (*places, R), torch.float32)
        and _holds(q.scale, places, torch.float64)
        and _holds(q.lse, places, torch.float64)
        and _holds(q.cutoff, places, torch.float32)
        and _holds(q.point, places, torch.long)
        and (draft.drawn is None or _holds(draft.drawn, places, torch.bool))
        and (R == V if q.vocab is None else _holds(q.vocab.ids, (R,)) and _holds(q.vocab.entry, (V,)))
    )


def _holds(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.long) -> bool:
    """Tell whether a tensor is of this shape and type, in main memory; the last dimension of logits has no gaps."""
    dense = tensor.ndim < 3 or tensor.stride(-1) == 1
    return tensor.shape == shape and tensor.dtype == dtype and tensor.device.type == "cpu" and dense


def verify_rows(
    logits: Float[Tensor, "B J V"], temperatures: Sequence[int | float | None], draft: Draft, rng: Philox, rule: str
) -> Verified:
    """Verify the rows that have a temperature, with the random numbers and the decisions of the reference.

    `temperatures` are those of core/sampling.plain_temperature. Rows with a fault are not served: NaN among their
    scores, a token that q cannot have drawn.
    """
    from draftproof.core.simd import START

    code = loops()
    assert code is not None
    (B, J, V), K = logits.shape, draft.tokens.shape[1]
    threads = min(torch.get_num_threads(), B)  # a row takes 0.1 ms: waiting for another thread may take longer
    R = 0 if draft.q is None else draft.q.logits.shape[-1]
    room = -(-(V + -(-V // CHUNK) + R) // WHOLE_VECTORS) * WHOLE_VECTORS
    served = np.array([t is not None for t in temperatures], dtype=np.int64)
    scales = np.array([1.0 / t if t else 0.0 for t in temperatures])
    out, accepted = torch.full((B, J), PAD), torch.zeros(B, dtype=torch.long)
    peaks, sums, walk = torch.empty(B * J), *torch.empty((2, B * J), dtype=torch.float64)
    tensors = {
        "logits": logits, "tokens": draft.tokens.contiguous(), "lengths": draft.lengths.contiguous(),
        "seeds": rng.seeds.contiguous(), "starts": rng.starts.contiguous(), "peaks": peaks, "totals": sums,
        "walk": walk, "out": out, "accepted": accepted, "scratch": torch.empty(threads * room), **_q_tensors(draft),
    }  # fmt: skip
    numbers = {
        "rows": B, "slots": K, "vocabulary": V, "logit_row": logits.stride(0), "logit_position": logits.stride(1),
        "scales": scales.ctypes.data, "served": served.ctypes.data, "scratch_bytes": 4 * room, **_q_numbers(draft),
        "rule": code.RULES.index("token" if rule == "block" and draft.q is None else rule),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    }  # fmt: skip
    call = np.array([numbers.get(name, 0) for name in code.FIELDS], dtype=np.int64)
    for region in (code.MEASURE, code.DECIDE):
        START(region, call.ctypes.data, threads, 0)
    return Verified(out, accepted, (served != 0).tolist())


def _q_tensors(draft: Draft) -> dict[str, Tensor]:
    """Return the tensors of q that the loops read, by the names of their addresses."""
    q = draft.q
    if q is None:
        return {}
    parts = {"q_scales": q.scale, "q_sums": q.lse, "q_cutoffs": q.cutoff, "q_points": q.point}
    tensors = {"q_logits": q.logits, **{name: part.contiguous() for name, part in parts.items()}}
    if q.vocab is not None:
        tensors |= {"ids": q.vocab.ids.contiguous(), "entry_of": q.vocab.entry.contiguous()}
    return tensors if draft.drawn is None else tensors | {"drawn": draft.drawn.contiguous()}


def _q_numbers(draft: Draft) -> dict[str, int]:
    """Return the sizes and strides of q."""
    if draft.q is None:
        return {}
    logits = draft.q.logits
    return {"has_q": 1, "entries": logits.shape[-1], "q_row": logits.stride(0), "q_slot": logits.stride(1)}
