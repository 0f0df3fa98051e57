"""Start the plug-in: vLLM calls `register` in every process. An engine that asks for it and cannot have it is refused.

An engine that silently verified as stock vLLM does would have another distribution than its operator believes. So what
can be missing is looked for at two places: settings and hooks when the configuration is made, before a model is loaded,
and the hook of each worker when all workers are up. Where vLLM does not load this plug-in at all, it refuses
`speculative_config["draftproof"]` by itself: it forbids fields that it does not know there.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal

from draftproof.integrations.vllm import requests
from draftproof.integrations.vllm.hooks import Hook, Hooks, RefusedError
from draftproof.integrations.vllm.log import logger
from draftproof.integrations.vllm.settings import ATTRIBUTE, KEY, Settings, settings_of, uses_v2

Runner = Literal["V1", "V2"]


def register() -> None:
    """Install the hooks of both model runners. An engine that does not ask for the plug-in stays stock vLLM."""
    for hooks in (ARGUMENTS, CONFIG, ENGINE, hooks_of("V1"), hooks_of("V2")):
        hooks.install()
    if ARGUMENTS.problems and CONFIG.problems:  # nothing could refuse later
        raise RefusedError(
            f"draftproof does not know this vLLM: {CONFIG.problems[0]}. Uninstall draftproof, or leave it out of "
            "VLLM_PLUGINS, to run stock vLLM"
        )


@cache
def hooks_of(runner: Runner) -> Hooks:
    """Return the hooks of a model runner; hooks with a problem where our own module cannot be imported.

    Importing it brings torch and our kernels. If one of them is missing, engines that ask are refused, others start.
    """
    try:
        hooks: Hooks = import_module(f"draftproof.integrations.vllm.runner_{runner.lower()}").HOOKS
    except Exception as error:
        return Hooks((Hook(f"draftproof.integrations.vllm.runner_{runner.lower()}:HOOKS", ()),), [repr(error)])
    return hooks


def _moves_settings(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        move_settings(self)
        if settings_of(self) is not None and CONFIG.problems:
            raise RefusedError(f"draftproof does not know the configuration of this vLLM: {CONFIG.problems[0]}")
        return original(self, *args, **kwargs)

    return create_engine_config


def move_settings(arguments: Any) -> None:
    """Move `speculative_config["draftproof"]` to `additional_config`, which every process of the engine gets."""
    speculation = getattr(arguments, "speculative_config", None)
    if not isinstance(speculation, Mapping) or KEY not in speculation:
        return
    additional = getattr(arguments, "additional_config", None) or {}
    if not isinstance(additional, Mapping):
        raise RefusedError(f"additional_config must be a dict beside the setting 'draftproof'; got {additional!r}")
    if KEY in additional:
        raise RefusedError(
            "the setting 'draftproof' is given twice, in speculative_config and in additional_config: leave one out"
        )
    arguments.additional_config = {**additional, KEY: speculation[KEY]}
    arguments.speculative_config = {name: value for name, value in speculation.items() if name != KEY}


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
    runner: Runner = "V2" if uses_v2(config) else "V1"
    problems = ENGINE.problems + hooks_of(runner).problems
    if problems:
        raise RefusedError(
            f"draftproof cannot verify in model runner {runner} of this vLLM: {problems[0]}. Use a version that "
            "draftproof was tested with, or leave the setting 'draftproof' out"
        )
    method = getattr(speculation, "rejection_sample_method", "standard")
    if method != "standard":
        raise RefusedError(
            f"rejection_sample_method={method!r} contradicts the setting 'draftproof', whose rule verifies drafts: "
            "leave one of them out"
        )
    drawn = getattr(speculation, "draft_sample_method", "greedy") == "probabilistic"
    if drawn and getattr(speculation, "enable_adaptive_verification", False):
        raise RefusedError(
            "draftproof does not verify drawn drafts that enable_adaptive_verification has cut: set it to false, or "
            "draft_sample_method to 'greedy'"
        )
    if getattr(config, "watermark_config", None) is not None:
        raise RefusedError("draftproof does not watermark: leave the setting 'draftproof' or the watermark out")


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
    settings: Settings | None = getattr(sampler, ATTRIBUTE, None)
    return "stock" if settings is None else settings.rule


def confirm(rules: list[str | None], settings: Settings) -> None:
    """Refuse to start unless every worker that samples verifies by the rule that was asked for."""
    sampling = [rule for rule in rules if rule is not None]
    if not sampling or any(rule != settings.rule for rule in sampling):
        raise RefusedError(
            f"draftproof was asked for with the rule {settings.rule!r}, and the workers verify by {rules}: is it "
            "installed for every worker and not left out of VLLM_PLUGINS?"
        )


ARGUMENTS: Final = Hooks((Hook("vllm.engine.arg_utils:EngineArgs.create_engine_config", ("self",), _moves_settings),))
"""If it cannot be installed, vLLM refuses `speculative_config["draftproof"]`."""
CONFIG: Final = Hooks((Hook("vllm.config:VllmConfig.__post_init__", ("self",), _checks_config),))
ENGINE: Final = Hooks(
    (
        Hook("vllm.v1.engine.core:EngineCore._initialize_kv_caches", ("self", "vllm_config"), _asks_workers),
        *requests.HOOKS,
    )
)
