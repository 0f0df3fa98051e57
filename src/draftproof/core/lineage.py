"""Who stands above whom in a tree of slots."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def lineage(parents: Int[Tensor, "B K"]) -> Bool[Tensor, "B J J"]:
    """For the root and K slots: is position j an ancestor of position i, or i itself? Position 0 is the root.

    Paths double in length with every squaring, so log2(K) small products do what K steps would.
    """
    B, K = parents.shape
    up = torch.eye(K + 1, device=parents.device).repeat(B, 1, 1)
    up[:, 1:].scatter_(2, (parents + 1).unsqueeze(2), 1.0)
    for _ in range(K.bit_length()):
        up = (up @ up).clamp_(max=1.0)
    return up > 0
