"""What an audit examines: anything that continues prompts with randomness it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round


@runtime_checkable
class Sample(Protocol):
    """What one request came to."""

    @property
    def tokens(self) -> Sequence[int]:
        """The emitted tokens only; an end-of-text token too, if one was emitted."""

    @property
    def rounds(self) -> Sequence[Round] | None:
        """What each round drafted and kept, in order; None where the decoder gives no trace. The last round may have
        been cut by the end of the text."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A sample, for decoders that have no type of their own."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...] | None = None


@runtime_checkable
class Decoder(Protocol):
    """Continues prompts. It may also have `name`, a string, and `description`, a dict of strings: what a certificate
    says was examined."""

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> Sequence[Sample]:
        """Continue each prompt (token ids) under `sampling`; seeds[i] is the randomness of prompt i."""
