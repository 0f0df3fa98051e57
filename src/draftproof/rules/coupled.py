"""Coupled verification: draw the target's own token at every position, and accept a draft token where it is equal.

Daliri, Musco, Suresh 2024 (arXiv 2408.07978). The draw is an exponential race whose random numbers are addressed by
(seed, absolute position). So the text is a function of seed and target alone: it is the same for every drafter and
draft length, and the same as plain seeded decoding. Every draft is verified exactly; a drafter that runs the same race
over q is accepted most often. In return for that invariance the rule keeps a little less than `token`.
"""

import torch

from draftproof.core.distribution import Distribution
from draftproof.core.draw import race_weights
from draftproof.core.rng import Philox
from draftproof.core.types import Draft, InexactError, Verdict
from draftproof.rules.chain import verdict


def coupled(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
    """Verify each chain against the target's own draws."""
    if draft.parents is not None:
        raise InexactError('rule="coupled" verifies chains, and this draft is a tree (it has parents): use rule="tree"')
    accepted, last = torch.zeros_like(draft.lengths), torch.zeros_like(draft.lengths)
    rows = torch.arange(len(accepted), device=accepted.device)
    for i in range(draft.tokens.shape[1] + 1):
        here = torch.full_like(rows, i)
        points = p.points_at(rows, here)
        last[rows] = race_weights(p.weights_at(rows, here)[0], rng.take(rows).shifted(i)) if points is None else points
        going = rows[i < draft.lengths[rows]]
        if not len(going):
            break
        rows = going[draft.tokens[going, i] == last[going]]
        accepted[rows] += 1
        if not len(rows):
            break
    return verdict(draft, accepted, last)
