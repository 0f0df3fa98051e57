"""Coupled verification: what is emitted is the target's own draw at each position; a draft token is kept if equal.

Daliri, Musco, Suresh 2024 (arXiv 2408.07978). The draw is a race with noise addressed by (seed, absolute position), so
the text is a function of seed and target alone: the same for every drafter, draft length and stopping rule, and the
same as plain seeded decoding. A drafter that runs the same race over its own distribution is kept most often; any draft is
exact. It keeps a little less than `token`: the price of that invariance.
"""

import torch

from draftproof.core.distribution import Distribution
from draftproof.core.draw import race_weights
from draftproof.core.rng import Philox
from draftproof.core.types import Draft, InexactError, Verdict
from draftproof.rules.chain import verdict


def coupled(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    if draft.parents is not None:
        raise InexactError('rule="coupled" verifies chains, and this draft is a tree (it has parents): use rule="tree"')
    accepted, closing = torch.zeros_like(draft.lengths), torch.zeros_like(draft.lengths)
    rows = torch.arange(len(accepted), device=accepted.device)
    for i in range(draft.tokens.shape[1] + 1):
        here = torch.full_like(rows, i)
        drawn = race_weights(p.weights_at(rows, here)[0], rng.take(rows).shifted(i))
        closing[rows] = drawn
        going = rows[i < draft.lengths[rows]]
        if not len(going):
            break
        rows = going[draft.tokens[going, i] == closing[going]]
        accepted[rows] += 1
        if not len(rows):
            break
    return verdict(draft, accepted, closing)
