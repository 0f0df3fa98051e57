"""Guess with a head on the target's hidden states (models/head/network.py): chains, and trees for rule="tree".

The distribution of a drawn token lies on the head's own, reduced vocabulary, warped as the request wants it; elsewhere it is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import is_cpu, to_device
from draftproof.core.distribution import Distribution, propose
from draftproof.core.rng import Philox, Purpose
from draftproof.core.sampling import SamplingParams, warp_without_sync
from draftproof.core.types import PAD, Draft, History
from draftproof.drafters.build import Guess, Spine, check_count, check_share, chosen
from draftproof.drafters.head_tree import grow_levels
from draftproof.drafters.interface import Context, TargetFeatures
from draftproof.drafters.sample import Draws, grown, seen
from draftproof.drafters.switch import merged
from draftproof.models.cuda_graphs import SWITCHED_OFF, GraphCache
from draftproof.models.head.attach import FittedHead
from draftproof.models.head.network import rounded

WIDE: Final = 16
"""Positions up to which rows are read side by side. A row with more is read by itself: the others would be padded."""

AT_ONCE: Final = 512
"""Positions of one row in a pass: the mask for a whole prompt could be larger than the head."""


@dataclass(slots=True)
class HeadRow:
    """What is known of a request: `read` entries of the cache are true, and `waiting` holds the states behind them."""

    read: int = 0
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)
    shown: int = 0
    """Positions whose states are read or waiting."""
    last: Float[Tensor, "1 H"] | None = None
    """The fused state of the last entry: who asks again before anything is shown gets the same draft."""

    def note(self, context: Context) -> None:
        """Take down what is new of what was shown.

        Positions that were never shown count as states of zeros, and then the head guesses worse, nothing else.
        """
        if context.shown is None or not context.shown.hidden:
            return
        hidden, stop = context.shown.hidden, min(context.shown.stop, len(context.tokens) - 1)
        first = context.shown.stop - len(hidden[0])
        if stop <= self.shown:
            return
        if first > self.shown:
            self.waiting.append(tuple(states.new_zeros(first - self.shown, states.shape[1]) for states in hidden))
        self.waiting.append(tuple(states[max(0, self.shown - first) : stop - first] for states in hidden))
        self.shown = stop


class HeadReader:
    """One row of cache for each context, in their order."""

    def __init__(self, head: FittedHead, *, graphs: bool = True) -> None:
        self._head = head
        self._recorder = GraphCache(None if graphs else SWITCHED_OFF)
        self._ids: list[int] = []
        self._rows: list[HeadRow] = []
        self._cache = head.head.new_cache(0)
        self._base = torch.empty(0)

    def __len__(self) -> int:
        return len(self._ids)

    def notice(self, contexts: Sequence[Context]) -> list[bool]:
        """Take down what was shown, and read nothing. Which contexts can be drafted for: of which are the states
        known up to the token before the last?"""
        self._seat([context.id for context in contexts])
        for row, context in zip(self._rows, contexts, strict=True):
            row.note(context)
        return [0 < len(c.tokens) - 1 <= row.shown for row, c in zip(self._rows, contexts, strict=True)]

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool], room: int) -> Float[Tensor, "B H"]:
        """The head's state behind the last token of every wanted context, all of them ready; the other rows hold
        anything. Behind each there is room for `room` steps."""
        states = self._fused(wanted)
        longest = max(len(context.tokens) for context in contexts)
        self._cache.ensure(longest + WIDE + room)
        for b, context in enumerate(contexts):
            if wanted[b]:
                self._rows[b].read = len(context.tokens) - 1 - len(states[b])
                if len(states[b]) > WIDE:
                    states[b] = self._read_long(b, context.tokens, states[b])
        made = self._read(contexts, states)
        for row, context, mine in zip(self._rows, contexts, states, strict=True):
            if len(mine):
                row.read, row.last, row.waiting = len(context.tokens) - 1, mine[-1:], []
        return made

    def step(self, tokens: Int[Tensor, " B"], h: Float[Tensor, "B H"], depth: int) -> Float[Tensor, "B H"]:
        """The state behind one drafted token more, the `depth`-th from 1."""
        reach = max(row.read for row in self._rows) + depth
        return self._states(tokens[:, None], h[:, None], (self._base + depth)[:, None], reach)[:, 0]

    def branch(
        self, tokens: Int[Tensor, "B w"], h: Float[Tensor, "B w H"], lineage: Bool[Tensor, "B w M"]
    ) -> Float[Tensor, "B w H"]:
        """The states behind w nodes of a tree. They are the last w of the M so far; `lineage` says which of the M are
        ancestors of each, or the node itself."""
        B, w, M = lineage.shape
        first = (self._base + 1)[:, None]
        inside = first + torch.arange(M, device=first.device)
        reach = max(row.read for row in self._rows) + M
        visible = (torch.arange(reach, device=first.device) < first)[:, None].repeat(1, w, 1)
        visible.scatter_(2, inside[:, None].expand(B, w, M), lineage)
        positions = self._base[:, None] + lineage.sum(2)
        return self._head.head.step(
            self._head.embedded(tokens), h, positions, self._cache,
            slots=inside[:, M - w :], visible=visible, reach=reach,
        )  # fmt: skip

    def _states(
        self, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"], reach: int
    ) -> Float[Tensor, "B n H"]:
        """The states behind these tokens, of which none stands at `reach` or beyond. On a GPU a step takes longer to
        launch than to run, and is recorded; so that shapes are few it looks at whole buckets there, masked."""
        if is_cpu(tokens.device):
            return self._head.head.step(self._head.embedded(tokens), h, positions, self._cache, reach=reach)
        body, reach = partial(self._masked, rounded(reach)), rounded(reach)
        return self._recorder.run(body, (tokens, h, positions), reach, self._cache.recordings)[0]

    def _masked(
        self, reach: int, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"]
    ) -> tuple[Float[Tensor, "B n H"]]:
        visible = torch.arange(reach, device=positions.device) <= positions[:, :, None]
        embedded = self._head.embedded(tokens)
        return (self._head.head.step(embedded, h, positions, self._cache, visible=visible, reach=reach),)

    def _seat(self, ids: list[int]) -> None:
        """Rows for these requests and no others."""
        if ids == self._ids:
            return
        seat = {name: row for row, name in enumerate(self._ids)}
        old = [seat.get(name) for name in ids]
        self._rows = [HeadRow() if row is None else self._rows[row] for row in old]
        self._cache = self._cache.arranged(old)
        self._ids = ids

    def _fused(self, wanted: Sequence[bool]) -> list[Float[Tensor, "_ H"]]:
        """The states that each wanted row has to read, as the head reads them; fused in one go."""
        waiting = [row.waiting if want else [] for row, want in zip(self._rows, wanted, strict=True)]
        counts = [sum(len(part[0]) for part in parts) for parts in waiting]
        nothing = self._head.table.new_empty((0, self._head.table.shape[1]), dtype=torch.float32)
        parts = [part for row in waiting for part in row]
        fused = nothing
        if parts:
            taps = [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)]
            fused = self._head.head.fuse([tap.float() for tap in taps])
        each = list(fused.split(counts))
        return [
            row.last if want and not len(mine) and row.last is not None else mine
            for row, want, mine in zip(self._rows, wanted, each, strict=True)
        ]

    def _read_long(self, b: int, tokens: Sequence[int], states: Float[Tensor, "n H"]) -> Float[Tensor, "1 H"]:
        """Read all of a row but its last position, by itself; what is left."""
        cache, row = self._cache.row(b), self._rows[b]
        for part in states[:-1].split(AT_ONCE):
            positions = torch.arange(row.read, row.read + len(part), device=part.device)[None]
            follow = to_device([list(tokens[row.read + 1 : row.read + 1 + len(part)])], part.device)
            row.read += len(part)
            self._head.head.step(self._head.embedded(follow), part[None], positions, cache, reach=row.read)
        return states[-1:]

    def _read(self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]]) -> Float[Tensor, "B H"]:
        """Read these states, and the tokens behind them, side by side. What has to be known of them is sent in one go:
        each row's tokens, where they begin, and which is the last."""
        counts = [len(mine) for mine in states]
        width, starts = max(counts), [row.read for row in self._rows]
        lines = [
            [*c.tokens[s + 1 : s + 1 + n], *[0] * (width - n), s, max(n - 1, 0), s + n - 1]
            for c, s, n in zip(contexts, starts, counts, strict=True)
        ]
        numbers = to_device(lines, states[0].device)
        first, last, self._base = numbers[:, width:].unbind(1)
        h = torch.nn.utils.rnn.pad_sequence(states, batch_first=True) if len(states) > 1 else states[0][None]
        positions = first[:, None] + torch.arange(width, device=numbers.device)
        made = self._states(numbers[:, :width], h, positions, max(starts) + width)
        return made[torch.arange(len(counts), device=numbers.device), last]


