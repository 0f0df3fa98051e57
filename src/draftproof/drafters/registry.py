"""Make a drafter from its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from draftproof.drafters.interface import Drafter
from draftproof.drafters.model import early_exit
from draftproof.drafters.ngram import NGram
from draftproof.drafters.prompt_lookup import PromptLookup
from draftproof.drafters.suffix import Suffix
from draftproof.drafters.switch import Switch
from draftproof.models.interface import Model

AUTO: Final = "auto"
DFLASH: Final = "dflash"
EAGLE3: Final = "eagle3"
EARLY_EXIT: Final = "early-exit"
HEAD: Final = "head"
MTP: Final = "mtp"
PROMPT_LOOKUP: Final = "prompt-lookup"
SUFFIX_HEAD: Final = "suffix+head"

AUTO_WITH_HEAD: Final = HEAD
"""The drafter that "auto" selects if the package ships a head for the target."""

AUTO_WITHOUT_HEAD: Final = "ngram"
"""The drafter that "auto" selects otherwise: it works with any target."""


def _prompt_lookup(branches: int) -> Drafter:
    if branches > 1:
        raise ValueError(f'"prompt-lookup" copies one text; for branches={branches} take "ngram", "suffix" or a model')
    return PromptLookup()


DRAFTERS: Final[dict[str, Callable[[int], Drafter]]] = {
    "ngram": lambda branches: NGram(branches=branches),
    PROMPT_LOOKUP: _prompt_lookup,
    "suffix": lambda branches: Suffix(branches=branches),
}
"""Drafters that need nothing of the target, each made from a number of branches."""

OF_TARGET: Final = (AUTO, EARLY_EXIT, HEAD, SUFFIX_HEAD, EAGLE3, DFLASH, MTP)
"""Drafters that need the target: "early-exit:n" uses its first n layers; the others read its hidden states."""

OTHER_TOKENIZER: Final = ("tli", "slem")
"""Ways to draft with a model that has another tokenizer: "tli:model" and "slem:model"."""

NAMES: Final = (AUTO, *DRAFTERS, f"{EARLY_EXIT}:n", HEAD, SUFFIX_HEAD, f"{EAGLE3}:folder", f"{DFLASH}:folder", MTP)
"""Everything that `drafter=` takes by name."""


def resolve(
    spec: object,
    target: Model | None = None,
    *,
    branches: int = 1,
    confidence: float | str = 0.0,
    hf: Any = None,
) -> Drafter | None:
    """Make the drafter of this name; return a `Drafter` or None unchanged.

    `spec` comes from the user, so anything that is not a name, a Drafter or None is refused. `branches` applies to
    drafters made here, and `confidence` to heads. `hf` is the target as a transformers model: a head needs its
    embeddings.
    """
    if spec is None:
        return None
    if not isinstance(spec, str):
        if not isinstance(spec, Drafter):
            raise ValueError(f"drafter must have a method propose(contexts, k, rng); {type(spec).__name__} has none")
        return spec
    spec = with_kind(spec)
    if spec in DRAFTERS:
        return DRAFTERS[spec](branches)
    name, _, rest = spec.partition(":")
    if name not in OF_TARGET:
        known = ", ".join(f'"{each}"' for each in NAMES)
        raise ValueError(f"drafter must be one of {known}, None or a Drafter; got {spec!r}")
    if name == EARLY_EXIT:
        return _early_exit(spec, rest, target, branches)
    if name == AUTO:
        return resolve(meant(spec, hf), target, branches=branches, confidence=confidence, hf=hf)
    if not _is_decoder_only(hf):
        raise ValueError(
            f"drafter {spec!r} reads the hidden states of a causal transformers model; the target is a "
            f"{type(hf).__name__}"
        )
    head = _head(name, rest, hf, branches, confidence, graphs=_uses_graphs(target))
    return Switch(Suffix(branches=branches), head) if name == SUFFIX_HEAD else head


def is_name(spec: str) -> bool:
    """Tell whether this is the name of a drafter, or the folder of a head. Any other string may name a draft model."""
    return spec in DRAFTERS or with_kind(spec).partition(":")[0] in OF_TARGET


def with_kind(spec: str) -> str:
    """Write the kind of head before a plain folder that holds one: "folder" becomes "eagle3:folder"."""
    if spec in DRAFTERS or spec.partition(":")[0] in OF_TARGET or not Path(spec).is_dir():
        return spec
    from draftproof.models.head.published import kind_of

    kind = kind_of(Path(spec))
    return spec if kind is None else f"{kind}:{spec}"


def split_way(spec: Any) -> tuple[str | None, Any]:
    """Split "tli:model" into the way to draft and the draft model; return any other argument after None."""
    way, colon, model = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    return (way, model) if colon and way in OTHER_TOKENIZER else (None, spec)


def meant(spec: str, hf: Any) -> str:
    """Return the name that "auto" stands for with this target; return any other name unchanged."""
    return spec if spec != AUTO else AUTO_WITH_HEAD if _has_head(hf) else AUTO_WITHOUT_HEAD


def default_branches(spec: object, rule: object) -> int:
    """Return the default number of candidates per node: 2 for a tree, 1 for a chain and for prompt lookup."""
    if rule != "tree" or spec == PROMPT_LOOKUP:
        return 1
    return 2


def _early_exit(spec: str, layers: str, target: Model | None, branches: int) -> Drafter:
    if not layers.isdecimal():
        raise ValueError(f'drafter "{EARLY_EXIT}:n" wants a number of layers, as in "{EARLY_EXIT}:6"; got {spec!r}')
    if target is None:
        raise ValueError(f"drafter {spec!r} is made of the target's own layers: pass the target")
    return early_exit(target, int(layers), branches=branches)


def _head(name: str, folder: str, hf: Any, branches: int, confidence: float | str, graphs: bool) -> Drafter:
    from draftproof.drafters.head import HeadDrafter
    from draftproof.models.head.attach import SHIPPED, fitted

    if name in (EAGLE3, DFLASH) and not folder:
        raise ValueError(f'drafter "{name}" wants the folder or hub id of a drafter, as in "{name}:folder"')
    if name in (DFLASH, MTP, EAGLE3):
        return _published(name, folder, hf, branches, confidence, graphs)
    if not folder and not SHIPPED.is_dir():
        raise ValueError(
            f"drafter {name!r} is the head of the bundled model, and this installation has none: name one, "
            f'"{HEAD}:folder", or train it: draftproof train'
        )
    return HeadDrafter(fitted(folder or SHIPPED, hf), branches=branches, confidence=confidence, graphs=graphs)


def _published(name: str, folder: str, hf: Any, branches: int, confidence: float | str, graphs: bool) -> Drafter:
    from draftproof.drafters.dflash import DFlashDrafter
    from draftproof.drafters.head import HeadDrafter
    from draftproof.models.head.attach_published import fitted_dflash, fitted_eagle3, fitted_mtp

    if name == DFLASH:
        return DFlashDrafter(fitted_dflash(folder, hf), confidence=confidence, branches=branches)
    if name == MTP:
        # No CUDA graphs: transformers' experts are chosen on the host.
        return HeadDrafter(fitted_mtp(folder, hf), branches=branches, confidence=confidence, graphs=False)
    return HeadDrafter(fitted_eagle3(folder, hf), branches=branches, confidence=confidence, graphs=graphs)


def _uses_graphs(target: Model | None) -> bool:
    """Tell whether a head should use CUDA graphs: only if its target does not refuse them."""
    return getattr(getattr(target, "graph_cache", None), "refusal", None) is None


def _has_head(hf: Any) -> bool:
    """Tell whether the package ships a head trained on this model."""
    if not _is_decoder_only(hf):
        return False
    from draftproof.models.head.attach import SHIPPED, shipped_fits

    return SHIPPED.is_dir() and shipped_fits(hf)


def _is_decoder_only(hf: Any) -> bool:
    config = getattr(hf, "config", None)
    return config is not None and not config.is_encoder_decoder
