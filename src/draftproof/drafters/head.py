"""Guess with a head on the target's hidden states (models/head.py): chains, and trees for rule="tree".

The law of a drawn token lies on the head's own, reduced vocabulary, warped as the request wants it; elsewhere it is 0.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.core import race
from draftproof.core.dense import law_of
from draftproof.core.host import sent
from draftproof.core.law import Law
from draftproof.core.noise import Noise, Site
from draftproof.core.sampling import Sampling
from draftproof.core.types import PAD, Draft, History
from draftproof.drafters import Asks, Context
from draftproof.drafters.choice import merged
from draftproof.drafters.draws import Draws
from draftproof.drafters.guess import Guess, check_count, check_share, chosen
from draftproof.drafters.headreader import HeadReader
from draftproof.drafters.headtree import grow_levels
from draftproof.drafters.seen import grown, seen
from draftproof.drafters.spine import Spine
from draftproof.models.fitted import FittedHead


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
        self.asks = Asks(layers=head.head.shape.taps)
        self._head, self._confidence, self._branches = head, confidence, branches
        self._memory = HeadReader(head, graphs=graphs)

    def propose(self, contexts: Sequence[Context], k: Sequence[int], noise: Noise) -> Draft:
        """Up to k[b] tokens, of a tree k[b] slots; see `Drafter`. None where the target's states are not known."""
        ready = self._memory.notice(contexts)
        slots = [most if can else 0 for most, can in zip(k, ready, strict=True)]
        if self._branches == 1:
            return self._drawn(contexts, slots, noise)
        cold = [context.sampling.temperature == 0 for context in contexts]
        trees = self._grown(contexts, [most if is_cold else 0 for most, is_cold in zip(slots, cold, strict=True)])
        if all(cold):
            return trees
        rest = [0 if is_cold else most for most, is_cold in zip(slots, cold, strict=True)]
        return merged(trees, self._drawn(contexts, rest, noise))

    def _drawn(self, contexts: Sequence[Context], slots: list[int], noise: Noise) -> Draft:
        """One token behind another, in a tree each with chosen siblings."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), noise.seeds.device, tree=self._branches > 1)
        h = self._memory.catch_up(contexts, [most > 0 for most in slots], max(slots))
        samplings = [context.sampling for context in contexts]
        greedy = all(sampling.temperature == 0 for sampling in samplings)
        if greedy and self._confidence:
            samplings = [_ranking(sampling) for sampling in samplings]
        histories = [seen(context, h.device) for context in contexts]
        spine, draws = Spine(self._branches, sent(slots, h.device)), Draws(samplings, noise, self._head.vocab)
        for start in range(0, max(slots), self._branches):
            if start:
                h = self._memory.step(spine.tokens[-1], h, len(spine.tokens))
            spine.add(*draw(draws, self._head.logits(h), grown(histories, samplings, spine.tokens), start, greedy))
            if self._confidence and spine.end_behind_weak(self._confidence):
                break
        draft = spine.draft(shared_noise=noise.shared)
        # the most likely token is chosen, not drawn: without a law there is less to verify
        return replace(draft, law=None, drawn=None) if greedy else draft

    def _grown(self, contexts: Sequence[Context], slots: list[int]) -> Draft:
        """The likeliest paths, chosen."""
        if not any(slots):
            return chosen([Guess([], [])] * len(contexts), self._head.table.device, tree=True)
        h = self._memory.catch_up(contexts, [most > 0 for most in slots], self._branches * max(slots))
        samplings = [_ranking(context.sampling) for context in contexts]
        histories = [seen(context, h.device) for context in contexts]

        def score(states: Float[Tensor, "B w H"]) -> tuple[Int[Tensor, "B w c"], Float[Tensor, "B w c"]]:
            law = law_of(self._head.logits(states), samplings, histories, self._head.vocab)
            tokens = self._head.vocab.ids[law.logits.topk(self._branches).indices]
            return tokens, law.log_probs(tokens)

        return grow_levels(h, slots, self._branches, score, self._memory.branch)


def draw(
    draws: Draws, logits: Float[Tensor, "B R"], histories: list[History], j: int, greedy: bool
) -> tuple[Law, Int[Tensor, " B"]]:
    """The law of each row's j-th token, and a draw from it, or where all rows are greedy its likeliest token.

    A draw stays in the reduced vocabulary: nothing of the target's size is written, unless the target's own race is to
    be run, which is one among its tokens.
    """
    noise, vocab = draws.noise, draws.vocab
    assert vocab is not None
    if not greedy and (draws.on_host(logits) or (kernels.draws_from(logits) and not noise.shared)):
        return draws(logits, histories, j)
    law = draws.law(logits, histories)
    if greedy:
        return law, vocab.ids[law.logits.argmax(-1)]
    if noise.shared:
        return law, race.propose(law, noise, j)
    point = torch.where(law.point == PAD, PAD, vocab.entry[law.point.clamp_min(0)])
    return law, vocab.ids[replace(law, vocab=None, point=point).draw(noise, Site.DRAFT, j)]


def _ranking(sampling: Sampling) -> Sampling:
    """By which law candidates are ranked. A greedy target's token is the most likely one, but the head does not know
    for certain which that is: its own probabilities say how sure it is."""
    return replace(sampling, temperature=1.0) if sampling.temperature == 0 else sampling
