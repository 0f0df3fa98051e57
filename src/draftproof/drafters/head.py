"""Draft with a head on the target's hidden states (models/head/network.py): chains, and trees for rule="tree".

Tokens are drawn from the head's reduced vocabulary, with the request's sampling parameters. Tokens outside it have
probability 0 in the draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core.device import is_cpu, runs_kernels, to_device
from draftproof.core.distribution import Distribution, propose
from draftproof.core.rng import Philox, Purpose
from draftproof.core.sampling import SamplingParams, warp_without_sync
from draftproof.core.types import PAD, Draft, History
from draftproof.drafters.build import Guess, Spine, check_count, check_share, chosen
from draftproof.drafters.head_tree import grow_levels
from draftproof.drafters.interface import Context, TargetFeatures
from draftproof.drafters.sample import Draws, penalty_history, with_drafted
from draftproof.drafters.switch import merged
from draftproof.models.cuda_graphs import SWITCHED_OFF, GraphCache
from draftproof.models.head.network import FittedHead, rounded

MAX_BATCHED: Final = 16
"""Positions up to which rows are read in one batch; a longer row is read alone, because the others would be padding."""

AUTO_CONFIDENCE: Final = "auto"

GREEDY_CONFIDENCE: Final = 0.15
"""Probability of a greedy row's path below which "auto" ends a chain. A further token gains at most this much and costs
a step of the head; 0.1 to 0.2 were equally fast (benchmarks/head_confidence.py)."""

TREE_CONFIDENCE: Final = 0.03
"""Probability of a path below which "auto" leaves it out of a greedy row's tree: it costs a position of the target's
pass, which is cheaper than a step of the head."""

POSITIONS_PER_PASS: Final = 512
"""Positions of one row read in a pass; the attention mask of a whole prompt could be larger than the head."""


class HeadDrafter:
    """Drafter that uses a head on the target's hidden states.

    confidence  end a chain after the token at which the probability of all its tokens falls below this, and leave less
                likely paths out of a greedy row's tree. If all rows are greedy, the probability is the head's own. A
                drawn token is still submitted: dropping it would be a bias. "auto" does so for greedy rows on a CPU
    branches    more than one drafts trees, for rule="tree". A greedy row gets the most likely paths, chosen, following
                `branches` nodes of each level with `branches` candidates each. Any other row gets one drawn path whose
                tokens have chosen siblings, because drawn tokens are accepted more often than chosen ones
    graphs      on a GPU, capture steps as CUDA graphs and replay them
    """

    def __init__(
        self, head: FittedHead, *, confidence: float | str = 0.0, branches: int = 1, graphs: bool = True
    ) -> None:
        check_count("branches", branches, 1)
        if not isinstance(confidence, str):
            check_share("confidence", confidence)
        elif confidence != AUTO_CONFIDENCE:
            raise ValueError(f'confidence must be a probability in [0, 1] or "{AUTO_CONFIDENCE}"; got {confidence!r}')
        if branches > len(head.vocab.ids):
            raise ValueError(f"branches={branches}, but the head knows only {len(head.vocab.ids)} tokens")
        self.features = TargetFeatures(layers=head.head.shape.taps)
        self._head, self._confidence, self._branches = head, confidence, branches
        self._uses_graphs = graphs
        self._memory = HeadReader(head, graphs=graphs)

    def fork(self) -> "HeadDrafter":
        """Return a drafter on the same head with a memory of its own."""
        return HeadDrafter(self._head, confidence=self._confidence, branches=self._branches, graphs=self._uses_graphs)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens for each row, or k[b] slots of a tree; see `Drafter`.

        A row whose hidden states are not all known gets none.
        """
        ready = self._memory.receive(contexts)
        slots = [most if can else 0 for most, can in zip(k, ready, strict=True)]
        if self._branches == 1:
            return self._drawn(contexts, slots, rng)
        greedy = [context.sampling.temperature == 0 for context in contexts]
        trees = self._grown(contexts, [most if is_greedy else 0 for most, is_greedy in zip(slots, greedy, strict=True)])
        if all(greedy):
            return trees
        rest = [0 if is_greedy else most for most, is_greedy in zip(slots, greedy, strict=True)]
        return merged(trees, self._drawn(contexts, rest, rng))

    def _drawn(self, contexts: Sequence[Context], slots: list[int], rng: Philox) -> Draft:
        """Draw one token after another; in a tree each gets chosen siblings."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), rng.seeds.device, tree=self._branches > 1)
        h = self._memory.catch_up(contexts, [most > 0 for most in slots], max(slots))
        samplings = [context.sampling for context in contexts]
        greedy = all(sampling.temperature == 0 for sampling in samplings)
        confidence = self._least(GREEDY_CONFIDENCE if greedy else 0.0, h.device)
        if greedy and confidence:
            samplings = [_ranking(sampling) for sampling in samplings]
        histories = [penalty_history(context, h.device) for context in contexts]
        spine, draws = Spine(self._branches, to_device(slots, h.device)), Draws(samplings, rng, self._head.vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                h = self._memory.step(spine.tokens[-1], h, len(spine.tokens))
            drafted = with_drafted(histories, samplings, spine.tokens)
            spine.add(*_draw(draws, self._head.logits(h), drafted, start, greedy))
            if confidence and spine.end_after_weak(confidence):
                break
        draft = spine.draft(shared_rng=rng.shared)
        # The argmax is chosen, not drawn: without a distribution there is less to verify.
        return replace(draft, q=None, drawn=None) if greedy else draft

    def _grown(self, contexts: Sequence[Context], slots: list[int]) -> Draft:
        """Choose a tree of the most likely paths for each row."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), self._head.table.device, tree=True)
        h = self._memory.catch_up(contexts, [most > 0 for most in slots], self._branches * max(slots))
        samplings = [_ranking(context.sampling) for context in contexts]
        histories = [penalty_history(context, h.device) for context in contexts]

        def score(states: Float[Tensor, "B w H"]) -> tuple[Int[Tensor, "B w c"], Float[Tensor, "B w c"]]:
            dist = warp_without_sync(self._head.logits(states), samplings, histories, self._head.vocab)
            tokens = self._head.vocab.ids[dist.logits.topk(self._branches).indices]
            return tokens, dist.log_probs(tokens)

        least = self._least(TREE_CONFIDENCE, h.device)
        return grow_levels(h, slots, self._branches, score, self._memory.branch, least=least)

    def _least(self, automatic: float, device: torch.device) -> float:
        """Return the probability below which a path ends: the setting, or `automatic` on a CPU.

        On a GPU a draft is as wide as its longest row could be, so that ending one earlier would save nothing.
        """
        if not isinstance(self._confidence, str):
            return self._confidence
        return automatic if is_cpu(device) else 0.0


