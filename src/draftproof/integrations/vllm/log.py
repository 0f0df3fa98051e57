"""Write what is active to vLLM's log, in one line."""

import re
from importlib import import_module
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
    note += untested(str(getattr(import_module("vllm"), "__version__", "without a version")))
    logger().info(message, version("draftproof"), runner, settings.rule, note)


UNTRIED: Final = "; not verified end to end: on a GPU it was tested with synthetic batches only"
"""What the log says of a model runner that no test of ours has run."""

TESTED: Final = ((0, 28), (0, 32))
"""The first and the last minor version of vLLM that the plug-in was tested with."""


def untested(vllm_version: str) -> str:
    """Say that a version of vLLM was not tested; empty for one that was.

    It is served all the same: what the plug-in depends on is compared when it is installed.
    """
    numbers = re.match(r"(\d+)\.(\d+)", vllm_version)
    if numbers and TESTED[0] <= (int(numbers[1]), int(numbers[2])) <= TESTED[1]:
        return ""
    first, last = (".".join(map(str, minor)) for minor in TESTED)
    return f"; vLLM {vllm_version} was not tested, {first} to {last} were"
