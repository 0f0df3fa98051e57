"""Draft with a head on a GPU while the host is elsewhere: the target's states reach it without leaving the device.

The tokens and distributions are those of `HeadDrafter.propose`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.types import Draft
from draftproof.drafters.build import Spine
from draftproof.drafters.device_draft import DeviceDraws
from draftproof.drafters.device_head_rows import DeviceHeadRows, Entering
from draftproof.drafters.sample import KernelDraws
from draftproof.kernels import round_steps
from draftproof.kernels.round_table import LENGTH
from draftproof.models.head.network import FittedHead


class HeadDrafting:
    """A head's part of rounds that stay on the device, for up to `rows` rows.

    A head reads on at the end of a round, as wide as the target's pass was. So a draft of any length can follow, and
    between rounds one state a row is all there is to remember.
    """

    def __init__(self, rows: int, reader: DeviceHeadRows, head: FittedHead, confidence: float) -> None:
        device, H = head.table.device, head.table.shape[1]
        self._dtype = head.dtype
        self.layers, self.vocab = tuple(head.head.taps), head.vocab
        self._reader, self._pool, self._confidence = reader, reader.pool, confidence
        self._V = len(head.vocab.entry)
        self._draws = DeviceDraws(rows, device)
        self._known = Entering(
            torch.zeros((rows, H), dtype=head.dtype, device=device),
            torch.zeros((rows, H), dtype=head.dtype, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def is_current(self) -> bool:
        """See `DrafterPart`."""
        return self._reader.pool is self._pool

    def load(self, samplings: Sequence[SamplingParams], seeds: Int[Tensor, " B"]) -> Hashable:
        """See `DrafterPart`."""
        return self._draws.load(samplings, seeds)

    def draft(self, K: int, table: Int[Tensor, "9 B"], traits: Hashable, *, shared: bool) -> Draft:
        """See `DrafterPart`."""
        B = table.shape[1]
        steps = round_steps.begin_draft(table, K, vocab_size=self._V, behind_text=2, ready=self._known.ready[:B])
        R = self._V if shared else len(self.vocab.ids)
        draws, rng = self._draws.begin(table[LENGTH], R, traits, shared=shared)
        spine, h = Spine(1, steps.most), self._known.states[:B]
        for j in range(K):
            if j > 0:
                h = self._pool.device_states(spine.tokens[-1][:, None], h[:, None], steps.places[j])[:, 0]
            logits = self._pool.logits(h)
            dist, token = self._drawn(draws, logits, rng, j)
            spine.add(dist, token)
            if self._confidence:
                spine.end_after_weak(self._confidence, _own_log_prob(draws, dist, token))
        return spine.draft(shared_rng=shared)

    def _drawn(
        self, draws: KernelDraws, logits: Float[Tensor, "B R"], rng: Philox, j: int
    ) -> tuple[Distribution, Int[Tensor, " B"]]:
        """Draw each row's j-th token; return its distribution and the token.

        Shared random numbers address the target's tokens, so that they are drawn for in the target's order.
        """
        if not rng.shared:
            return draws.draw(logits, rng, j, self.vocab)
        every = logits.new_full((len(logits), self._V), -torch.inf).index_copy_(1, self.vocab.ids, logits)
        dist, token = draws.draw(every, rng, j, None)
        return replace(dist, logits=logits, vocab=self.vocab), token

    def read(
        self, hidden: tuple[Float[Tensor, "B T H"], ...], tokens: Int[Tensor, "B T"], places: Int[Tensor, "3 B"]
    ) -> None:
        """See `DrafterPart`. Drafted entries are overwritten: they were made from the head's own states."""
        counts = places[2]
        B, rows = len(counts), torch.arange(len(counts), device=counts.device)
        fused = self._pool.fuse([states.to(self._dtype) for states in hidden])
        made = self._pool.device_states(tokens.clamp_min(0), fused, places)
        read, last = counts > 0, (counts - 1).clamp_min(0)
        for memory, new in ((self._known.states, made), (self._known.fused, fused)):
            memory[:B].copy_(torch.where(read[:, None], new[rows, last], memory[:B]))
        self._known.ready[:B].logical_or_(read)

    def seat(self, source: Int[Tensor, " B"], fresh: Sequence[int]) -> None:
        """See `DrafterPart`."""
        B = len(source)
        for memory in self._known:
            memory[:B].copy_(memory[source.clamp_min(0)])
        self._known.ready[:B].logical_and_(source >= 0)
        if fresh:
            columns = to_device(fresh, source.device)
            for memory, new in zip(self._known, self._reader.take_entering(), strict=True):
                memory.index_copy_(0, columns, new)

    def hand_back(self, requests: Sequence[int]) -> None:
        """See `DrafterPart`."""
        states, fused, _ = (memory[: len(requests)].clone() for memory in self._known)
        self._reader.take_back(requests, states, fused)


def _own_log_prob(draws: KernelDraws, dist: Distribution, token: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return the log-probability of each row's token: for a greedy row, the head's own, without filters."""
    log_p = dist.log_prob(token)
    if draws.greedy is None:
        return log_p
    assert dist.vocab is not None
    own = dist.logits.double().log_softmax(-1).gather(1, dist.vocab.entry[token][:, None])[:, 0]
    return torch.where(draws.greedy, own.to(log_p.dtype), log_p)
