"""Attach a published drafter (EAGLE-3, DFlash, MTP) to its target; what it does not bring is the target's."""

import warnings
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.head import dflash_file, eagle3_file, mtp
from draftproof.models.head.attach import assemble, attached_once, dtype_on, laid_out
from draftproof.models.head.checkpoint import Checkpoint, architectures
from draftproof.models.head.dflash import FittedDFlash
from draftproof.models.head.dflash_file import DFlashDraft
from draftproof.models.head.eagle3_file import Eagle3Head
from draftproof.models.head.network import FittedHead
from draftproof.models.head.taps import embeddings, output_rows
from draftproof.models.head.vocabulary import PublishedVocabulary


def attach_eagle3(head: Eagle3Head, model: PreTrainedModel, source: str) -> FittedHead:
    """Attach a published EAGLE-3 head to a target; what it does not bring is the target's. It must not be used again.

    All its draft vocabulary is used: it is stored by token id, so its first part is not the most frequent one.
    """
    eagle3_file.check_target(head, model, source)
    return assemble(head.network, *_vocabulary_on(model, head.vocabulary), model)


def attach_dflash(draft: DFlashDraft, model: PreTrainedModel, source: str) -> FittedDFlash:
    """Attach a DFlash drafter to a target, as `attach_eagle3` does."""
    dflash_file.check_target(draft, model, source)
    table, rows, ids = _vocabulary_on(model, draft.vocabulary)
    network, layer, vocab = laid_out(draft.network, rows, ids, model)
    return FittedDFlash(network, table, layer, vocab, dtype_on(model))


def _vocabulary_on(
    model: PreTrainedModel, vocabulary: PublishedVocabulary
) -> tuple[Float[Tensor, "V H"], Float[Tensor, "R H"], Int[Tensor, " R"]]:
    """Return embeddings, output rows and tokens, the target's where the drafter brings none."""
    ids = torch.arange(head_size(model)) if vocabulary.ids is None else vocabulary.ids
    table, rows = vocabulary.embeddings, vocabulary.output_rows
    return (
        embeddings(model) if table is None else table.to(model.device),
        output_rows(model, ids) if rows is None else rows,
        ids,
    )


def fitted_eagle3(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """Load a published EAGLE-3 head, from a folder or the hub, and attach it to its target; see `fitted`."""
    checkpoint = Checkpoint.of(folder)

    def fit() -> FittedHead:
        warn_other_target(checkpoint, model)
        head = eagle3_file.load(checkpoint, decoder_config(model).num_hidden_layers)
        return attach_eagle3(head, model, str(checkpoint.folder))

    return attached_once(checkpoint.folder, checkpoint.stamps(), model, fit)


def fitted_dflash(folder: str | Path, model: PreTrainedModel) -> FittedDFlash:
    """Load a DFlash drafter, from a folder or the hub, and attach it to its target; see `fitted`."""
    checkpoint = Checkpoint.of(folder)

    def fit() -> FittedDFlash:
        warn_other_target(checkpoint, model)
        draft = dflash_file.load(checkpoint, decoder_config(model).num_hidden_layers)
        return attach_dflash(draft, model, str(checkpoint.folder))

    return attached_once(checkpoint.folder, checkpoint.stamps(), model, fit)


def fitted_mtp(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """Load the MTP layer of a target's own checkpoint, or of the named one, and attach it; see `fitted`."""
    checkpoint = mtp.checkpoint_of(model, folder)
    return attached_once(
        checkpoint.folder, checkpoint.stamps(), model, lambda: mtp.attach_mtp(mtp.load(checkpoint, model), model)
    )


def warn_other_target(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Warn if a published drafter names another kind of target: few of its drafts would be accepted."""
    settings = checkpoint.config.get("speculators_config")
    verifier = settings.get("verifier") if isinstance(settings, dict) else None
    named = architectures(verifier) if isinstance(verifier, dict) else ()
    if named and type(model).__name__ not in named:
        warnings.warn(
            f"{checkpoint.folder} was trained for {', '.join(named)}, and the target is a {type(model).__name__}: "
            "texts stay exact, but few drafts may be accepted",
            stacklevel=2,
        )
