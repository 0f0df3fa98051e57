"""Draft with a model on a GPU while the host is elsewhere: lengths, tokens and random numbers stay on the device.

The tokens and distributions are those of `ModelDrafter.propose`.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import to_device
from draftproof.core.distribution import DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft
from draftproof.drafters.build import Spine
from draftproof.drafters.sample import KernelDraws
from draftproof.models.device_rows import DeviceRows


class Texts(NamedTuple):
    """Where the texts of a round end, on the device.

    starts   first slot of each row in the drafter's pool
    lengths  tokens of each text
    last     the last two tokens of each text
    behind   how many of them a draft model has not read; 0 for a row that has ended
    """

    starts: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    last: Int[Tensor, "B 2"]
    behind: Int[Tensor, " B"]


@runtime_checkable
class DrafterPart(Protocol):
    """A drafter's part of rounds that stay on the device: `DeviceDrafting` of a draft model, `HeadDrafting` of a head.

    vocab   the drafter's vocabulary, if it is not the target's
    layers  the target's layers whose states it reads
    """

    vocab: DraftVocab | None
    layers: tuple[int, ...]

    def is_current(self) -> bool:
        """Return whether the drafter still has the pool that this part uses: another engine may have opened its own."""
        ...

    def load(self, samplings: Sequence[SamplingParams], seeds: Int[Tensor, " B"]) -> Hashable:
        """Copy to the device how rows are drawn for; return what a recording depends on besides its sizes."""

    def draft(self, K: int, texts: Texts, most: Int[Tensor, " B"], traits: Hashable, *, shared: bool) -> Draft:
        """Draw up to most[b] ≤ K tokens for each row, without a sync, so that it can be captured."""

    def read(
        self,
        hidden: tuple[Float[Tensor, "B T H"], ...],
        tokens: Int[Tensor, "B T"],
        texts: Texts,
        counts: Int[Tensor, " B"],
    ) -> None:
        """Read what a round that drafted added to texts: counts[b] tokens of row b.

        hidden  the target's states after `layers`, from each text's last token on
        texts   as they were before
        """

    def seat(self, source: Int[Tensor, " B"], fresh: Sequence[int]) -> None:
        """Arrange rows anew: row b was at source[b], -1 if it is new; those at `fresh` were given places just now."""

    def hand_back(self, requests: Sequence[int]) -> None:
        """Give the drafter back what it needs to go on without the device, for the requests in the rows' order."""


class DeviceDraws:
    """How tokens are drawn for up to `rows` rows, in memory that never moves."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._parameters = kernels.Parameters.empty(rows, device)
        self._scales = torch.ones(rows, dtype=torch.float64, device=device)
        self._greedy = torch.zeros(rows, dtype=torch.bool, device=device)

    def load(self, samplings: Sequence[SamplingParams], seeds: Int[Tensor, " B"]) -> Hashable:
        """Copy to the device how rows are drawn for; return what a recording depends on besides its sizes."""
        B, device, greedy = len(samplings), seeds.device, [s.temperature == 0 for s in samplings]
        nothing = torch.zeros_like(seeds)
        made = kernels.Parameters.of(samplings, samplings, seeds=seeds, positions=nothing, lengths=nothing)
        self._parameters.floats[:B].copy_(made.floats)
        self._parameters.ints[:B].copy_(made.ints)
        self._scales[:B].copy_(to_device([1.0 / (s.temperature or 1.0) for s in samplings], device, torch.float64))
        self._greedy[:B].copy_(to_device(greedy, device, torch.bool))
        return made.filtered, made.warm, made.nucleus, any(greedy)

    def begin(self, starts: Int[Tensor, " B"], R: int, traits: Hashable, *, shared: bool) -> tuple[KernelDraws, Philox]:
        """Return the draws from R logits of texts of these lengths, and their random numbers; `traits`: of `load`."""
        assert isinstance(traits, tuple)
        *flags, some_greedy = traits
        B = len(starts)
        parameters = kernels.Parameters(self._parameters.floats[:B], self._parameters.ints[:B], *flags)
        parameters["positions"].copy_(starts)
        draws = KernelDraws(
            parameters,
            kernels.Workspace.empty(B, 0, R, starts.device, filtered=parameters.filtered),
            self._scales[:B],
            self._greedy[:B] if some_greedy else None,
        )
        return draws, Philox(parameters["seeds"], starts, shared)


class DeviceDrafting:
    """A draft model's part of rounds that stay on the device, for up to `rows` rows.

    held        the draft model's rows
    now_held    returns the rows that the drafter has now
    sizes       of the draft model's vocabulary and of the target's
    vocab, confidence   as in `ModelDrafter`
    """

    def __init__(
        self,
        rows: int,
        held: DeviceRows,
        now_held: Callable[[], object],
        sizes: tuple[int, int],
        vocab: DraftVocab | None,
        confidence: float,
    ) -> None:
        self._held, self.vocab, self._confidence = held, vocab, confidence
        self._now_held = now_held
        self._R, self._V = sizes
        self.layers: tuple[int, ...] = ()
        self._draws = DeviceDraws(rows, held.pool.device)

    def is_current(self) -> bool:
        """See `DrafterPart`."""
        return self._now_held() is self._held

    def load(self, samplings: Sequence[SamplingParams], seeds: Int[Tensor, " B"]) -> Hashable:
        """See `DrafterPart`."""
        return self._draws.load(samplings, seeds)

    def draft(self, K: int, texts: Texts, most: Int[Tensor, " B"], traits: Hashable, *, shared: bool) -> Draft:
        """See `DrafterPart`."""
        R = min(self._R, self._V)
        draws, rng = self._draws.begin(texts.lengths, R, traits, shared=shared)
        spine = Spine(1, most)
        for j in range(K):
            if j == 0:
                tokens, places = self._unread(texts)
            else:
                tokens = spine.tokens[-1][:, None]
                places = torch.stack([texts.starts, texts.lengths + j - 1, (most > j).long()])
            logits = self._held.launch(tokens, places, last=True).logits[:, 0, :R]
            spine.add(*draws.draw(logits, rng, j, self.vocab))
            if self._confidence:
                spine.end_after_weak(self._confidence)
        return spine.draft(shared_rng=shared)

    def read(
        self,
        hidden: tuple[Float[Tensor, "B T H"], ...],
        tokens: Int[Tensor, "B T"],
        texts: Texts,
        counts: Int[Tensor, " B"],
    ) -> None:
        """Do nothing: the next draft begins with what was not read."""

    def seat(self, source: Int[Tensor, " B"], fresh: Sequence[int]) -> None:
        """Do nothing: what it knows of a row lies in the pool."""

    def hand_back(self, requests: Sequence[int]) -> None:
        """Do nothing: what it knows of a row lies in the pool."""

    def _unread(self, texts: Texts) -> tuple[Int[Tensor, "B 2"], Int[Tensor, "3 B"]]:
        """Return the tokens that the draft model has not read, and their places.

        They are the last one, and the one before where a whole draft was accepted: its last token was never read.
        """
        first = torch.where(texts.behind == 2, texts.last[:, 0], texts.last[:, 1])
        tokens = torch.stack([first, texts.last[:, 1]], 1)
        tokens = tokens.masked_fill(tokens >= self._R, 0)  # as in `Reader`: it only worsens the guess
        return tokens, torch.stack([texts.starts, texts.lengths - texts.behind, texts.behind])
