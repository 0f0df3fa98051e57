"""A call of the kernels as a value: the tensors, checked at the door."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftproof.core.types import InexactError
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.penalties import Edits

RULES: Final = ("token", "block", "coupled")
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MOST_TOKENS: Final = 262144
MOST_DRAFTED: Final = 32
MOST_REQUESTS: Final = 65535  # of a CUDA grid's second and third axis


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of `verify_rows`; what they mean is said there."""

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
    def B(self) -> int:  # noqa: N802  (a size, as everywhere)
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
        return self.target_logits.ndim == 2

    @property
    def weighs_draft(self) -> bool:
        """Whether the verdict depends on the distribution that the draft was drawn from."""
        return self.draft_logits is not None and self.K > 0 and self.parameters.warm and self.rule != "coupled"

    def check(self) -> None:
        """Refuse what the kernels would get wrong. Looks at shapes and types only: nothing is waited for."""
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
        self._check_handed()

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

    def _check_handed(self) -> None:
        for name in ("draft_lse", "draft_cutoff"):
            given = getattr(self, name)
            if given is not None and given.shape != (self.B, self.K):
                raise ValueError(f"{name} must be [{self.B}, {self.K}]; got {list(given.shape)}")
        if self.draft_lse is not None and self.draft_logits is None:
            raise ValueError("draft_lse needs draft_logits: the residual is drawn from them")


def _check_logits(name: str, logits: Tensor, B: int, rows: int) -> None:
    dense = logits.ndim == 3 and logits.shape[:2] == (B, rows)
    if not dense and logits.ndim != 2:
        raise ValueError(
            f"{name} must be [{B}, {rows}, V], or [N, V] with parameters saying where a request begins; got "
            f"{list(logits.shape)}"
        )
    if logits.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, bfloat16 or float16; got {logits.dtype}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(
            f"{name} must have its vocabulary axis contiguous; got strides {logits.stride()}: pass {name}.contiguous()"
        )


def pack(allowed: Tensor) -> Tensor:
    """A boolean mask [..., V] as packed bits [..., ceil(V / 32)], int32: bit t % 32 of word t // 32 is token t."""
    V = allowed.shape[-1]
    bits = torch.nn.functional.pad(allowed, (0, -V % 32)).unflatten(-1, (-1, 32)).int()
    # the last bit is the sign: as the bits are different ones, sums wrap to just the right word
    words: Tensor = (bits << torch.arange(32, dtype=torch.int32, device=allowed.device)).sum(-1, dtype=torch.int32)
    return words
