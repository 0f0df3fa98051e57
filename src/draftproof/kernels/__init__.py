"""Verify drafts in Triton kernels: raw logits in, verdict out, each logit read once.

With the same random numbers the verdict is that of `draftproof.verify`. Triton is imported by the first call that needs
it, so that this package can be imported on any machine.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.kernels.call import Call, draws_from, pack, serves
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.penalties import Edits
from draftproof.kernels.workspace import Workspace

__all__ = ["Edits", "Parameters", "Rows", "Workspace", "draws_from", "pack", "serves", "verify_rows"]


class Rows(NamedTuple):
    """Verdicts of a batch; a verdict is valid if its fault is 0.

    tokens    accepted tokens, the round's last token, then PAD; int64 [B, K + 1]
    accepted  number of accepted tokens; int64 [B]
    faults    int32 [B], bits. 1: a target row is not a distribution (NaN, +inf, nothing allowed); 2: a draft row is not
              one, or a draft token has probability 0 under it; 4: a draft token is outside the vocabulary. With a fault
              the last token is PAD
    """

    tokens: Tensor
    accepted: Tensor
    faults: Tensor


def verify_rows(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    parameters: Parameters,
    rule: str = "block",
    edits: Edits | None = None,
    allowed: Tensor | None = None,
    draft_entries: Tensor | None = None,
    draft_lse: Tensor | None = None,
    draft_cutoff: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Rows:
    """Verify a batch without a device sync; no value is read on the host.

    target_logits  [B, K + 1, V], or [N, V] with `parameters["target_rows"]` the first row of each request
    draft_tokens   [B, K], int64; `parameters["lengths"]` says how many of each row count
    draft_logits   [B, K, R], or ragged like target_logits; None if the tokens were chosen and not drawn
    parameters     sampling parameters of each request and of its draft; seeds, positions, lengths
    rule           "token", "block" or "coupled"
    edits          bias and penalties (`Edits.of`)
    allowed        packed bits, int32, [B, K + 1, ceil(V / 32)] or ragged like target_logits (`pack`)
    draft_entries  [V]: the entry in draft_logits of each of the target's tokens, -1 for none (`DraftVocab.entry`)
    draft_lse      [B, K]: log Σ exp(logit / draft temperature) over what the drafter kept, if it knows it; draft rows
                   are then read only where the residual needs them. With filters on the draft, draft_cutoff too
    draft_cutoff   [B, K]: smallest logit that the draft's filters kept
    workspace      memory for results and intermediate sums; None allocates one

    With a workspace the results are views of it and the call can be captured in a CUDA graph.
    """
    optional = (edits, allowed, draft_entries, draft_lse, draft_cutoff)
    call = Call(target_logits, draft_tokens, draft_logits, parameters, rule, *optional)
    call.check()
    B, K, V = call.B, call.K, call.V
    if workspace is None:
        workspace = Workspace.empty(B, K, V, target_logits.device, filtered=parameters.filtered)
    else:
        workspace.check(B, K, V, filtered=parameters.filtered)
    if torch.compiler.is_compiling():
        from draftproof.kernels.torch_op import launch_op as launch
    else:
        from draftproof.kernels.launch import launch
    if B:
        launch(call, workspace)
    return Rows(workspace.tokens[: B * (K + 1)].view(B, K + 1), workspace.accepted[:B], workspace.faults[:B])
