"""Start the plug-in: vLLM calls `register` in every process. An engine that asks for it and cannot have it is refused.

An engine that silently verified as stock vLLM does would have another distribution than its operator believes. So what
can be missing is looked for at three places: settings and hooks when the configuration is made (before a model is
loaded), the hook of each worker when all workers are up, and the package itself by `required.py`.
"""

from collections.abc import Callable
from typing import Any, Final

from draftproof.integrations.vllm import requests, runner_v1, runner_v2
from draftproof.integrations.vllm.hooks import Hook, Hooks, RefusedError
from draftproof.integrations.vllm.log import logger
from draftproof.integrations.vllm.settings import Settings, settings_of, uses_v2


def register() -> None:
    """Install the hooks of both model runners. An engine that does not ask for the plug-in stays stock vLLM."""
    for hooks in (CONFIG, ENGINE, runner_v1.HOOKS, runner_v2.HOOKS):
        hooks.install()
    if CONFIG.problems:  # nothing could refuse later
        raise RefusedError(
            f"draftproof does not know this vLLM: {CONFIG.problems[0]}. Uninstall draftproof, or leave it out of "
            "VLLM_PLUGINS, to run stock vLLM"
        )


def _checks_config(original: Callable[..., None]) -> Callable[..., None]:
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        check(self)

    return __post_init__


def check(config: Any) -> None:
    """Refuse a configuration that asks for the plug-in where it cannot serve."""
    settings = settings_of(config)
    if settings is None:
        return
    speculation = config.speculative_config
    if speculation is None:
        logger().warning("draftproof: nothing to verify, as there is no speculative_config; sampling is vLLM's own")
        return
    runner, hooks = ("V2", runner_v2.HOOKS) if uses_v2(config) else ("V1", runner_v1.HOOKS)
    problems = ENGINE.problems + hooks.problems
    if problems:
        raise RefusedError(
            f"draftproof does not know model runner {runner} of this vLLM: {problems[0]}. Use a version that "
            "draftproof was tested with, or leave additional_config['draftproof'] out"
        )
    method = getattr(speculation, "rejection_sample_method", "standard")
    if method != "standard":
        raise RefusedError(
            f"rejection_sample_method={method!r} contradicts additional_config['draftproof'], whose rule verifies "
            "drafts: leave one of them out"
        )
    if getattr(config, "watermark_config", None) is not None:
        raise RefusedError("draftproof does not watermark: leave additional_config['draftproof'] or the watermark out")


def _asks_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        settings = settings_of(vllm_config)
        if settings is not None and vllm_config.speculative_config is not None:
            confirm(self.model_executor.collective_rpc(rule_of_worker), settings)
        return original(self, vllm_config)

    return _initialize_kv_caches


def rule_of_worker(worker: Any) -> str | None:
    """Return the rule by which a worker verifies, "stock" for vLLM's own, None for a worker that does not sample.

    It is sent to the workers by name: one without this package cannot read it, and the engine does not start.
    """
    sampler = getattr(worker.model_runner, "rejection_sampler", None)
    if sampler is None:
        return None
    settings: Settings | None = getattr(sampler, runner_v1.ATTRIBUTE, None)
    return "stock" if settings is None else settings.rule


def confirm(rules: list[str | None], settings: Settings) -> None:
    """Refuse to start unless every worker that samples verifies by the rule that was asked for."""
    sampling = [rule for rule in rules if rule is not None]
    if not sampling or any(rule != settings.rule for rule in sampling):
        raise RefusedError(
            f"additional_config['draftproof'] asks for the rule {settings.rule!r}, and the workers verify by {rules}: "
            "is draftproof installed for every worker and not left out of VLLM_PLUGINS?"
        )


CONFIG: Final = Hooks((Hook("vllm.config:VllmConfig.__post_init__", ("self",), _checks_config),))
ENGINE: Final = Hooks(
    (
        Hook("vllm.v1.engine.core:EngineCore._initialize_kv_caches", ("self", "vllm_config"), _asks_workers),
        *requests.HOOKS,
    )
)
