"""Write what is active to vLLM's log, in one line."""

from importlib.metadata import version
from typing import Any, Final

from draftproof.integrations.vllm.settings import Settings


def logger() -> Any:
    """Return a logger with vLLM's handlers and level."""
    from vllm.logger import init_logger

    return init_logger("vllm.draftproof")


def announce(settings: Settings, runner: str, note: str = "") -> None:
    """Say which rule verifies drafts in this process, and where."""
    message = "draftproof %s: model runner %s verifies drafts by the rule %r%s"
    logger().info(message, version("draftproof"), runner, settings.rule, note)


UNTRIED: Final = "; not verified end to end: on a GPU it was tested with synthetic batches only"
"""What the log says of a model runner that no test of ours has run."""
