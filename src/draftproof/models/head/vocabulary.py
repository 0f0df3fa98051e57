"""Vocabulary of a published drafter: its tokens, input embeddings and output rows, its own or the target's."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.models.compatibility import decoder_config, head_size
from draftproof.models.head.checkpoint import CONFIG, Checkpoint, check_numbers
from draftproof.models.transformers_types import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class PublishedVocabulary:
    """What a checkpoint says about tokens; None stands for the target's own.

    ids          the target's token of each entry of the draft vocabulary; None: all tokens
    embeddings   input embeddings
    output_rows  output layer over the draft vocabulary
    """

    ids: Int[Tensor, " R"] | None
    embeddings: Float[Tensor, "V H"] | None
    output_rows: Float[Tensor, "R H"] | None


def take_vocabulary(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], layer_config: PreTrainedConfig
) -> PublishedVocabulary:
    """Take the vocabulary out of a checkpoint's tensors: entry i is the target's token i + d2t[i]."""
    d2t, table, rows = (tensors.pop(name, None) for name in ("d2t", "embed_tokens.weight", "lm_head.weight"))
    hidden, known = layer_config.hidden_size, 0 if table is None else len(table)
    size = checkpoint.config.get("draft_vocab_size") or layer_config.vocab_size
    for name, tensor, shape in (
        ("d2t", d2t, [size]),
        ("lm_head.weight", rows, [size, hidden]),
        ("embed_tokens.weight", table, [known, hidden]),
    ):
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(
                f"{checkpoint.folder}: tensor {name!r} has shape {list(tensor.shape)}, and its {CONFIG} asks for "
                f"{shape}: config and weights do not belong together"
            )
        if tensor is not None and name != "d2t":
            check_numbers(tensor, name, checkpoint.folder)
    if d2t is None and size != layer_config.vocab_size:
        raise ValueError(
            f"{checkpoint.folder} lacks tensor 'd2t' of shape [{size}]: without it nobody knows which of the "
            f"{layer_config.vocab_size} tokens the {size} of the draft vocabulary are"
        )
    if d2t is None:
        return PublishedVocabulary(None, table, rows)
    if rows is None:
        raise ValueError(f"{checkpoint.folder} lacks tensor 'lm_head.weight' of shape [{size}, {hidden}]: get it again")
    ids = _tokens(checkpoint, d2t)
    _check_inverse(checkpoint, ids)
    return PublishedVocabulary(ids, table, rows)


def check_vocabulary(vocabulary: PublishedVocabulary, hidden: int, model: PreTrainedModel, source: str) -> None:
    """Refuse a target whose sizes do not fit the vocabulary of a drafter of width `hidden`."""
    table, rows, ids = vocabulary.embeddings, vocabulary.output_rows, vocabulary.ids
    width, tokens = decoder_config(model).hidden_size, head_size(model)
    if table is None:
        check_equal("without an 'embed_tokens.weight' it needs embeddings of width", hidden, width, source)
    elif len(table) < tokens:
        check_equal("tokens in tensor 'embed_tokens.weight':", len(table), tokens, source)
    if rows is None:
        check_equal("without an 'lm_head.weight' it needs output rows of width", hidden, width, source)
    elif ids is None:
        check_equal("tokens in tensor 'lm_head.weight':", len(rows), tokens, source)
    if ids is not None and int(ids.max()) >= tokens:
        raise ValueError(
            f"{source} is for another target: last token in tensor 'd2t': {int(ids.max())}, and the target has "
            f"{tokens} tokens, counted from 0. Use the target it was trained for, or a drafter for this one"
        )


def check_equal(what: str, expected: int, found: int, source: str) -> None:
    """Refuse a target in which a size is not the expected one."""
    if expected != found:
        raise ValueError(
            f"{source} is for another target: {what} {expected}, and the target has {found}. Use the target it was "
            "trained for, or a drafter for this one"
        )


def _tokens(checkpoint: Checkpoint, d2t: Tensor) -> Int[Tensor, " R"]:
    """Return the target's token of each entry of the draft vocabulary; refuse a map that is not one to one."""
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(f"{checkpoint.folder}: tensor 'd2t' must hold whole numbers; got {d2t.dtype}: get it again")
    ids = torch.arange(len(d2t)) + d2t.long()
    if int(ids.min()) < 0:
        entry = int(ids.argmin())
        raise ValueError(
            f"{checkpoint.folder}: tensor 'd2t' names token {int(ids[entry])} in entry {entry} (entry + d2t[entry]), "
            "and tokens are counted from 0: the file is damaged, get it again"
        )
    tokens, counts = ids.unique(return_counts=True)
    if len(tokens) < len(ids):
        raise ValueError(
            f"{checkpoint.folder}: tensor 'd2t' names token {int(tokens[counts.argmax()])} {int(counts.max())} times, "
            "and each entry must be a token of its own: the file is damaged, get it again"
        )
    return ids


def _check_inverse(checkpoint: Checkpoint, ids: Int[Tensor, " R"]) -> None:
    """Refuse a checkpoint whose two maps between the vocabularies disagree: one of them is damaged."""
    if "t2d" not in checkpoint.names:
        return
    drafted = checkpoint.read(["t2d"])["t2d"].nonzero().flatten()
    if not torch.equal(ids.sort().values, drafted):
        raise ValueError(
            f"{checkpoint.folder}: tensors 'd2t' and 't2d' name different tokens ({len(ids)} and {len(drafted)}): "
            "the file is damaged, get it again"
        )
