"""Write what is active to vLLM's log, in one line."""

from importlib.metadata import version
from typing import Any

from draftproof.integrations.vllm.settings import Settings


def logger() -> Any:
    """Return a logger with vLLM's handlers and level."""
    from vllm.logger import init_logger

    return init_logger("vllm.draftproof")


def announce(settings: Settings, runner: str, *, verified_end_to_end: bool) -> None:
    """Say which rule verifies drafts in this process, and where."""
    caution = "" if verified_end_to_end else "; this runner was tested with synthetic batches, not end to end"
    message = "draftproof %s: model runner %s verifies drafts by the rule %r%s"
    logger().info(message, version("draftproof"), runner, settings.rule, caution)
