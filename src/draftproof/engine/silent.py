"""No drafter: plain decoding."""

from collections.abc import Sequence

import torch

from draftproof.core.noise import Noise
from draftproof.core.types import Draft
from draftproof.drafters import Context


class Silent:
    """Never guesses. Under `coupled` that is plain decoding: every token is the target's own race."""

    def propose(self, contexts: Sequence[Context], k: Sequence[int], noise: Noise) -> Draft:
        B, device = len(contexts), noise.seeds.device
        return Draft(
            torch.empty((B, 0), dtype=torch.long, device=device), torch.zeros(B, dtype=torch.long, device=device)
        )
