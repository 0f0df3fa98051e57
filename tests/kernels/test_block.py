"""Test which nodes of a draft the block rule sums: all at which the round may stop, and few others."""

import pytest
import torch

import draftproof as dp
from draftproof.core.rng import Philox
from draftproof.core.types import Draft
from draftproof.kernels.call import Call
from draftproof.kernels.compile import run_all
from draftproof.kernels.launch import plan
from draftproof.kernels.workspace import Workspace
from draftproof.rules.block import log_weights
from kernels.side_by_side import Input, assert_equal, make, parameters, reference

B, K, TILE = 8, 4, 4096
V = 3 * TILE
WARM = dp.SamplingParams(temperature=0.8)


def test_sums_are_taken_where_the_round_may_stop_and_hardly_elsewhere(device):
    """The round stops at one of the nodes that are left; these are candidates by their weights, and not all of them.

    Target and drafter differ by tile: 0.5, 0.25, 0.25 and 0.1, 0.27, 0.63. Tokens of the second tile weigh nearly 1,
    while the residual in the first is large: the tiles' masses show that the round stops after such a token, if not
    later. The last token is of the third tile, so that few drafts are accepted as a whole.
    """
    given = make([WARM] * B, K=K, V=V, device=device, seed=11, ragged=False)
    scale = WARM.temperature * torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.27, 0.63]], device=device).log()
    target, draft = scale.repeat_interleave(TILE, 1)
    given.draft.copy_(given.target[:, :K] + draft)
    given.target.add_(target)
    given.tokens.remainder_(TILE).add_(TILE)
    given.tokens[:, -1] += TILE
    left, possible = nodes_left(given), candidates(given)
    stopped_at = reference(given, "block").accepted
    inside = left.any(1)
    assert inside.sum() > B // 3
    assert bool(left[inside, stopped_at[inside]].all())
    assert not bool((left & ~possible).any())
    assert left.sum() < 0.75 * possible[inside].sum()


@pytest.mark.parametrize(
    "sampling", [dp.SamplingParams(temperature=0.8, top_k=4), dp.SamplingParams(temperature=0.8, min_p=0.3)]
)
def test_with_filters_all_slices_are_read_where_p_is_positive(sampling, device):
    """Few tokens are left of a row, each row's in slices of its own."""
    assert_equal(make([sampling] * 6, K=2, V=TILE, spread=1.5, device=device, ragged=False), "block")


def nodes_left(given: Input) -> torch.Tensor:
    """Return the mask that `block_walk` leaves, [B, K + 1]; empty for a request that accepts its whole draft."""
    workspace = Workspace.empty(B, K, V, given.target.device)
    call = Call(given.target, given.tokens, given.draft, parameters(given), "block")
    run_all(plan(call, workspace, overlap=False)[:2], given.target.device)
    bits = (-workspace.accepted).clamp_min(0)
    return ((bits[:, None] >> torch.arange(K + 1, device=bits.device)) & 1) > 0


def candidates(given: Input) -> torch.Tensor:
    """Return the nodes that are possible by the weights alone.

    The last node at which w = 1, where the round stops at the latest, and later ones whose coin is below w.
    """
    p, q = dp.warp(given.target, given.samplings), dp.warp(given.draft, given.drafts)
    weights = log_weights(p, Draft(given.tokens, given.lengths, q))
    coins = torch.nn.functional.pad(Philox(given.seeds, given.positions).coins(K).log(), (1, 0))
    node = torch.arange(K + 1, device=weights.device)
    forced = torch.where((weights == 0) & (node < K), node, 0).amax(1, keepdim=True)
    return (node == forced) | ((node > forced) & (node < K) & (coins < weights + 1e-5))
