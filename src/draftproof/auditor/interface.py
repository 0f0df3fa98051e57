"""Protocols for what an audit examines: a decoder that continues prompts from given seeds, and its samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Round


@runtime_checkable
class Decoder(Protocol):
    """A decoder under audit: continues prompts with the seeds it is given.

    It may also have `name`, a string, and `description`, a dict of strings; a certificate lists both.
    """

    def decode(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, max_tokens: int, seeds: Sequence[int]
    ) -> "Sequence[Sample]":
        """Continue each prompt (token ids) under `sampling`; seeds[i] is the randomness of prompt i."""


@runtime_checkable
class Sample(Protocol):
    """The continuation of one prompt."""

    @property
    def tokens(self) -> Sequence[int]:
        """Return the emitted tokens only, with the end-of-text token if one was emitted."""

    @property
    def rounds(self) -> Sequence[Round] | None:
        """Return how many tokens each round drafted and accepted, in order; None if the decoder keeps no trace.

        The end of the text may have cut the last round short.
        """


@dataclass(frozen=True, slots=True)
class Decoded:
    """A `Sample` for decoders that have no type of their own."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...] | None = None
