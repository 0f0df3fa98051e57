"""Draft with a head on the target's hidden states (models/head/network.py): chains, and trees for rule="tree".

Tokens are drawn from the head's reduced vocabulary, with the request's sampling parameters. Tokens outside it have
probability 0 in the draft.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Final

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
from draftproof.drafters.head_chain import GREEDY, draft_chain, joined, kind_of
from draftproof.drafters.head_rectangular import RectangularHeadReader
from draftproof.drafters.head_row import MAX_BATCHED, POSITIONS_PER_PASS, HeadRow, PromptChunk
from draftproof.drafters.head_tree import grow_levels
from draftproof.drafters.interface import Context, TargetFeatures
from draftproof.drafters.sample import Draws, penalty_history, with_drafted
from draftproof.drafters.switch import merged
from draftproof.models.cuda_graphs import SWITCHED_OFF, GraphCache
from draftproof.models.extents import pages_for
from draftproof.models.head.compiled import Chain, Choice
from draftproof.models.head.network import FittedHead, PooledNetwork, rounded
from draftproof.models.head.rows import HeadRows, pools
from draftproof.models.int4_linear import runs_int4
from draftproof.models.pool import PoolFull, SavedRow

if TYPE_CHECKING:
    from draftproof.drafters.device_head import Entering, HeadDrafting

ROOM: Final = 32
"""Entries that a new row has room for after its text; it grows with it."""

LEAST_TOKENS: Final = 2**16
"""Tokens in the pool of a head: beside a target on a GPU, or without an engine."""

AUTO_CONFIDENCE: Final = "auto"

GREEDY_CONFIDENCE: Final = 0.15
"""Probability of a greedy row's path below which "auto" ends a chain. A further token gains at most this much and costs
a step of the head; 0.1 to 0.2 were equally fast (benchmarks/head_confidence.py)."""

FOUR_BIT_CONFIDENCE: Final = 0.25
"""Probability of a greedy row's path below which "auto" ends a chain, for a target on four-bit weights. Its passes are
shorter, so that a step of the head costs more of them. The best of 0.15, 0.25 and 0.4 with drafts of three, in one
run over four chat prompts that are also the benchmark's."""

