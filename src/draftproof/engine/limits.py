"""Limit an engine: the rows and tokens that it takes, the memory of its KV pools, and the prompts of a round."""

from dataclasses import dataclass

from draftproof.core.sampling import is_whole


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine.

    max_batch           rows that advance together
    max_length          tokens of a text, prompt included; None: the model's own limit
    kv_memory           memory of the KV pools: bytes, or a share of what is free when the first request comes
    max_prefill_tokens  tokens of prompts that are read in one round, in whole chunks; None: beside rows that are
                        streamed one chunk for each prompt that is being read, 8 at most (or 4 tokens for each row, if
                        that is more), so that their tokens keep coming
    """

    max_batch: int = 8
    max_length: int | None = None
    kv_memory: int | float = 0.25
    max_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_length", "max_prefill_tokens"):
            value = getattr(self, name)
            unlimited = name != "max_batch" and value is None
            if not unlimited and not (is_whole(value) and int(value or 0) >= 1):
                raise ValueError(f"{name} must be a whole number ≥ 1; got {value!r}")
        share = isinstance(self.kv_memory, float) and 0 < self.kv_memory <= 1
        if not share and not (is_whole(self.kv_memory) and self.kv_memory >= 1):
            raise ValueError(
                f"kv_memory must be a number of bytes, or a share of the free memory in (0, 1]; got {self.kv_memory!r}"
            )
