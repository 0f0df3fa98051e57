"""Engines for whatever is chosen next: models that are in memory stay there."""

from dataclasses import replace
from typing import Any

from draftproof.cli.opening import open_engine, reopen
from draftproof.cli.options import Choice
from draftproof.drafters.table import is_name
from draftproof.engine.engine import Engine
from draftproof.verify import Verifier


class Engines:
    """One target at a time, any drafters and rules around it."""

    def __init__(self) -> None:
        self._target: tuple[str, str | None] | None = None
        self._plain: Engine | None = None
        self._draft_models: dict[str, Any] = {}
        self._ready: dict[Choice, Engine] = {}

    def of(self, choice: Choice, verifier: Verifier | None = None) -> Engine:
        """An engine for this choice; with a verifier in place of its rule, made anew."""
        plain = self._around(choice)
        if verifier is not None:
            return reopen(plain, choice, self._drafter(choice), verifier)
        if choice not in self._ready:
            self._ready[choice] = reopen(plain, choice, self._drafter(choice))
        return self._ready[choice]

    def _around(self, choice: Choice) -> Engine:
        wanted = choice.target, choice.device
        if self._plain is None or self._target != wanted:
            opened = open_engine(replace(choice, drafter=None))
            self._ready.clear()
            self._plain, self._target = opened, wanted
        return self._plain

    def _drafter(self, choice: Choice) -> Any:
        """A name of ours, None, or the draft model of this name."""
        name = choice.drafter
        if name is None or is_name(name):
            return name
        if name not in self._draft_models:
            self._draft_models[name] = open_engine(Choice(name, None, device=choice.device)).hf
        return self._draft_models[name]
