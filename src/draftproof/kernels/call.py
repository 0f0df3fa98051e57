"""Hold the arguments of one kernel call, and check them by shape and dtype."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftproof.core.device import runs_kernels
from draftproof.core.types import InexactError
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.penalties import Edits

RULES: Final = ("token", "block", "coupled")
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MOST_TOKENS: Final = 262144
"""Tokens in a vocabulary: 512 chunks, the most that kernels hold side by side (`compile.CHUNK_LIMITS`)."""

MOST_DRAFTED: Final = 32
"""Draft tokens of a request, whose rows kernels hold side by side."""

MOST_REQUESTS: Final = 65535
"""Requests in a call: the limit of a CUDA grid's second and third axis."""


def serves(target_logits: Tensor, draft_tokens: Tensor, rule: object, draft_logits: Tensor | None = None) -> bool:
    """Return whether the kernels can take this call: a device they run on, and within their limits."""
    K, V = draft_tokens.shape[-1], target_logits.shape[-1]
    within = rule in RULES and K <= MOST_DRAFTED and 0 < V <= MOST_TOKENS and len(draft_tokens) <= MOST_REQUESTS
    readable = all(
        logits.dtype in DTYPES and (logits.stride(-1) == 1 or logits.shape[-1] == 1)
        for logits in (target_logits, draft_logits)
        if logits is not None
    )
    return within and readable and runs_kernels(target_logits.device)


def draws_from(logits: Tensor) -> bool:
    """Return whether the kernels can draw from rows [B, R] like these: device and limits."""
    within = len(logits) <= MOST_REQUESTS and 0 < logits.shape[-1] <= MOST_TOKENS and logits.dtype in DTYPES
    return within and (logits.stride(-1) == 1 or logits.shape[-1] == 1) and runs_kernels(logits.device)


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of `verify_rows`, documented there."""

    target_logits: Tensor
    draft_tokens: Tensor
    draft_logits: Tensor | None
    parameters: Parameters
    rule: str
    edits: Edits | None = None
    allowed: Tensor | None = None
    draft_entries: Tensor | None = None
    draft_lse: Tensor | None = None
    draft_cutoff: Tensor | None = None

    @property
    def B(self) -> int:  # noqa: N802  (sizes are capital letters)
        return self.draft_tokens.shape[0]

    @property
    def K(self) -> int:  # noqa: N802
        return self.draft_tokens.shape[1]

    @property
    def V(self) -> int:  # noqa: N802
        return self.target_logits.shape[-1]

    @property
    def R(self) -> int:  # noqa: N802
        return self.V if self.draft_logits is None else self.draft_logits.shape[-1]

    @property
    def ragged(self) -> bool:
        """Return whether target rows are stored [N, V], with each request's first row in the parameters."""
        return self.target_logits.ndim == 2

    @property
    def weighs_draft(self) -> bool:
        """Return whether the verdict depends on the distribution that the draft was drawn from."""
        return self.draft_logits is not None and self.K > 0 and self.parameters.warm and self.rule != "coupled"

    def check(self) -> None:
        """Refuse arguments that the kernels would get wrong, by shapes and dtypes only, without a device sync."""
        if self.rule not in RULES:
            raise InexactError(f"the kernels know the rules {', '.join(RULES)}; got {self.rule!r}")
        tokens = self.draft_tokens
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or not tokens.is_contiguous():
            raise ValueError(
                f"draft_tokens must be int64 [B, K] and contiguous; got {tokens.dtype} {list(tokens.shape)} with "
                f"strides {tokens.stride()}"
            )
        if self.K > MOST_DRAFTED or not 0 < self.V <= MOST_TOKENS:
            raise ValueError(
                f"K must be at most {MOST_DRAFTED} and V at most {MOST_TOKENS}; got K={self.K}, V={self.V}"
            )
        if self.B > MOST_REQUESTS:
            raise ValueError(f"at most {MOST_REQUESTS} requests fit a call; got {self.B}: make several")
        if len(self.parameters) != self.B:
            raise ValueError(f"parameters must be of {self.B} requests, like draft_tokens; got {len(self.parameters)}")
        _check_logits("target_logits", self.target_logits, self.B, self.K + 1)
        if self.draft_logits is not None:
            _check_logits("draft_logits", self.draft_logits, self.B, self.K)
        self._check_vocabulary()
        self._check_allowed()
        self._check_draft_stats()

    def _check_vocabulary(self) -> None:
        if self.draft_entries is None and self.R != self.V:
            raise ValueError(
                f"draft_logits are over {self.R} tokens, target_logits over {self.V}: pass draft_entries, for each of "
                "the target's tokens its entry in draft_logits, -1 where it has none (DraftVocab.entry)"
            )
        if self.draft_entries is not None and self.draft_entries.shape != (self.V,):
            raise ValueError(f"draft_entries must be [{self.V}]; got {list(self.draft_entries.shape)}")

    def _check_allowed(self) -> None:
        bits = self.allowed
        if bits is None:
            return
        words = -(-self.V // 32)
        if bits.dtype != torch.int32 or bits.shape[-1] < words or bits.ndim != self.target_logits.ndim:
            raise ValueError(
                f"allowed must be packed bits, int32, like target_logits but with {words} words in the last axis "
                f"(see pack); got {bits.dtype} {list(bits.shape)}"
            )

    def _check_draft_stats(self) -> None:
        for name in ("draft_lse", "draft_cutoff"):
            value = getattr(self, name)
            if value is not None and value.shape != (self.B, self.K):
                raise ValueError(f"{name} must be [{self.B}, {self.K}]; got {list(value.shape)}")
        if self.draft_lse is not None and self.draft_logits is None:
            raise ValueError("draft_lse needs draft_logits: the residual is drawn from them")


def _check_logits(name: str, logits: Tensor, B: int, rows: int) -> None:
    """Refuse logits that the kernels cannot read."""
    dense = logits.ndim == 3 and logits.shape[:2] == (B, rows)
    if not dense and logits.ndim != 2:
        raise ValueError(
            f"{name} must be [{B}, {rows}, V], or [N, V] with each request's first row in parameters; got "
            f"{list(logits.shape)}"
        )
    if logits.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16; got {logits.dtype}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(
            f"{name} must have its vocabulary axis contiguous; got strides {logits.stride()}: pass {name}.contiguous()"
        )


def pack(allowed: Tensor) -> Tensor:
    """Pack a boolean mask [..., V] into int32 words [..., ceil(V / 32)]: bit t % 32 of word t // 32 is token t."""
    V = allowed.shape[-1]
    bits = torch.nn.functional.pad(allowed, (0, -V % 32)).unflatten(-1, (-1, 32)).int()
    # bit 31 is the sign bit: as all bits are distinct, the wrapping sum is the word
    words: Tensor = (bits << torch.arange(32, dtype=torch.int32, device=allowed.device)).sum(-1, dtype=torch.int32)
    return words
