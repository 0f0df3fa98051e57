"""Engines for whatever is chosen next: models that are in memory stay there."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftproof.cli.console import waiting
from draftproof.cli.options import Choice
from draftproof.drafters.registry import is_name
from draftproof.engine.engine import Engine
from draftproof.rules import Verifier

if TYPE_CHECKING:
    import torch

    from draftproof.engine.engine import Engine
    from draftproof.rules import Verifier


def prepare(choice: Choice) -> None:
    """Fetch the bundled model where it is wanted and missing: that has a progress bar of its own."""
    from draftproof.models import bundled

    if bundled.NAME in (choice.target, choice.drafter) and not bundled.is_cached():
        bundled.fetch()


def open_engine(choice: Choice, verifier: "Verifier | None" = None, dtype: "torch.dtype | None" = None) -> "Engine":
    """Load everything anew. `verifier` stands in for the rule's name, to watch it; `dtype` for the device's default."""
    prepare(choice)
    with waiting(f"Loading {choice.target}"):
        quiet_hosts()
        from draftproof.engine.load import load

        return load(
            choice.target,
            choice.drafter,
            rule=verifier or choice.rule,
            num_draft_tokens=choice.num_draft_tokens,
            device=choice.device,
            dtype=dtype,
        )


def reopen(engine: "Engine", choice: Choice, drafter: Any, verifier: "Verifier | None" = None) -> "Engine":
    """Another engine around the same target. `drafter` is a name, or a draft model in memory."""
    from draftproof.engine.load import load

    with waiting(f"Preparing {choice.drafter or 'plain decoding'}"):
        return load(
            engine.hf,
            drafter,
            rule=verifier or choice.rule,
            num_draft_tokens=choice.num_draft_tokens,
            tokenizer=engine.tokenizer,
            device=choice.device,
        )


def quiet_hosts() -> None:
    """Their bars and advice would land in the middle of a streamed text; what fails is said in our own words."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    hub.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


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