def _draw(
    draws: Draws, logits: Float[Tensor, "B R"], histories: list[History], j: int, greedy: bool
) -> tuple[Distribution, Int[Tensor, " B"]]:
    """Draw each row's j-th token, or take the argmax if all rows are greedy; return its distribution and the token.

    The draw stays in the reduced vocabulary, so nothing of the target's vocabulary size is written. The exception is
    shared random numbers: they address the target's tokens.
    """
    rng, vocab = draws.rng, draws.vocab
    assert vocab is not None
    on_kernels = runs_kernels(logits.device) and kernels.draws_from(logits) and not rng.shared
    if not greedy and (draws.on_cpu_path(logits) or on_kernels):
        return draws(logits, histories, j)
    dist = draws.distribution(logits, histories)
    if greedy:
        return dist, vocab.ids[dist.logits.argmax(-1)]
    if rng.shared:
        return dist, propose(dist, rng, j)
    point = torch.where(dist.point == PAD, PAD, vocab.entry[dist.point.clamp_min(0)])
    return dist, vocab.ids[replace(dist, vocab=None, point=point).draw(rng, Purpose.DRAFT, j)]


def _ranking(sampling: SamplingParams) -> SamplingParams:
    """Replace temperature 0 by 1 to rank candidates.

    A greedy target takes its argmax, but the head does not know for certain which token that is; its own probabilities
    say how sure it is.
    """
    return replace(sampling, temperature=1.0) if sampling.temperature == 0 else sampling


