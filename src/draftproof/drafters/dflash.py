"""Draft a block of tokens in one pass, with a DFlash drafter (models/head/dflash.py) on the target's hidden states.

Each token of the block has a distribution that depends on the text alone. It is drawn from that distribution, after the
request's sampling parameters: exact under every rule.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.core.rng import Philox
from draftproof.core.types import Draft
from draftproof.drafters.build import Guess, Spine, check_confidence, check_count, chosen, least_path
from draftproof.drafters.head_reader import MAX_BATCHED, MOST_UNREAD, HeadRow, join_taps
from draftproof.drafters.interface import Context, TargetFeatures
from draftproof.drafters.sample import Draws, draw_token, own_log_prob, penalty_history, ranking, with_drafted
from draftproof.models.head.dflash import FittedDFlash

BLOCK_CONFIDENCE: Final = 0.03
"""Probability of a greedy row's path below which "auto" ends a draft. The block is computed already, so a further token
costs only a position of the target's pass, as in a head's tree."""


class DFlashDrafter:
    """Drafter that predicts a whole block in one pass, at most one token less than the block has positions.

    confidence  end a draft after the token at which the probability of all its tokens falls below this; "auto" does so
                for greedy rows on a CPU. See `HeadDrafter`
    branches    more than one drafts trees, for rule="tree": the drawn path, with chosen siblings of each token
    """

    def __init__(self, drafter: FittedDFlash, *, confidence: float | str = 0.0, branches: int = 1) -> None:
        check_count("branches", branches, 1)
        check_confidence(confidence)
        self.features = TargetFeatures(layers=drafter.network.shape.taps)
        self._drafter, self._confidence, self._branches = drafter, confidence, branches
        self._memory = DFlashReader(drafter)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens for each row, or k[b] slots of a tree; see `Drafter`.

        A row whose hidden states are not all known gets none.
        """
        ready = self._memory.receive(contexts)
        most = (self._drafter.network.shape.block - 1) * self._branches
        slots = [min(wanted, most) if can else 0 for wanted, can in zip(k, ready, strict=True)]
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), rng.seeds.device, tree=self._branches > 1)
        logits = self._drafter.logits(self._memory.predict(contexts, [slot > 0 for slot in slots]))
        samplings = [context.sampling for context in contexts]
        greedy = all(sampling.temperature == 0 for sampling in samplings)
        confidence = least_path(self._confidence, BLOCK_CONFIDENCE if greedy else 0.0, logits.device)
        if greedy and confidence:
            samplings = [ranking(sampling) for sampling in samplings]
        histories = [penalty_history(context, logits.device) for context in contexts]
        spine = Spine(self._branches, to_device(slots, logits.device))
        draws = Draws(samplings, rng, self._drafter.vocab)
        for start in range(0, max(slots), self._branches):
            drafted = with_drafted(histories, samplings, spine.tokens)
            here = logits[:, len(spine.tokens)]
            dist, token = draw_token(draws, here, drafted, start, greedy)
            spine.add(dist, token)
            if confidence and spine.end_after_weak(confidence, own_log_prob(draws, here, drafted, dist, token)):
                break
        draft = spine.draft(shared_rng=rng.shared)
        # The argmax is chosen, not drawn: without a distribution there is less to verify.
        return replace(draft, q=None, drawn=None) if greedy else draft


class DFlashReader:
    """The drafter's cache: one row per context, in the contexts' order."""

    def __init__(self, drafter: FittedDFlash) -> None:
        self._drafter = drafter
        self._ids: list[int] = []
        self._rows: list[HeadRow] = []
        self._cache = drafter.network.new_cache(0)

    def __len__(self) -> int:
        return len(self._ids)

    def receive(self, contexts: Sequence[Context]) -> list[bool]:
        """Store the target's new hidden states; return which contexts can be drafted for, as `HeadReader.receive`."""
        self._arrange([context.id for context in contexts])
        for row, context in zip(self._rows, contexts, strict=True):
            row.receive(context)
        if any(row.unread > MOST_UNREAD for row in self._rows):
            self._ensure(contexts)
            self._read([row.unread > MOST_UNREAD for row in self._rows])
        return [0 < len(c.tokens) - 1 <= row.known for row, c in zip(self._rows, contexts, strict=True)]

    def predict(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Float[Tensor, "B n H"]:
        """Read the stored states and return the states of each row's block, without its first position.

        Wanted contexts must be ready (see `receive`); the other rows are undefined.
        """
        shape = self._drafter.network.shape
        self._ensure(contexts)
        self._read(wanted)
        starts = [len(c.tokens) - 1 if want else 0 for c, want in zip(contexts, wanted, strict=True)]
        blocks = [
            [c.tokens[start], *[shape.mask_token] * (shape.block - 1), start]
            for c, start in zip(contexts, starts, strict=True)
        ]
        numbers = to_device(blocks, self._drafter.table.device)
        embedded = self._drafter.embedded(numbers[:, :-1])
        states = self._drafter.network.predict(embedded, numbers[:, -1], self._cache, max(starts) + shape.block)
        return states[:, 1:]

    def _ensure(self, contexts: Sequence[Context]) -> None:
        """Make room for each text, what is read after it, and a block."""
        longest = max(len(context.tokens) for context in contexts)
        self._cache.ensure(longest + MAX_BATCHED + self._drafter.network.shape.block)

    def _arrange(self, ids: list[int]) -> None:
        """Give the cache one row for each of these requests and no others."""
        if ids == self._ids:
            return
        row_of = {name: row for row, name in enumerate(self._ids)}
        old = [row_of.get(name) for name in ids]
        self._rows = [HeadRow() if row is None else self._rows[row] for row in old]
        self._cache = self._cache.arranged(old)
        self._ids = ids

    def _read(self, wanted: Sequence[bool]) -> None:
        """Read the stored states of the wanted rows: long rows alone, the others in one batch."""
        network, batch = self._drafter.network, []
        none = self._drafter.table.new_empty((0, network.fc.out_features), dtype=self._drafter.dtype)
        for b, (row, want) in enumerate(zip(self._rows, wanted, strict=True)):
            states = self._fused(row) if want and row.waiting else none
            if len(states) > MAX_BATCHED:
                network.read(states[None], self._positions([row.read], len(states)), self._cache.row(b))
                row.read, states = row.known, states[:0]
            batch.append(states)
        width = max(len(states) for states in batch)
        if width:
            # Padding writes past a row's end, where the block or the row's next states are written before any read.
            padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
            network.read(padded, self._positions([row.read for row in self._rows], width), self._cache)
        for row, states in zip(self._rows, batch, strict=True):
            row.read += len(states)

    def _fused(self, row: HeadRow) -> Float[Tensor, "n H"]:
        taps, row.waiting = join_taps(row.waiting), []
        return self._drafter.network.fuse([tap.to(self._drafter.dtype) for tap in taps])

    def _positions(self, starts: list[int], width: int) -> Tensor:
        first = to_device(starts, self._drafter.table.device)
        return first[:, None] + torch.arange(width, device=first.device)
