"""Head trees are the same with and without synchronisations (CPU and GPU path), and hold the most likely paths."""

import pytest
import torch

from draftproof.core import device as core_device
from draftproof.core.types import PAD, ROOT
from draftproof.drafters.head_tree import grow_levels

V, STATES = 6, 40


class World:
    """A head that is a table: its state is a number, which alone decides the next distribution."""

    def __init__(self, seed, c, kind):
        numbers = torch.Generator().manual_seed(seed)
        weights = torch.randn((STATES, V), generator=numbers) * 2
        if kind == "ties":
            weights = weights.round().clamp(-1, 1)
        if kind == "impossible":
            weights = weights.masked_fill(torch.rand((STATES, V), generator=numbers) < 0.6, -torch.inf)
            weights[:, 0] = 0.0
        self.table, self.c, self.passes = weights.log_softmax(-1), c, 0
        if kind == "broken":
            self.table[::3] = torch.nan

    def score(self, states):
        best = self.table[states[..., 0].long()].topk(self.c)
        return best.indices, best.values

    def follow(self, tokens, states, lineage):
        self.passes += 1
        return (states * 7 + tokens[..., None] + 1) % STATES

    def grown(self, slots, width=None):
        starts = torch.arange(len(slots)).float()[:, None] * 5
        return grow_levels(starts, slots, width or self.c, self.score, self.follow)

    def likeliest(self, b, most):
        """Find the most likely paths by best-first search, in falling order, with any number of children per node."""
        done, open_paths = [], [((), 0.0, b * 5)]
        while open_paths and len(done) <= most:
            open_paths.sort(key=lambda entry: -entry[1])
            path, log_p, state = open_paths.pop(0)
            done.append((path, log_p))
            rows = self.table[state].topk(self.c)
            for token, step in zip(rows.indices.tolist(), rows.values.tolist(), strict=True):
                if step > -torch.inf:
                    open_paths.append(((*path, token), log_p + step, (state * 7 + token + 1) % STATES))
        return [path for path, _ in done[1:]]


def paths(draft, b):
    made = []
    for token, parent in zip(draft.tokens[b].tolist(), draft.parents[b].tolist(), strict=True):
        if token != PAD:
            made.append((*(made[parent] if parent != ROOT else ()), token))
    return made


@pytest.fixture
def gpu_path(monkeypatch):
    """Return a function that makes the CPU count as a GPU."""
    return lambda: monkeypatch.setattr(core_device, "HOST", "none")


@pytest.mark.parametrize("kind", ["plain", "ties", "impossible", "broken"])
@pytest.mark.parametrize("c", [1, 2, 3])
def test_the_gpu_path_grows_the_same_tree(c, kind, gpu_path):
    slots, passes = [5, 0, 8], [0, 0]
    worlds = [World(seed, c, kind) for seed in range(12)]
    on_cpu = [world.grown(slots) for world in worlds]
    passes[0] = sum(world.passes for world in worlds)
    gpu_path()
    for world, draft in zip(worlds, on_cpu, strict=True):
        on_gpu, K = world.grown(slots), draft.tokens.shape[1]
        assert torch.equal(on_gpu.lengths, draft.lengths)
        assert torch.equal(on_gpu.tokens[:, :K], draft.tokens)
        assert torch.equal(on_gpu.parents[:, :K], draft.parents)
        assert (on_gpu.tokens[:, K:] == PAD).all()
    passes[1] = sum(world.passes for world in worlds) - passes[0]
    assert passes[1] == len(worlds) * 7, "a level for each slot but the first, as a chain would take"
    assert passes[0] < passes[1] or c == 1 or kind == "broken"


@pytest.mark.parametrize("kind", ["plain", "impossible"])
def test_the_gpu_path_holds_the_likeliest_paths(kind, gpu_path):
    """All nodes of a level are expanded, so that no path can be missed."""
    gpu_path()
    for seed in range(6):
        world = World(seed, 2, kind)
        draft = world.grown([6, 3], width=64)
        assert [paths(draft, b) for b in range(2)] == [world.likeliest(b, most) for b, most in enumerate([6, 3])]