class HeadDrafter:
    """Drafts by a head.

    confidence  end a chain behind a token that seemed less likely than this (of a greedy row: to the head itself, where
                all rows are greedy). The token is submitted: to drop what was drawn would be a bias
    branches    more than one drafts trees, for rule="tree". For a greedy row the likeliest paths, chosen, that so many
                nodes of each level have with so many candidates each; for the others one drawn path, whose tokens have
                chosen siblings: of what is drawn more is kept than of what is chosen
    graphs      on a GPU, record steps and replay them
    """

    def __init__(self, head: FittedHead, *, confidence: float = 0.0, branches: int = 1, graphs: bool = True) -> None:
        check_count("branches", branches, 1)
        check_share("confidence", confidence)
        if branches > len(head.vocab.ids):
            raise ValueError(f"branches={branches}, but the head knows only {len(head.vocab.ids)} tokens")
        self.features = TargetFeatures(layers=head.head.shape.taps)
        self._head, self._confidence, self._branches = head, confidence, branches
        self._memory = HeadReader(head, graphs=graphs)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Up to k[b] tokens, of a tree k[b] slots; see `Drafter`. None where the target's states are not known."""
        ready = self._memory.notice(contexts)
        slots = [most if can else 0 for most, can in zip(k, ready, strict=True)]
        if self._branches == 1:
            return self._drawn(contexts, slots, rng)
        cold = [context.sampling.temperature == 0 for context in contexts]
        trees = self._grown(contexts, [most if is_cold else 0 for most, is_cold in zip(slots, cold, strict=True)])
        if all(cold):
            return trees
        rest = [0 if is_cold else most for most, is_cold in zip(slots, cold, strict=True)]
        return merged(trees, self._drawn(contexts, rest, rng))

    def _drawn(self, contexts: Sequence[Context], slots: list[int], rng: Philox) -> Draft:
        """One token behind another, in a tree each with chosen siblings."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), rng.seeds.device, tree=self._branches > 1)
        h = self._memory.catch_up(contexts, [most > 0 for most in slots], max(slots))
        samplings = [context.sampling for context in contexts]
        greedy = all(sampling.temperature == 0 for sampling in samplings)
        if greedy and self._confidence:
            samplings = [_ranking(sampling) for sampling in samplings]
        histories = [seen(context, h.device) for context in contexts]
        spine, draws = Spine(self._branches, to_device(slots, h.device)), Draws(samplings, rng, self._head.vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                h = self._memory.step(spine.tokens[-1], h, len(spine.tokens))
            spine.add(*draw(draws, self._head.logits(h), grown(histories, samplings, spine.tokens), start, greedy))
            if self._confidence and spine.end_behind_weak(self._confidence):
                break
        draft = spine.draft(shared_rng=rng.shared)
        # the most likely token is chosen, not drawn: without a distribution there is less to verify
        return replace(draft, q=None, drawn=None) if greedy else draft

    def _grown(self, contexts: Sequence[Context], slots: list[int]) -> Draft:
        """The likeliest paths, chosen."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), self._head.table.device, tree=True)
        h = self._memory.catch_up(contexts, [most > 0 for most in slots], self._branches * max(slots))
        samplings = [_ranking(context.sampling) for context in contexts]
        histories = [seen(context, h.device) for context in contexts]

        def score(states: Float[Tensor, "B w H"]) -> tuple[Int[Tensor, "B w c"], Float[Tensor, "B w c"]]:
            dist = warp_without_sync(self._head.logits(states), samplings, histories, self._head.vocab)
            tokens = self._head.vocab.ids[dist.logits.topk(self._branches).indices]
            return tokens, dist.log_probs(tokens)

        return grow_levels(h, slots, self._branches, score, self._memory.branch)


