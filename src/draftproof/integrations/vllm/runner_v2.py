"""Verify drafts in vLLM's model runner V2, the default on CUDA: its function `rejection_sample`.

The logits that it gets are processed: bias, penalties, temperature, min-p, top-k and top-p are in them. A temperature
of 0 marks greedy requests. Draft logits are those before the draft's temperature, which is the request's.

The block rule is exact for chosen drafts only. vLLM draws drafts with noise that is addressed by seed and absolute
position, so that a position which is drafted again gets the same noise again. The token rule never looks at draft
tokens after the first rejection, so nothing it decided depends on that noise. The block rule looks at all of them.
Drawn drafts are therefore verified by the token rule here, whatever the settings say.
"""

from collections.abc import Callable
from typing import Any, Final

from jaxtyping import Float, Int
from torch import Tensor

from draftproof import kernels
from draftproof.integrations.vllm.hooks import Hook, Hooks
from draftproof.integrations.vllm.log import UNTRIED, announce
from draftproof.integrations.vllm.settings import ATTRIBUTE, Settings, settings_of

PARAMETERS: Final = (
    *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping", "expanded_idx_mapping"),
    *("expanded_local_pos", "temperature", "seed", "num_speculative_steps"),
)
"""The parameters of `rejection_sample` that verification reads; the same in vLLM 0.22 to 0.32."""

_active: Settings | None = None
"""Settings of this process' engine: `rejection_sample` has no sampler to hold them, and a worker has one engine."""


def _marks_sampler(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from vllm.config import get_current_vllm_config_or_none

        global _active
        original(self, *args, **kwargs)
        config = get_current_vllm_config_or_none()
        _active = None if config is None else settings_of(config)
        setattr(self, ATTRIBUTE, _active)
        if _active is not None:
            announce(_active, "V2", (", drawn drafts by 'token'" if _active.rule == "block" else "") + UNTRIED)

    return __init__


def _verifies(original: Callable[..., Any]) -> Callable[..., Any]:
    def rejection_sample(*args: Any, **kwargs: Any) -> Any:
        if _active is None:
            return original(*args, **kwargs)
        named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        return sample(_active.rule, **{name: named[name] for name in PARAMETERS})

    return rejection_sample


_MODULE: Final = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"

HOOKS: Final = Hooks(
    (
        Hook(f"{_MODULE}:RejectionSampler.__init__", ("self", "sampler", "spec_config", "device"), _marks_sampler),
        Hook(f"{_MODULE}:rejection_sample", PARAMETERS, _verifies),
    )
)


def sample(
    rule: str,
    target_logits: Float[Tensor, "N V"],
    draft_logits: Float[Tensor, "S K R"] | None,
    draft_sampled: Int[Tensor, " N"],
    cu_num_logits: Int[Tensor, " B1"],
    pos: Int[Tensor, " N"],
    idx_mapping: Int[Tensor, " B"],
    expanded_idx_mapping: Int[Tensor, " N"],
    expanded_local_pos: Int[Tensor, " N"],
    temperature: Float[Tensor, " S"],
    seed: Int[Tensor, " S"],
    num_speculative_steps: int,
) -> tuple[Int[Tensor, "B J"], Int[Tensor, " B"]]:
    """Return the tokens that each request emits and their number, without a sync; 0 for a request with a faulty row.

    Rows `cu_num_logits[b]` to `cu_num_logits[b + 1]` belong to request b, whose state is at `idx_mapping[b]`. Draft
    token i is in the row after it: `draft_sampled[cu_num_logits[b] + i + 1]`; a negative one ends the draft.
    """
    from draftproof.integrations.vllm.parameters_v2 import arranged  # imports Triton

    # a padded target vocabulary: tokens that the drafter does not have are not tokens
    V = target_logits.shape[-1] if draft_logits is None else min(target_logits.shape[-1], draft_logits.shape[-1])
    rows, rows_per_state = None, 0
    if draft_logits is not None:
        rule, rows, rows_per_state = "token", draft_logits.flatten(0, 1)[:, :V], draft_logits.shape[1]
    sources = (draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed)
    parameters, drafts = arranged(*sources, K=num_speculative_steps, rows_per_state=rows_per_state)
    verdict = kernels.verify_rows(target_logits[:, :V], drafts, rows, parameters=parameters, rule=rule)
    emitted = (verdict.accepted + 1).masked_fill_(verdict.faults != 0, 0)
    return verdict.tokens.clamp_min_(0), emitted.int()
