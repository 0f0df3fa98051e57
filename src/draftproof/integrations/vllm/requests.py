"""Accept requests that verification serves and stock vLLM does not, and fail single requests instead of the engine."""

from collections.abc import Callable
from typing import Any, Final

from draftproof.integrations.vllm.hooks import Hook
from draftproof.integrations.vllm.log import logger
from draftproof.integrations.vllm.settings import settings_of, uses_v2

SERVED: Final = "_served_by_draftproof"
"""Mark on the speculative config of an engine whose drafts the plug-in verifies: the name of its model runner."""


def _marks_config(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, vllm_config, *args, **kwargs)
        if vllm_config.speculative_config is not None and settings_of(vllm_config) is not None:
            runner = "V2" if uses_v2(vllm_config) else "V1"
            object.__setattr__(vllm_config.speculative_config, SERVED, runner)

    return __init__


def _accepts_min_p_and_bias(original: Callable[..., None]) -> Callable[..., None]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        runner = getattr(speculative_config, SERVED, None)
        if runner is None:
            original(self, speculative_config)
        else:
            _refuse_unserved(self, speculative_config, runner)

    return _validate_spec_decode


def _refuse_unserved(request: Any, speculation: Any, runner: str) -> None:
    """Refuse what verification does not serve."""
    budget = getattr(request, "thinking_token_budget", None)
    if budget is not None:
        raise ValueError(
            f"thinking_token_budget={budget} is not served by draftproof's verification: leave it out, or serve "
            "without the setting 'draftproof'"
        )
    # V1 scores the tokens of its own choice for each position of a draft; V2 serves the list after verification.
    if runner == "V1" and getattr(request, "logprob_token_ids", None) is not None:
        raise ValueError(
            "logprob_token_ids is not served by draftproof under model runner V1: ask for logprobs, or serve "
            "without speculative_config"
        )
    # Drawn drafts that a grammar cuts are a biased sample. V1 verifies them as chosen ones; V2 does not say which
    # requests have a grammar.
    drawn = getattr(speculation, "draft_sample_method", "greedy") == "probabilistic"
    if runner == "V2" and drawn and getattr(request, "structured_outputs", None) is not None:
        raise ValueError(
            "structured output is not served by draftproof under model runner V2 where drafts are drawn: set "
            "draft_sample_method to 'greedy', or VLLM_USE_V2_MODEL_RUNNER=0"
        )


def _fails_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.vllm_config.speculative_config is None or settings_of(self.vllm_config) is None:
            return original(self, scheduler_output, model_runner_output)
        drop_padding(model_runner_output)
        failed = without_tokens(self.requests, scheduler_output, model_runner_output)
        outputs = original(self, scheduler_output, model_runner_output)
        return _with_errors(self, outputs, failed) if failed else outputs

    return update_from_output


def drop_padding(model_runner_output: Any) -> None:
    """Drop padding that vLLM took for a token: a model runner on a GPU passes on a single column as it is."""
    for tokens in model_runner_output.sampled_token_ids:
        if len(tokens) == 1 and tokens[0] < 0:
            tokens.clear()


def without_tokens(requests: Any, scheduler_output: Any, model_runner_output: Any) -> list[Any]:
    """Return the requests that should have emitted a token in this step and did not: no row of theirs was sound."""
    sampled, row = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
    silent = [name for name in scheduler_output.num_scheduled_tokens if sampled and not len(sampled[row[name]])]
    if not silent:
        return []
    before = _computed_before(scheduler_output)
    found = []
    for name in silent:
        request = requests.get(name)
        # a step that ends before the text's last token is a part of a prompt, and emits nothing
        after = before.get(name, 0) + scheduler_output.num_scheduled_tokens[name]
        if request is not None and not request.is_finished() and after >= request.num_tokens:
            found.append(request)
    return found


def _computed_before(scheduler_output: Any) -> dict[str, int]:
    """Return how many tokens of each request were computed before a step, as its scheduler counted them.

    A request's own counter may be a step ahead: with asynchronous scheduling the next step is under way already.
    """
    running = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
    return computed | {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}


def _with_errors(scheduler: Any, outputs: Any, failed: list[Any]) -> Any:
    """Finish requests with an error, and add that to the step's outputs."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    for request in failed:
        logger().error(
            "draftproof: request %s has logits that are not a distribution (NaN, +inf or nothing allowed): it fails",
            request.request_id,
        )
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        step = outputs.setdefault(request.client_index, EngineCoreOutputs())
        step.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
        )
    return outputs


HOOKS: Final = (
    Hook("vllm.v1.engine.input_processor:InputProcessor.__init__", ("self", "vllm_config"), _marks_config),
    Hook(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        _accepts_min_p_and_bias,
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        _fails_requests,
    ),
)
