"""Replace functions of vLLM by ours, once, and only where all that ours was written for is there as it was."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any, Final

MARK: Final = "_draftproof_hook"

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class RefusedError(RuntimeError):
    """The engine asked for draftproof's verification and cannot have it; the message says why.

    It is no ValueError: vLLM makes its configuration by pydantic, which would hide the sentence in a report of its own.
    """

    exit_status: Final = 2  # of `draftproof audit`: a request that cannot be served


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of vLLM that we replace or call.

    place       "module:Class.method" or "module:function"
    parameters  names of the first parameters; further ones must have defaults
    wrap        makes the replacement from the original; None: the function is called by ours and stays
    copies      modules that may hold the function under its own name because they imported it
    """

    place: str
    parameters: tuple[str, ...]
    wrap: Wrapper | None = None
    copies: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Say why this vLLM has no such function; None if it has one."""
        try:
            owner, name = self._owner()
            return wrong_parameters(getattr(owner, name), self.parameters)
        except Exception as error:  # whatever importing an unknown vLLM raises: engines that do not ask must start
            return f"{self.place} is not there ({error!r})"

    def install(self) -> None:
        """Replace the function, unless that was done before: plug-ins are loaded several times."""
        owner, name = self._owner()
        original = getattr(owner, name)
        if self.wrap is None or hasattr(original, MARK):
            return
        replacement = wraps(original)(self.wrap(original))
        setattr(replacement, MARK, original)
        setattr(owner, name, replacement)
        for module in map(sys.modules.get, self.copies):
            if getattr(module, name, None) is original:
                setattr(module, name, replacement)

    def _owner(self) -> tuple[Any, str]:
        return owner_of(self.place)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Names in vLLM that verification must know all of, such as its logits processors: it would leave a new one out.

    place     "module:object"
    known     their names
    names_of  reads the names from the object
    """

    place: str
    known: tuple[str, ...]
    names_of: Callable[[Any], list[str]]

    def problem(self) -> str | None:
        """Say what this vLLM has and ours does not know, or the other way round; None if they agree."""
        try:
            owner, name = owner_of(self.place)
            found = self.names_of(getattr(owner, name))
        except Exception as error:
            return f"{self.place} is not there ({error!r})"
        new, missing = (sorted(set(a) - set(b)) for a, b in ((found, self.known), (self.known, found)))
        return f"{self.place} has {new}, which is new, and lacks {missing}" if new or missing else None

    def install(self) -> None:
        """Replace nothing."""


def owner_of(place: str) -> tuple[Any, str]:
    """Return the module or class that holds a thing of vLLM, and the thing's name there."""
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def wrong_parameters(function: Callable[..., Any], names: tuple[str, ...]) -> str | None:
    """Say how a function's parameters differ from the expected ones; None if they do not."""
    have = list(inspect.signature(function).parameters.values())
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    first = tuple(p.name for p in have[: len(names)])
    required = [p.name for p in have[len(names) :] if p.default is p.empty and p.kind not in optional]
    if first == names and not required:
        return None
    return f"{function.__qualname__} has the parameters {[p.name for p in have]}, expected {list(names)}"


@dataclass(slots=True)
class Hooks:
    """All hooks of one model runner: installed together or not at all."""

    hooks: tuple[Hook | Inventory, ...]
    problems: list[str] = field(default_factory=list)
    installed: bool = False

    def install(self) -> None:
        """Install every hook, or none if one of them does not fit; `problems` then says why."""
        self.problems = [problem for hook in self.hooks if (problem := hook.problem()) is not None]
        if not self.problems:
            for hook in self.hooks:
                hook.install()
            self.installed = True