TREE_CONFIDENCE: Final = 0.03
"""Probability of a path below which "auto" leaves it out of a greedy row's tree: it costs a position of the target's
pass, which is cheaper than a step of the head."""


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
        self.features = TargetFeatures(layers=head.head.taps)
        self._head, self._confidence, self._branches = head, confidence, branches
        self._greedy_confidence = FOUR_BIT_CONFIDENCE if runs_int4(head.rows) else GREEDY_CONFIDENCE
        self._memory: HeadReader | RectangularHeadReader = (
            HeadReader(head, graphs=graphs) if pools(head) else RectangularHeadReader(head, graphs=graphs)
        )

    def kv_bytes(self) -> int:
        """Return the bytes that a token takes in the head's pool; 0 for a head that has none."""
        network = self._head.head
        if not isinstance(self._memory, HeadReader) or not isinstance(network, PooledNetwork):
            return 0
        return sum(shape.bytes for shape in network.kv_shapes)

    def open_pool(self, pages: int) -> None:
        if isinstance(self._memory, HeadReader):
            self._memory.open(pages)

    def follow(self, context: Context, length: int) -> bool:
        return isinstance(self._memory, HeadReader) and self._memory.follow(context)

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        return isinstance(self._memory, HeadReader) and self._memory.adopt(context, holder, length)

    def suspend(self, request: int) -> None:
        if isinstance(self._memory, HeadReader):
            self._memory.suspend(request)

    def rest(self, request: int) -> None:
        if isinstance(self._memory, HeadReader):
            self._memory.rest(request)

    def forget(self, requests: Sequence[int]) -> None:
        if isinstance(self._memory, HeadReader):
            self._memory.drop(requests)

    def device_drafting(self, rows: int) -> "HeadDrafting | str":
        """Return this drafter's part of rounds that stay on the device, or why it has none."""
        if not isinstance(self._memory, HeadReader):
            return f"a cache of {type(self._head.head).__name__} is arranged by the host"
        if self._branches > 1:
            return "a drafter with branches makes trees"
        if (refusal := self._memory.device_refusal()) is not None:
            return refusal
        from draftproof.drafters.device_head import HeadDrafting

        return HeadDrafting(rows, self._memory, self._head, self._least(0.0, self._head.table.device))

    def device_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how tokens are drawn for a request."""
        return sampling

    def device_places(self, contexts: Sequence[Context], tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """Bring rows up to date; return each one's first slot, and how many of its tokens have no entry: the last.

        tokens  those that each row needs room for. None if there is no room, or if the target's states are not known
        """
        return self._pooled.places(contexts, tokens)

    def device_fits(self, request: int, tokens: int) -> bool:
        """Return whether a request's row has room for so many tokens where it is."""
        return self._pooled.fits(request, tokens)

    def device_recorded(self, request: int, read: int) -> None:
        """Note that a request's row has `read` entries."""
        self._pooled.record_read(request, read)

    def device_missed(self, context: Context, hidden: tuple[Float[Tensor, "n H"], ...]) -> None:
        """Store the target's states from a text's last token on, at tokens that a round without a draft read."""
        self._pooled.store(context, hidden)

    @property
    def _pooled(self) -> "HeadReader":
        assert isinstance(self._memory, HeadReader)
        return self._memory

    def propose(self, contexts: Sequence[Context], k: Sequence[int], rng: Philox) -> Draft:
        """Propose up to k[b] tokens for each row, or k[b] slots of a tree; see `Drafter`.

        A row whose hidden states are not all known gets none.
        """
        ready = self._memory.receive(contexts, MAX_BATCHED + self._branches * max(k, default=0))
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
        """Draw chains, or in trees one path whose tokens get chosen siblings."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), rng.seeds.device, tree=self._branches > 1)
        if self._branches > 1 or rng.shared or not isinstance(self._memory, HeadReader) or not self._memory.is_compiled:
            return self._drawn_step_by_step(contexts, slots, rng)
        drafts = []
        kinds = [kind_of(context.sampling) if most else "" for context, most in zip(contexts, slots, strict=True)]
        for kind in dict.fromkeys(kinds):
            part = [most if own == kind else 0 for most, own in zip(slots, kinds, strict=True)]
            if kind is None:
                drafts.append(self._drawn_step_by_step(contexts, part, rng))
            elif kind:
                least = self._least(self._greedy_confidence if kind == GREEDY else 0.0, rng.seeds.device)
                drafts.append(draft_chain(self._memory, contexts, part, rng, self._head.vocab, least))
        return reduce(joined, drafts)

    def _drawn_step_by_step(self, contexts: Sequence[Context], slots: list[int], rng: Philox) -> Draft:
        """Draw one token after another; in a tree each gets chosen siblings."""
        h = self._memory.catch_up(contexts, [most > 0 for most in slots])
        samplings = [context.sampling for context in contexts]
        greedy = all(sampling.temperature == 0 for sampling, most in zip(samplings, slots, strict=True) if most)
        confidence = self._least(self._greedy_confidence if greedy else 0.0, h.device)
        if greedy and confidence:
            samplings = [ranking(sampling) for sampling in samplings]
        histories = [penalty_history(context, h.device) for context in contexts]
        spine, draws = Spine(self._branches, to_device(slots, h.device)), Draws(samplings, rng, self._head.vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                wanted = [start < most for most in slots]
                h = self._memory.step(spine.tokens[-1], h, len(spine.tokens), wanted)
            drafted, logits = with_drafted(histories, samplings, spine.tokens), self._memory.logits(h)
            dist, token = draw_token(draws, logits, drafted, start, greedy)
            spine.add(dist, token)
            if confidence and spine.end_after_weak(confidence, own_log_prob(draws, logits, drafted, dist, token)):
                break
        draft = spine.draft(shared_rng=rng.shared)
        # The argmax is chosen, not drawn: without a distribution there is less to verify.
        return replace(draft, q=None, drawn=None) if greedy else draft

    def _grown(self, contexts: Sequence[Context], slots: list[int]) -> Draft:
        """Choose a tree of the most likely paths for each row."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), self._head.table.device, tree=True)
        h = self._memory.catch_up(contexts, [most > 0 for most in slots])
        samplings = [ranking(context.sampling) for context in contexts]
        histories = [penalty_history(context, h.device) for context in contexts]

        def score(states: Float[Tensor, "B w H"]) -> tuple[Int[Tensor, "B w c"], Float[Tensor, "B w c"]]:
            dist = warp_without_sync(self._memory.logits(states), samplings, histories, self._head.vocab)
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


