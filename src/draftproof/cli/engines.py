"""Engines for the options a user chose: `open_engine` loads one, `Engines` reuses models that are already loaded.

torch and transformers are imported inside the functions, so that `--help` does not pay for them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftproof.cli.console import spinner
from draftproof.cli.options import Choice

if TYPE_CHECKING:
    import torch

    from draftproof.core.sampling import SamplingParams
    from draftproof.engine.engine import Engine
    from draftproof.models.tokenizer import Tokenizer
    from draftproof.rules import Verifier


class Engines:
    """A cache of engines around one target: changing the drafter or the rule does not load the target again."""

    def __init__(self) -> None:
        self._target: tuple[str, str | None, str] | None = None
        self._plain: Engine | None = None
        self._draft_models: dict[str, Engine] = {}
        self._ready: dict[Choice, Engine] = {}

    def get(self, choice: Choice, verifier: "Verifier | None" = None) -> "Engine":
        """Return the engine for this choice; one with a `verifier` in place of the rule is made for this call only."""
        plain = self._plain_engine(choice)
        if verifier is not None:
            return reopen(plain, choice, *self._drafter(choice), verifier=verifier)
        if choice not in self._ready:
            self._ready[choice] = reopen(plain, choice, *self._drafter(choice))
        return self._ready[choice]

    def _plain_engine(self, choice: Choice) -> "Engine":
        """Return the engine without a drafter, which holds the target; load it if the target or device is new."""
        wanted = choice.target, choice.device, choice.weights
        if self._plain is None or self._target != wanted:
            opened = open_engine(replace(choice, drafter=None))
            self._ready.clear()
            self._plain, self._target = opened, wanted
        return self._plain

    def _drafter(self, choice: Choice) -> "tuple[Any, Tokenizer | None]":
        """Return the drafter as `load` takes it, and its tokenizer: None, a name, or a loaded draft model."""
        from draftproof.drafters.registry import is_name, split_way

        name = choice.drafter
        if name is None or is_name(name) or split_way(name)[0] is not None:
            return name, None
        if name not in self._draft_models:
            self._draft_models[name] = open_engine(Choice(name, None, device=choice.device, weights=choice.weights))
        return self._draft_models[name].loaded, self._draft_models[name].tokenizer


def open_engine(
    choice: Choice, verifier: "Verifier | None" = None, dtype: "torch.dtype | None" = None, **limits: Any
) -> "Engine":
    """Load the models and return an engine.

    `verifier` replaces the rule, for example by one that records its decisions; `dtype` replaces the device's default;
    `limits` are those of `load`, such as max_batch.
    """
    choice = prepare(choice, dtype)
    with spinner(f"Loading {choice.target}"):
        if not _without_transformers(choice, dtype):
            quiet_hosts()
        from draftproof.engine.load import load

        return load(
            choice.target,
            choice.drafter,
            rule=verifier or choice.rule,
            num_draft_tokens=choice.num_draft_tokens,
            device=choice.device,
            dtype=dtype,
            weights=choice.weights,
            **limits,
        )


def reopen(
    engine: "Engine",
    choice: Choice,
    drafter: Any,
    draft_tokenizer: "Tokenizer | None" = None,
    *,
    verifier: "Verifier | None" = None,
) -> "Engine":
    """Return another engine around the target of `engine`. `drafter` is a name, a loaded draft model or None."""
    from draftproof.engine.load import load

    with spinner(f"Preparing {choice.drafter or 'plain decoding'}"):
        return load(
            engine.loaded,
            drafter,
            rule=verifier or choice.rule,
            num_draft_tokens=choice.num_draft_tokens,
            tokenizer=engine.tokenizer,
            draft_tokenizer=draft_tokenizer,
            device=choice.device,
            weights=choice.weights,
        )


def sampling_for(engine: "Engine", given: Mapping[str, Any]) -> "SamplingParams":
    """Return the sampling parameters of a request: the engine's own defaults, with the given fields in their place."""
    from draftproof.core.sampling import SamplingParams

    default: SamplingParams = getattr(engine, "default_sampling", None) or SamplingParams(temperature=0.7)
    return replace(default, **given)


def prepare(choice: Choice, dtype: "torch.dtype | None" = None, *, pack: bool = True) -> Choice:
    """Download the bundled model if it is chosen and missing. It shows a progress bar, so no spinner may be running.

    Return the choice: of float32 weights if only these could be had.
    """
    from draftproof.models.bundled import NAME

    if NAME not in (choice.target, choice.drafter):
        return choice
    from draftproof.models.loading import LoadOptions, fetch_bundled

    weights, _ = fetch_bundled(LoadOptions(choice.device, dtype, pack, weights=choice.weights))
    return replace(choice, weights=weights) if choice.target == NAME and weights == "float32" else choice


def bundled_weights(choice: Choice, dtype: "torch.dtype | None" = None, *, pack: bool = True) -> str:
    """Return the kind of file that the bundled model is loaded from: "float32" or "int4"."""
    from draftproof.models.bundled import NAME
    from draftproof.models.loading import LoadOptions, chosen_weights, default_device

    options = LoadOptions(choice.device, dtype, pack, weights=choice.weights)
    return "int4" if chosen_weights(NAME, options, default_device(options)) == "int4" else "float32"


def _without_transformers(choice: Choice, dtype: "torch.dtype | None") -> bool:
    """Return whether transformers is not imported for this choice, so that there is nothing to quiet."""
    from draftproof.drafters.registry import is_name
    from draftproof.models.bundled import NAME

    named = choice.drafter is None or is_name(choice.drafter)
    return choice.target == NAME and named and bundled_weights(choice, dtype) == "int4"


def quiet_hosts() -> None:
    """Turn off the progress bars and warnings of transformers and huggingface_hub.

    They would appear in the middle of a streamed text. Errors are still raised, and the commands report them.
    """
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    hub.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
