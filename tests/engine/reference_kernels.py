"""The kernels' verdicts and draws by the reference, from the same parameters: interpreted kernels are slow."""

from dataclasses import replace
from functools import cache, wraps

import torch
from torch.nn.functional import silu
from torch.utils._python_dispatch import _disable_current_modes

from draftproof.core.distribution import Distribution, DraftVocab, propose
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp_without_sync
from draftproof.core.types import PAD, Draft, History
from draftproof.kernels import Rows
from draftproof.kernels.draw_rows import Drawn
from draftproof.models.head.network import rotated_by_torch
from draftproof.rules import RULES


@cache
def memory(name, shape, dtype):
    return torch.empty(shape, dtype=dtype)


def as_kernel(run):
    """Make a function look like a kernel to traces of memory: it is unseen, and writes to memory that stays."""

    @wraps(run)
    def launched(*args, **more):
        with _disable_current_modes():
            results = run(*args, **more)
            made = []
            for i, tensor in enumerate(results):
                made.append(memory((run.__name__, i), tensor.shape, tensor.dtype))
                made[-1].copy_(tensor)
            return type(results)(*made)

    return launched


def samplings(parameters):
    columns = (parameters[name].tolist() for name in ("temperature", "top_k", "top_p", "min_p"))
    return [
        SamplingParams(temperature=t, top_k=k or None, top_p=p, min_p=m) for t, k, p, m in zip(*columns, strict=True)
    ]


@as_kernel
def verify_rows(
    logits,
    tokens,
    draft_logits=None,
    *,
    parameters,
    rule,
    draft_entries=None,
    draft_lse=None,
    draft_cutoff=None,
    **unused,
):
    """Verify as `kernels.verify_rows` does."""
    B, K = tokens.shape
    p = warp_without_sync(logits, samplings(parameters), [History([], [])] * B)
    rng = Philox(parameters["seeds"].clone(), parameters["positions"].clone())
    draft = Draft(tokens, parameters["lengths"].clone(), shared_rng=rule == "coupled")
    if draft_logits is not None:
        chosen = parameters["draft_temperature"][:, None].expand(B, K) == 0
        point = torch.where(chosen, tokens, PAD)
        scale = 1 / parameters["draft_temperature"][:, None].expand(B, K).masked_fill(chosen, 1.0)
        vocab = None
        if draft_entries is not None:
            known = (draft_entries >= 0).nonzero()[:, 0]  # in the order of tokens, which need not be that of entries
            vocab = DraftVocab(known[draft_entries[known].argsort()], draft_entries)
        q = Distribution(draft_logits, scale, draft_cutoff, draft_lse, point, vocab)
        draft = replace(draft, q=q)
    faults = p.lse.isnan().any(1).int()
    verdict = RULES[rule](replace(p, lse=p.lse.nan_to_num(0.0)), draft, rng)
    return Rows(verdict.tokens, verdict.accepted, faults)


@as_kernel
def draw_rows(logits, parameters, j, *, shared, workspace):
    """Draw as `kernels.draw_rows.draw_rows` does: with shared numbers the position was advanced by j."""
    dist = warp_without_sync(logits[:, None], samplings(parameters), [History([], [])] * len(logits)).first
    rng = Philox(parameters["seeds"].clone(), parameters["positions"] - (j if shared else 0), shared)
    tokens = torch.where(dist.point != PAD, dist.point, propose(dist, rng, j))
    return Drawn(tokens, dist.cutoff.double(), dist.lse, torch.ones_like(dist.lse))


def install_round_steps(monkeypatch):
    """Use plain torch for the small steps of a round and of heads: every operation is seen by whoever traces them."""
    from draftproof.kernels import layer, round_steps, round_steps_reference

    monkeypatch.setattr(layer, "rotate", rotated_by_torch)
    monkeypatch.setattr(layer, "gate", lambda both: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1])
    for name in ("lay_out", "begin_draft", "describe_draws", "begin_scoring", "conclude"):
        monkeypatch.setattr(round_steps, name, getattr(round_steps_reference, name))


def install(monkeypatch):
    """Use these instead of the kernels."""
    from draftproof import kernels
    from draftproof.core import device as core_device
    from draftproof.kernels import draw_rows as drawing

    monkeypatch.setattr(core_device, "KERNEL_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(kernels, "verify_rows", verify_rows)
    monkeypatch.setattr(drawing, "draw_rows", draw_rows)
    install_round_steps(monkeypatch)
