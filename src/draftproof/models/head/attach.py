"""Attach a head to its target: the target's embeddings before the head, and its output rows after it."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftproof.core.distribution import DraftVocab
from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.cpu_linear import bfloat16_packable, pack, pack_bfloat16, packable
from draftproof.models.fingerprint import PerModel, fingerprint, weights_version
from draftproof.models.head import dflash_file, eagle3_file, mtp
from draftproof.models.head import file as headfile
from draftproof.models.head.checkpoint import Checkpoint
from draftproof.models.head.dflash import FittedDFlash
from draftproof.models.head.dflash_file import DFlashDraft
from draftproof.models.head.eagle3 import Eagle3
from draftproof.models.head.eagle3_file import Eagle3Head
from draftproof.models.head.network import FittedHead, Head
from draftproof.models.head.taps import embeddings, output_rows
from draftproof.models.head.vocabulary import PublishedVocabulary
from draftproof.models.int4_linear import pack_int4, runs_int4

ON_CPU: Final = 12288
"""Tokens in the draft vocabulary on a CPU, where a step is bound by reading its weights. More tokens would raise
acceptance a little and cost more time than they save (docs/decisions.md)."""

SHIPPED: Final = Path(__file__).parents[2] / "heads" / "smollm2-135m"
"""The folder of the head that the package ships for the bundled model."""

Net = TypeVar("Net", bound=nn.Module)
F = TypeVar("F", FittedHead, FittedDFlash)

_FITTED: PerModel[Any] = PerModel()
"""The last head attached to each target that is alive: reading one and laying out its weights takes 70 ms."""


def attach(head: Head, ids: Int[Tensor, " all"], model: PreTrainedModel, size: int | None = None) -> FittedHead:
    """Attach a copy of a head to a target; see `FittedHead.on`."""
    size = size or (ON_CPU if model.device.type == "cpu" else len(ids))
    return _assemble(copy.deepcopy(head), embeddings(model), output_rows(model, ids[:size]), ids[:size], model)


def attach_eagle3(head: Eagle3Head, model: PreTrainedModel, source: str) -> FittedHead:
    """Attach a published EAGLE-3 head to a target; what it does not bring is the target's. It must not be used again.

    All its draft vocabulary is used: it is stored by token id, so its first part is not the most frequent one.
    """
    eagle3_file.check_target(head, model, source)
    return _assemble(head.network, *_vocabulary_on(model, head.vocabulary), model)


def attach_dflash(draft: DFlashDraft, model: PreTrainedModel, source: str) -> FittedDFlash:
    """Attach a DFlash drafter to a target, as `attach_eagle3` does."""
    dflash_file.check_target(draft, model, source)
    table, rows, ids = _vocabulary_on(model, draft.vocabulary)
    network, layer, vocab = _laid_out(draft.network, rows, ids, model)
    return FittedDFlash(network, table, layer, vocab)


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


def _assemble(
    network: Head | Eagle3,
    table: Float[Tensor, "V H"],
    output: Float[Tensor, "R H"],
    ids: Int[Tensor, " R"],
    model: PreTrainedModel,
) -> FittedHead:
    network, rows, vocab = _laid_out(network, output, ids, model)
    return FittedHead(network, table, rows, vocab)


def _laid_out(
    network: Net, output: Float[Tensor, "R H"], ids: Int[Tensor, " R"], model: PreTrainedModel
) -> tuple[Net, nn.Module, DraftVocab]:
    """Move network and output rows to the target's device, in float32, and lay them out for a CPU."""
    device = torch.device(model.device)
    network = network.to(device=device, dtype=torch.float32).eval().requires_grad_(False)
    rows = nn.Sequential(_linear(output.to(device=device, dtype=torch.float32)))
    for part in (network, rows):
        if runs_int4(model) and pack_int4(part):
            continue  # a drafter for a fast target must be fast; what it loses in precision is a few accepted tokens
        if bfloat16_packable(part) and not _has_bias(part):
            pack_bfloat16(part)
        elif packable(part):
            pack(part)
    return network, rows, DraftVocab.of(ids.to(device=device, dtype=torch.long), head_size(model))


def _has_bias(network: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) and module.bias is not None for module in network.modules())


def fitted(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """Load the head in this folder and attach it to its target; refuse any other target.

    It is read once for each target, and again if the files or the target have changed.
    """
    return _cached(folder, headfile.file_stamps(folder), model, lambda: _fit(folder, model))


def fitted_eagle3(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """Load a published EAGLE-3 head, from a folder or the hub, and attach it to its target; see `fitted`."""
    checkpoint = Checkpoint.of(folder)

    def fit() -> FittedHead:
        warn_other_target(checkpoint, model)
        head = eagle3_file.load(checkpoint, decoder_config(model).num_hidden_layers)
        return attach_eagle3(head, model, str(checkpoint.folder))

    return _cached(checkpoint.folder, checkpoint.stamps(), model, fit)


def fitted_dflash(folder: str | Path, model: PreTrainedModel) -> FittedDFlash:
    """Load a DFlash drafter, from a folder or the hub, and attach it to its target; see `fitted`."""
    checkpoint = Checkpoint.of(folder)

    def fit() -> FittedDFlash:
        warn_other_target(checkpoint, model)
        draft = dflash_file.load(checkpoint, decoder_config(model).num_hidden_layers)
        return attach_dflash(draft, model, str(checkpoint.folder))

    return _cached(checkpoint.folder, checkpoint.stamps(), model, fit)


def fitted_mtp(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    """Load the MTP layer of a target's own checkpoint, or of the named one, and attach it; see `fitted`."""
    checkpoint = mtp.checkpoint_of(model, folder)
    return _cached(
        checkpoint.folder, checkpoint.stamps(), model, lambda: mtp.attach_mtp(mtp.load(checkpoint, model), model)
    )


def warn_other_target(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Warn if a published drafter names another kind of target: few of its drafts would be accepted."""
    settings = checkpoint.config.get("speculators_config") or {}
    named = (settings.get("verifier") or {}).get("architectures") or []
    if named and type(model).__name__ not in named:
        warnings.warn(
            f"{checkpoint.folder} was trained for {', '.join(named)}, and the target is a {type(model).__name__}: "
            "texts stay exact, but few drafts may be accepted",
            stacklevel=2,
        )


def _cached(folder: str | Path, stamps: Any, model: PreTrainedModel, make: Callable[[], F]) -> F:
    key = (str(folder), stamps, fingerprint(model), weights_version(model))
    found: F = _FITTED.get(model, "head", key, make)
    return found


def _fit(folder: str | Path, model: PreTrainedModel) -> FittedHead:
    head, meta = headfile.load(folder)
    headfile.check_target(meta, model)
    return FittedHead.on(head, torch.tensor(meta.ids), model)


def shipped_fits(model: PreTrainedModel) -> bool:
    """Return whether the package ships a head that was trained on this model."""
    try:
        headfile.check_target(headfile.load_metadata(SHIPPED), model)
    except ValueError:
        return False
    return True


def _linear(weight: Float[Tensor, "R H"]) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return layer
