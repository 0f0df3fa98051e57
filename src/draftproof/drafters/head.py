"""Draft with a head on the target's hidden states (models/head/network.py): chains, and trees for rule="tree".

Tokens are drawn from the head's reduced vocabulary, with the request's sampling parameters. Tokens outside it have
probability 0 in the draft.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.core.device import to_device
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp_without_sync
from draftproof.core.types import Draft
from draftproof.drafters.build import Guess, Spine, check_confidence, check_count, chosen, least_path
from draftproof.drafters.device_head_rows import DeviceHeadRows
from draftproof.drafters.head_chain import GREEDY, draft_chain, joined, kind_of
from draftproof.drafters.head_reader import MAX_BATCHED, HeadReader
from draftproof.drafters.head_rectangular import RectangularHeadReader
from draftproof.drafters.head_tree import grow_levels
from draftproof.drafters.interface import Context, TargetFeatures
from draftproof.drafters.sample import Draws, draw_token, own_log_prob, penalty_history, ranking, with_drafted
from draftproof.drafters.switch import merged
from draftproof.models.head.network import FittedHead, PooledNetwork
from draftproof.models.head.rows import pools
from draftproof.models.int4_linear import runs_int4

if TYPE_CHECKING:
    from draftproof.drafters.device_head import HeadDrafting

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
        check_confidence(confidence)
        if branches > len(head.vocab.ids):
            raise ValueError(f"branches={branches}, but the head knows only {len(head.vocab.ids)} tokens")
        self.features = TargetFeatures(layers=head.head.taps)
        self._head, self._confidence, self._branches = head, confidence, branches
        self._greedy_confidence = FOUR_BIT_CONFIDENCE if runs_int4(head.rows) else GREEDY_CONFIDENCE
        self._memory: HeadReader | RectangularHeadReader = (
            HeadReader(head, graphs=graphs) if pools(head) else RectangularHeadReader(head, graphs=graphs)
        )
        self._on_device = DeviceHeadRows(self._memory, head) if isinstance(self._memory, HeadReader) else None

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
        if (refusal := self._device_rows.refusal()) is not None:
            return refusal
        from draftproof.drafters.device_head import HeadDrafting

        return HeadDrafting(rows, self._device_rows, self._head, self._least(0.0, self._head.table.device))

    def device_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how tokens are drawn for a request."""
        return sampling

    def device_places(self, contexts: Sequence[Context], tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """Bring rows up to date; return each one's first slot, and how many of its tokens have no entry: the last.

        tokens  those that each row needs room for. None if there is no room, or if the target's states are not known
        """
        return self._device_rows.places(contexts, tokens)

    def device_fits(self, request: int, tokens: int) -> bool:
        """Return whether a request's row has room for so many tokens where it is."""
        return self._device_rows.fits(request, tokens)

    def device_recorded(self, request: int, read: int) -> None:
        """Note that a request's row has `read` entries."""
        self._device_rows.record_read(request, read)

    def device_missed(self, context: Context, hidden: tuple[Float[Tensor, "n H"], ...]) -> None:
        """Store the target's states from a text's last token on, at tokens that a round without a draft read."""
        self._device_rows.store(context, hidden)

    @property
    def _device_rows(self) -> DeviceHeadRows:
        assert self._on_device is not None, "only a head in a pool drafts on the device"
        return self._on_device

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
        """Return the probability below which a path ends; `automatic` is that of "auto"."""
        return least_path(self._confidence, automatic, device)
