"""Tell which kind of drafter a folder holds, by its files."""

from pathlib import Path
from typing import Any

from draftproof.models.head.checkpoint import CONFIG, read_config
from draftproof.models.head.dflash_file import is_dflash
from draftproof.models.head.eagle3_file import is_eagle3
from draftproof.models.head.file import METADATA


def kind_of(folder: Path) -> str | None:
    """Return "head" for a head of `draftproof train`, or the kind of a published drafter; None for a language model.

    A published drafter of a kind that is not supported is refused: as a language model it would fail later, and with a
    message that says less.
    """
    if (folder / METADATA).is_file():
        return "head"
    if not (folder / CONFIG).is_file():
        return None
    config: dict[str, Any] = read_config(folder)
    if is_eagle3(config):
        return "eagle3"
    if is_dflash(config):
        return "dflash"
    kind = config.get("speculators_model_type")
    if kind is not None:
        raise ValueError(
            f"{folder / CONFIG} is that of a drafter of kind {kind!r}; supported are 'eagle3' and 'dflash'"
        )
    return None