def draw(
    draws: Draws, logits: Float[Tensor, "B R"], histories: list[History], j: int, greedy: bool
) -> tuple[Distribution, Int[Tensor, " B"]]:
    """The distribution of each row's j-th token, and a draw from it, or where all rows are greedy its likeliest token.

    A draw stays in the reduced vocabulary: nothing of the target's size is written, unless the target's own race is to
    be run, which is one among its tokens.
    """
    rng, vocab = draws.rng, draws.vocab
    assert vocab is not None
    if not greedy and (draws.on_host(logits) or (kernels.draws_from(logits) and not rng.shared)):
        return draws(logits, histories, j)
    dist = draws.dist(logits, histories)
    if greedy:
        return dist, vocab.ids[dist.logits.argmax(-1)]
    if rng.shared:
        return dist, propose(dist, rng, j)
    point = torch.where(dist.point == PAD, PAD, vocab.entry[dist.point.clamp_min(0)])
    return dist, vocab.ids[replace(dist, vocab=None, point=point).draw(rng, Purpose.DRAFT, j)]


def _ranking(sampling: SamplingParams) -> SamplingParams:
    """By which distribution candidates are ranked. A greedy target's token is the most likely one, but the head does not know
    for certain which that is: its own probabilities say how sure it is."""
    return replace(sampling, temperature=1.0) if sampling.temperature == 0 else sampling
