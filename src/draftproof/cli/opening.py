"""From what was chosen to an engine, with the models that are in memory already."""

from typing import TYPE_CHECKING, Any

from draftproof.cli.options import Choice
from draftproof.cli.waiting import waiting

if TYPE_CHECKING:
    import torch

    from draftproof.engine.engine import Engine
    from draftproof.verify import Verifier


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
