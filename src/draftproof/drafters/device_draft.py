"""Draft with a model on a GPU while the host is elsewhere: lengths, tokens and random numbers stay on the device.

The tokens and distributions are those of `ModelDrafter.propose`.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

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
from draftproof.kernels import round_steps
from draftproof.kernels.round_table import LENGTH
from draftproof.models.device_rows import DeviceRows


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

    def draft(self, K: int, table: Int[Tensor, "9 B"], traits: Hashable, *, shared: bool) -> Draft:
        """Draw up to K tokens for each row of the table (kernels/round_table.py), without a sync."""

    def read(
        self, hidden: tuple[Float[Tensor, "B T H"], ...], tokens: Int[Tensor, "B T"], places: Int[Tensor, "3 B"]
    ) -> None:
        """Read what a round that drafted added to texts.

        hidden  the target's states after `layers`, from each text's last token on
        places  first slot in the drafter's pool, tokens of the text before its last one, and how many were added
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

    def draft(self, K: int, table: Int[Tensor, "9 B"], traits: Hashable, *, shared: bool) -> Draft:
        """See `DrafterPart`."""
        steps = round_steps.begin_draft(table, K, vocab_size=self._R, behind_text=1)
        R = min(self._R, self._V)
        draws, rng = self._draws.begin(table[LENGTH], R, traits, shared=shared)
        spine, tokens = Spine(1, steps.most), steps.tokens
        for j in range(K):
            logits = self._held.launch(tokens, steps.places[j], last=True).logits[:, 0, :R]
            spine.add(*draws.draw(logits, rng, j, self.vocab))
            if self._confidence:
                spine.end_after_weak(self._confidence)
            tokens = spine.tokens[-1][:, None]
        return spine.draft(shared_rng=shared)

    def read(
        self, hidden: tuple[Float[Tensor, "B T H"], ...], tokens: Int[Tensor, "B T"], places: Int[Tensor, "3 B"]
    ) -> None:
        """Do nothing: the next draft begins with what was not read."""

    def seat(self, source: Int[Tensor, " B"], fresh: Sequence[int]) -> None:
        """Do nothing: what it knows of a row lies in the pool."""

    def hand_back(self, requests: Sequence[int]) -> None:
        """Do nothing: what it knows of a row lies in the pool."""