class HeadReader:
    """The head's cache: one row per context, in the contexts' order."""

    def __init__(self, head: FittedHead, *, graphs: bool = True) -> None:
        self._head = head
        self._graphs = GraphCache(None if graphs else SWITCHED_OFF)
        self._ids: list[int] = []
        self._rows: list[HeadRow] = []
        self._cache = head.head.new_cache(0)
        self._base = torch.empty(0)

    def __len__(self) -> int:
        return len(self._ids)

    def receive(self, contexts: Sequence[Context]) -> list[bool]:
        """Store the target's new hidden states without reading them; return which contexts can be drafted for.

        Those are the contexts whose states are known up to the token before the last.
        """
        self._arrange([context.id for context in contexts])
        for row, context in zip(self._rows, contexts, strict=True):
            row.receive(context)
        return [0 < len(c.tokens) - 1 <= row.known for row, c in zip(self._rows, contexts, strict=True)]

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool], room: int) -> Float[Tensor, "B H"]:
        """Read the stored states and return the head's state after the last token of every wanted context.

        Wanted contexts must be ready (see `receive`); the other rows are undefined. Afterwards the cache has room for
        `room` steps in each row.
        """
        states = self._fused(wanted)
        longest = max(len(context.tokens) for context in contexts)
        self._cache.ensure(longest + MAX_BATCHED + room)
        for b, context in enumerate(contexts):
            if wanted[b]:
                self._rows[b].read = len(context.tokens) - 1 - len(states[b])
                if len(states[b]) > MAX_BATCHED:
                    states[b] = self._read_long(b, context.tokens, states[b])
        made = self._read(contexts, states)
        for row, context, fused in zip(self._rows, contexts, states, strict=True):
            if len(fused):
                row.read, row.last, row.waiting = len(context.tokens) - 1, fused[-1:], []
        return made

    def step(self, tokens: Int[Tensor, " B"], h: Float[Tensor, "B H"], depth: int) -> Float[Tensor, "B H"]:
        """Return the state after one more drafted token, the `depth`-th, counted from 1."""
        reach = max(row.read for row in self._rows) + depth
        return self._states(tokens[:, None], h[:, None], (self._base + depth)[:, None], reach)[:, 0]

    def branch(
        self, tokens: Int[Tensor, "B w"], h: Float[Tensor, "B w H"], lineage: Bool[Tensor, "B w M"]
    ) -> Float[Tensor, "B w H"]:
        """Return the states after w nodes of a tree, the last w of the M nodes so far.

        `lineage` marks for each of them which of the M nodes are its ancestors or itself.
        """
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
        """Return the states after these tokens, whose positions are all below `reach`.

        On a GPU a step takes longer to launch than to run, so it is captured as a CUDA graph. The attention span is
        rounded up and masked there, which keeps the number of shapes small.
        """
        if is_cpu(tokens.device):
            return self._head.head.step(self._head.embedded(tokens), h, positions, self._cache, reach=reach)
        body, reach = partial(self._masked, rounded(reach)), rounded(reach)
        return self._graphs.run(body, (tokens, h, positions), reach, self._cache.recordings)[0]

    def _masked(
        self, reach: int, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"]
    ) -> tuple[Float[Tensor, "B n H"]]:
        visible = torch.arange(reach, device=positions.device) <= positions[:, :, None]
        embedded = self._head.embedded(tokens)
        return (self._head.head.step(embedded, h, positions, self._cache, visible=visible, reach=reach),)

    def _arrange(self, ids: list[int]) -> None:
        """Give the cache one row for each of these requests and no others."""
        if ids == self._ids:
            return
        row_of = {name: row for row, name in enumerate(self._ids)}
        old = [row_of.get(name) for name in ids]
        self._rows = [HeadRow() if row is None else self._rows[row] for row in old]
        self._cache = self._cache.arranged(old)
        self._ids = ids

    def _fused(self, wanted: Sequence[bool]) -> list[Float[Tensor, "_ H"]]:
        """Fuse the stored states of all wanted rows in one call; return them row by row."""
        waiting = [row.waiting if want else [] for row, want in zip(self._rows, wanted, strict=True)]
        counts = [sum(len(part[0]) for part in parts) for parts in waiting]
        parts = [part for row in waiting for part in row]
        fused = self._head.table.new_empty((0, self._head.table.shape[1]), dtype=torch.float32)
        if parts:
            taps = [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)]
            fused = self._head.head.fuse([tap.float() for tap in taps])
        each = list(fused.split(counts))
        return [
            row.last if want and not len(states) and row.last is not None else states
            for row, want, states in zip(self._rows, wanted, each, strict=True)
        ]

    def _read_long(self, b: int, tokens: Sequence[int], states: Float[Tensor, "n H"]) -> Float[Tensor, "1 H"]:
        """Read all positions of a row but the last, without the other rows; return the last one's state."""
        cache, row = self._cache.row(b), self._rows[b]
        for part in states[:-1].split(POSITIONS_PER_PASS):
            positions = torch.arange(row.read, row.read + len(part), device=part.device)[None]
            follow = to_device([list(tokens[row.read + 1 : row.read + 1 + len(part)])], part.device)
            row.read += len(part)
            self._head.head.step(self._head.embedded(follow), part[None], positions, cache, reach=row.read)
        return states[-1:]

    def _read(self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]]) -> Float[Tensor, "B H"]:
        """Read these states and the tokens after them in one batch; return each row's last state.

        Tokens, start and last index of each row are copied to the device together, in one tensor.
        """
        counts = [len(row) for row in states]
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


@dataclass(slots=True)
class HeadRow:
    """One request's progress: `read` entries of the cache are valid, `waiting` holds the states to be read next."""

    read: int = 0
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)
    known: int = 0
    """Positions whose states are read or waiting."""
    last: Float[Tensor, "1 H"] | None = None
    """The fused state of the last entry, so that a second proposal without new states gives the same draft."""

    def receive(self, context: Context) -> None:
        """Store the hidden states that are new in the context's target outputs.

        Positions that were skipped get states of zeros; the head then guesses worse, and nothing else changes.
        """
        outputs = context.target_outputs
        if outputs is None or not outputs.hidden:
            return
        hidden, stop = outputs.hidden, min(outputs.stop, len(context.tokens) - 1)
        first = outputs.stop - len(hidden[0])
        if stop <= self.known:
            return
        if first > self.known:
            self.waiting.append(tuple(states.new_zeros(first - self.known, states.shape[1]) for states in hidden))
        self.waiting.append(tuple(states[max(0, self.known - first) : stop - first] for states in hidden))
        self.known = stop