def draw_token(
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


def own_log_prob(
    draws: Draws, logits: Float[Tensor, "B R"], histories: list[History], dist: Distribution, token: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Return the log-probability of each row's token: for a greedy row, the drafter's own (see `ranking`)."""
    log_p = dist.log_prob(token)
    greedy = [b for b, sampling in enumerate(draws.samplings) if sampling.temperature == 0]
    if greedy:
        rows = to_device(greedy, logits.device)
        samplings = [ranking(draws.samplings[b]) for b in greedy]
        own = warp_without_sync(logits[rows][:, None], samplings, [histories[b] for b in greedy], draws.vocab).first
        log_p = log_p.index_copy(0, rows, own.log_prob(token[rows]))
    return log_p


def ranking(sampling: SamplingParams) -> SamplingParams:
    """Replace temperature 0 by 1 to rank candidates.

    A greedy target takes its argmax, but the head does not know for certain which token that is; its own probabilities
    say how sure it is.
    """
    return replace(sampling, temperature=1.0) if sampling.temperature == 0 else sampling


class HeadReader:
    """The head's rows, one for each request.

    Until a pool is opened by an engine, rows of requests that are not among the contexts are dropped.
    """

    def __init__(self, head: FittedHead, *, graphs: bool = True) -> None:
        self._head = head
        self._graphs = GraphCache(None if graphs else SWITCHED_OFF)
        self._pool: HeadRows | None = None
        self._is_managed = False
        self._rows: dict[int, HeadRow] = {}
        self._saved: dict[int, SavedRow] = {}
        self._names: list[int] = []
        """The requests of this round, in the contexts' order."""
        self._starts = self._base = torch.empty(0)
        self._entering: Entering | None = None
        self._after: dict[int, Tensor] = {}
        """The head's states after the last tokens of rows that come from the device, until they are read on."""

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, pages: int) -> None:
        """Allocate a pool; from then on rows stay until they are dropped."""
        self._pool, self._is_managed = HeadRows(self._head, max(pages, pages_for(LEAST_TOKENS))), True
        self._rows.clear()
        self._saved.clear()
        self._after.clear()

    @property
    def pool(self) -> HeadRows:
        if self._pool is None:
            self._pool = HeadRows(self._head, pages_for(LEAST_TOKENS))
        return self._pool

    def receive(self, contexts: Sequence[Context], room: int) -> list[bool]:
        """Store the target's new hidden states without reading them; return which contexts can be drafted for.

        Those are the contexts whose states are known up to the token before the last, and whose rows have room for so
        many entries after their text.
        """
        self._names = [context.id for context in contexts]
        self._after.clear()
        if not self._is_managed:
            self.drop([name for name in self._rows if name not in self._names])
        return [self._receive(context, room) for context in contexts]

    def _receive(self, context: Context, room: int) -> bool:
        return self._enter(context, room) and self._take(context)

    def _take(self, context: Context) -> bool:
        """Store the target's new hidden states; return whether all are known up to the token before the last."""
        row = self._rows[context.id]
        row.receive(context)
        has_state = bool(row.waiting) or bool(row.chunks) or row.last is not None
        return 0 < len(context.tokens) - 1 <= row.known and has_state

    @property
    def is_compiled(self) -> bool:
        """Return whether `draft` can be used."""
        return self.pool.compiled is not None and self.pool.compiled.drafts

    def logits(self, h: Float[Tensor, "*N H"]) -> Float[Tensor, "*N R"]:
        """Return the logits of the next token over the draft vocabulary, from the head's states."""
        return self.pool.logits(h)

    def draft(self, contexts: Sequence[Context], index: Sequence[int], choice: Choice) -> Chain:
        """Read the stored states of the contexts with these numbers and draft for them, in one compiled call.

        The contexts must be ready (see `receive`).
        """
        names = [self._names[b] for b in index]
        self._settle(names)
        rows, texts = [self._rows[name] for name in names], [contexts[b].tokens for b in index]
        counts = [sum(len(part[0]) for part in row.waiting) for row in rows]
        if not all(0 < n <= MAX_BATCHED for n in counts):
            h = self.catch_up(contexts, [b in index for b in range(len(contexts))])[list(index)]
            at = [row.read - 1 for row in rows]
            return self.pool.draft(h, (), torch.empty(0, dtype=torch.long), names, at, [1] * len(rows), choice)[0]
        at = [len(text) - 1 - n for text, n in zip(texts, counts, strict=True)]
        follow = torch.tensor([token for text, n in zip(texts, counts, strict=True) for token in text[len(text) - n :]])
        taps = _by_tap([part for row in rows for part in row.waiting])
        chain, fused = self.pool.draft(None, taps, follow, names, at, counts, choice)
        assert fused is not None
        for row, text, stop in zip(rows, texts, accumulate(counts), strict=True):
            row.read, row.last, row.waiting = len(text) - 1, fused[stop - 1 : stop], []
        return chain

    def catch_up(self, contexts: Sequence[Context], wanted: Sequence[bool]) -> Float[Tensor, "B H"]:
        """Read the stored states and return the head's state after the last token of every wanted context.

        Wanted contexts must be ready (see `receive`); the other rows are undefined.
        """
        self._settle([name for name, want in zip(self._names, wanted, strict=True) if want])
        states = self._fused(wanted)
        for b, context in enumerate(contexts):
            if wanted[b]:
                row = self._rows[context.id]
                row.read = len(context.tokens) - 1 - len(states[b])
                if len(states[b]) > MAX_BATCHED:
                    states[b] = self._read_long(context, states[b])
        made = self._read(contexts, states)
        for context, fused in zip(contexts, states, strict=True):
            if len(fused):
                row = self._rows[context.id]
                row.read, row.last, row.waiting = len(context.tokens) - 1, fused[-1:], []
        return made

    def step(
        self, tokens: Int[Tensor, " B"], h: Float[Tensor, "B H"], depth: int, wanted: Sequence[bool]
    ) -> Float[Tensor, "B H"]:
        """Return the state after one more drafted token, the `depth`-th, counted from 1; other rows are undefined."""
        if not is_cpu(tokens.device):
            reach = max(self._rows[name].read for name in self._names) + depth
            return self._states(tokens[:, None], h[:, None], (self._base + depth)[:, None], reach)[:, 0]
        index = [b for b, want in enumerate(wanted) if want]
        names = [self._names[b] for b in index]
        at = [self._rows[name].read - 1 + depth for name in names]
        if len(index) == len(wanted):
            return self.pool.packed_states(tokens, h, names, at, [1] * len(names))
        made = torch.zeros_like(h)
        made[index] = self.pool.packed_states(tokens[index], h[index], names, at, [1] * len(names))
        return made

    def branch(
        self, tokens: Int[Tensor, "B w"], h: Float[Tensor, "B w H"], lineage: Bool[Tensor, "B w M"]
    ) -> Float[Tensor, "B w H"]:
        """Return the states after w nodes of a tree, the last w of the M nodes so far.

        `lineage` marks for each of them which of the M nodes are its ancestors or itself.
        """
        B, w, M = lineage.shape
        reads = [self._rows[name].read if name in self._rows else 0 for name in self._names]
        if is_cpu(tokens.device):
            return self.pool.packed_level(tokens, h, self._names, reads, lineage)
        first = (self._base + 1)[:, None]
        inside = first + torch.arange(M, device=first.device)
        reach = max(reads) + M
        visible = (torch.arange(reach, device=first.device) < first)[:, None].repeat(1, w, 1)
        visible.scatter_(2, inside[:, None].expand(B, w, M), lineage)
        positions = self._base[:, None] + lineage.sum(2)
        return self.pool.gathered_states(
            reach, tokens, h, positions, self._starts, slots=inside[:, M - w :], visible=visible
        )

    # ------------------------------------------------------------------------------- rounds that stay on the device

    def device_refusal(self) -> str | None:
        """Return why steps of this head cannot be a part of something that is recorded; None if they can."""
        from draftproof.kernels.attention import MOST_SIZE

        if self._graphs.refusal is not None:
            return f"steps of the head are not recorded: {self._graphs.refusal}"
        if max(keys.shape[2] for keys in self.pool.pool.keys) > MOST_SIZE:
            return f"the kernels attend with up to {MOST_SIZE} numbers in a head"
        return None

    def places(self, contexts: Sequence[Context], tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """Bring rows up to date, and say where they are; see `HeadDrafter.device_places`."""
        self._names = [context.id for context in contexts]
        for context, most in zip(contexts, tokens, strict=True):
            if not self._enter(context, max(most - len(context.tokens), MAX_BATCHED)):
                return None
        ready = [self._take(context) for context in contexts]
        if any(len(context.tokens) > 1 and not is_ready for context, is_ready in zip(contexts, ready, strict=True)):
            return None  # states are missing: the next round that the host follows makes up for them
        states = self._states_after(contexts, ready)
        last = [self._rows[name].last if is_ready else None for name, is_ready in zip(self._names, ready, strict=True)]
        from draftproof.drafters.device_head import Entering

        self._entering = Entering(
            states,
            torch.cat([torch.zeros_like(states[:1]) if each is None else each for each in last]),
            to_device(ready, states.device, torch.bool),
        )
        rows = self.pool.pool.rows
        return [(rows[name].extent.start, 1) for name in self._names]

    def _states_after(self, contexts: Sequence[Context], ready: Sequence[bool]) -> Float[Tensor, "B H"]:
        """Return the head's state after the last token of every context that is ready, reading what was not read."""
        after = [self._after.pop(name, None) for name in self._names]
        unread = [is_ready and state is None for is_ready, state in zip(ready, after, strict=True)]
        made = self._head.table.new_zeros((len(contexts), self._head.table.shape[1]), dtype=torch.float32)
        if any(unread):
            made = self.catch_up(contexts, unread)
        return torch.cat([one if state is None else state for one, state in zip(made.split(1), after, strict=True)])

    def take_entering(self) -> "Entering":
        """Return what is known of the rows that were given places last, in their order."""
        entering, self._entering = self._entering, None
        assert entering is not None
        return entering

    def take_back(self, requests: Sequence[int], states: Float[Tensor, "b H"], fused: Float[Tensor, "b H"]) -> None:
        """Take over rows whose rounds the host did not follow: their last input may have to be read again."""
        for name, state, last in zip(requests, states.split(1), fused.split(1), strict=True):
            row = self._rows.get(name)
            if row is not None and row.last is None and 0 < row.read == row.known:
                row.last, self._after[name] = last, state

    def fits(self, name: int, tokens: int) -> bool:
        """Return whether a row has room for so many entries where it is."""
        return name in self._rows and name not in self._saved and tokens <= self.pool.pool.rows[name].extent.slots

    def record_read(self, name: int, read: int) -> None:
        """Note how many entries a row has after a round that the host did not follow."""
        row = self._rows.get(name)
        if row is not None:
            row.read = row.known = read
            row.chunks, row.waiting, row.last = [], [], None

    def store(self, context: Context, hidden: tuple[Float[Tensor, "n H"], ...]) -> None:
        """Store the target's states from a text's last token on, at tokens that it does not have yet."""
        self._after.pop(context.id, None)
        if self._enter(context, MAX_BATCHED):
            row, first = self._rows[context.id], len(context.tokens) - 1
            row.receive(context)  # of a round that the host followed
            row.add(hidden, first, first + len(hidden[0]))

    # --------------------------------------------------------------------------------------------- prompts and pages

    def follow(self, context: Context) -> bool:
        """Take the target's states at the tokens of a prompt that it has just read; False if there is no room."""
        if not self._receive_prompt(context):
            return False
        row = self._rows[context.id]
        states, row.waiting = row.waiting, []
        if states:
            start = row.known - sum(len(part[0]) for part in states)
            row.chunks.append(PromptChunk(start, list(context.tokens[start + 1 : row.known + 1]), states))
        return True

    def _settle(self, names: Iterable[int]) -> None:
        """Read the chunks of prompts that wait in these rows, all of them in one pass on a CPU."""
        due = [(name, chunk) for name in names if name in self._rows for chunk in self._rows[name].chunks]
        if not due:
            return
        for name, _ in due:
            self._rows[name].chunks = []
        counts = [len(chunk.followers) for _, chunk in due]
        fused = self._fuse([part for _, chunk in due for part in chunk.states])
        followers = to_device([token for _, chunk in due for token in chunk.followers], fused.device)
        starts = [chunk.start for _, chunk in due]
        if is_cpu(fused.device):
            self.pool.packed_states(followers, fused, [name for name, _ in due], starts, counts)
        each = zip(due, fused.split(counts), followers.split(counts), strict=True)
        for (name, chunk), states, tokens in each:
            row, stop = self._rows[name], chunk.start + len(states)
            if not is_cpu(fused.device):
                positions = torch.arange(chunk.start, stop, device=fused.device)[None]
                self.pool.gathered_states(stop, tokens[None], states[None], positions, self.pool.starts([name]))
            row.read, row.last = stop, states[-1:]

    def _receive_prompt(self, context: Context) -> bool:
        if not self._enter(context, MAX_BATCHED):
            return False
        self._rows[context.id].receive(context)
        return True

    def adopt(self, context: Context, holder: int, length: int) -> bool:
        """Take over the first entries of another request's row: as many as tokens, the next token is the same."""
        self._settle([holder])
        held = self._rows.get(holder)
        if held is None or holder in self._saved or held.read < length or not self._enter(context, MAX_BATCHED):
            return False
        pool = self.pool.pool
        pool.rows[holder].length = max(pool.rows[holder].length, length)
        pool.share(holder, context.id, length)
        pool.rows[context.id].length = 0
        self._rows[context.id] = HeadRow(read=length, known=length)
        return True

    def suspend(self, name: int) -> None:
        """Copy a row out of the pool until its request is back."""
        if name in self._rows and name not in self._saved:
            self._settle([name])
            self.pool.pool.rows[name].length = self._rows[name].read
            self._saved[name] = self.pool.pool.save(name)

    def rest(self, name: int) -> None:
        """Free the room after a row's text."""
        if name in self._rows and name not in self._saved:
            self._settle([name])
            self.pool.pool.rows[name].length = self._rows[name].read
            self.pool.pool.trim(name)

    def drop(self, names: Sequence[int]) -> None:
        """Forget the rows of these requests."""
        for name in names:
            self._after.pop(name, None)
            if self._rows.pop(name, None) is not None and self._saved.pop(name, None) is None:
                self.pool.pool.leave(name)

    def _enter(self, context: Context, room: int) -> bool:
        """Give a request a row with room for its text and so many entries more; False if the pool has none."""
        pool, name = self.pool.pool, context.id
        try:
            if name in self._saved:
                pool.restore(name, self._saved[name])
                del self._saved[name]
            if name not in self._rows:
                pool.enter(name, len(context.tokens) + room + ROOM)
                self._rows[name] = HeadRow()
            pool.rows[name].length = self._rows[name].read  # what must be copied if the row moves
            pool.ensure(name, len(context.tokens) + room)
        except PoolFull:
            return False
        return True

    def _states(
        self, tokens: Int[Tensor, "B n"], h: Float[Tensor, "B n H"], positions: Int[Tensor, "B n"], reach: int
    ) -> Float[Tensor, "B n H"]:
        """Return the states after these tokens on a GPU; all positions are below `reach`.

        A step takes longer to launch than to run, so it is captured as a CUDA graph. The attention span is rounded up
        and masked, which keeps the number of shapes small.
        """
        body, reach = partial(self._captured, rounded(reach)), rounded(reach)
        return self._graphs.run(body, (tokens, h, positions, self._starts), reach, self.pool.recordings)[0]

    def _captured(
        self,
        reach: int,
        tokens: Int[Tensor, "B n"],
        h: Float[Tensor, "B n H"],
        positions: Int[Tensor, "B n"],
        starts: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B n H"]]:
        return (self.pool.gathered_states(reach, tokens, h, positions, starts),)

    def _fused(self, wanted: Sequence[bool]) -> list[Float[Tensor, "_ H"]]:
        """Fuse the stored states of all wanted rows in one call; return them row by row."""
        rows = [self._rows[name] if want else HeadRow() for name, want in zip(self._names, wanted, strict=True)]
        counts = [sum(len(part[0]) for part in row.waiting) for row in rows]
        each = list(self._fuse([part for row in rows for part in row.waiting]).split(counts))
        return [
            row.last if not len(states) and row.last is not None else states
            for row, states in zip(rows, each, strict=True)
        ]

    def _fuse(self, parts: Sequence[tuple[Tensor, ...]]) -> Float[Tensor, "n H"]:
        if not parts:
            return self._head.table.new_empty((0, self._head.table.shape[1]), dtype=torch.float32)
        return self.pool.fuse([tap.float() for tap in _by_tap(parts)])

    def _read_long(self, context: Context, states: Float[Tensor, "n H"]) -> Float[Tensor, "1 H"]:
        """Read all positions of a row but the last, without the other rows; return the last one's state."""
        self._read_entries(context, states[:-1])
        return states[-1:]

    def _read_entries(self, context: Context, states: Float[Tensor, "n H"]) -> None:
        """Read states of one row, each with the token after it; only keys and values are of use."""
        row = self._rows[context.id]
        for part in states.split(POSITIONS_PER_PASS):
            n = len(part)
            follow = to_device(list(context.tokens[row.read + 1 : row.read + 1 + n]), part.device)
            if is_cpu(part.device):
                self.pool.packed_states(follow, part, [context.id], [row.read], [n])
            else:
                positions = torch.arange(row.read, row.read + n, device=part.device)[None]
                starts = self.pool.starts([context.id])
                self.pool.gathered_states(row.read + n, follow[None], part[None], positions, starts)
            row.read += n

    def _read(self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]]) -> Float[Tensor, "B H"]:
        """Read these states and the tokens after them together; return each row's last state."""
        counts = [len(row) for row in states]
        starts = [self._rows[name].read if name in self._rows else 0 for name in self._names]
        if is_cpu(states[0].device):
            return self._read_packed(contexts, states, counts, starts)
        width = max(counts)
        slots = [self.pool.pool.rows[name].extent.start if name in self._rows else 0 for name in self._names]
        # Tokens, start, last index and first slot of each row are copied to the device together, in one tensor.
        lines = [
            [*c.tokens[s + 1 : s + 1 + n], *[0] * (width - n), s, max(n - 1, 0), s + n - 1, slot]
            for c, s, n, slot in zip(contexts, starts, counts, slots, strict=True)
        ]
        numbers = to_device(lines, states[0].device)
        first, last, self._base, self._starts = numbers[:, width:].unbind(1)
        h = torch.nn.utils.rnn.pad_sequence(states, batch_first=True) if len(states) > 1 else states[0][None]
        positions = first[:, None] + torch.arange(width, device=numbers.device)
        made = self._states(numbers[:, :width], h, positions, max(starts) + width)
        return made[torch.arange(len(counts), device=numbers.device), last]

    def _read_packed(
        self, contexts: Sequence[Context], states: list[Float[Tensor, "_ H"]], counts: list[int], starts: list[int]
    ) -> Float[Tensor, "B H"]:
        index = [b for b, n in enumerate(counts) if n]
        follow = torch.tensor([t for b in index for t in contexts[b].tokens[starts[b] + 1 : starts[b] + 1 + counts[b]]])
        widths = [counts[b] for b in index]
        made = self.pool.packed_states(
            follow,
            torch.cat([states[b] for b in index]) if len(index) > 1 else states[index[0]],
            [self._names[b] for b in index],
            [starts[b] for b in index],
            widths,
        )
        last = made[torch.tensor(widths).cumsum(0) - 1]
        if len(index) == len(counts):
            return last
        every = last.new_zeros((len(counts), last.shape[1]))
        every[index] = last
        return every


def _by_tap(parts: Sequence[tuple[Tensor, ...]]) -> list[Float[Tensor, "n H"]]:
    """Join states that came part by part, tap by tap."""
    return [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)]
