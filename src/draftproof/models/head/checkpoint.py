"""Read published checkpoints: a folder with a config.json and weights in safetensors, checked name by name.

Pickled weights are refused, because loading them can run any code.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
"""Names, in checkpoints of more than one file, the file of each tensor."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder's configuration, and which of its files holds each tensor."""

    folder: Path
    config: dict[str, Any]
    files: dict[str, Path]

    @classmethod
    def of(cls, name: str | Path) -> "Checkpoint":
        """Open a folder, or a model of the Hugging Face hub by its id, without reading tensors."""
        folder = local_folder(name)
        return cls(folder, read_config(folder), _files(folder))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.files)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read these tensors; a number with a fraction becomes float32."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name not in self.files:
                raise ValueError(f"{self.folder} holds no tensor {name!r}: the checkpoint is incomplete, get it again")
            by_file.setdefault(self.files[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for file, wanted in by_file.items():
            with _opened(file) as opened:
                for name in wanted:
                    tensors[name] = _tensor(opened, name, file)
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}

    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return time and size of the files, which differ once the checkpoint is replaced."""
        stats = [path.stat() for path in sorted({self.folder / CONFIG, *self.files.values()})]
        return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


def local_folder(name: str | Path) -> Path:
    """Return the folder of this name, or that of a hub id, downloaded if it is not on this machine."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{str(name)!r} is neither a folder nor a hub id that can be reached: check the path, or download it where "
            f"there is a network and name its folder ({error})"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is no published checkpoint: it has no {CONFIG}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): get the file again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object; got a {type(config).__name__}")
    return config


def load_exactly(
    network: nn.Module, tensors: Mapping[str, Tensor], source: Path, in_file: Callable[[str], str] = str
) -> None:
    """Load a network's weights, after checking that every one is there in its shape, and no other.

    Nothing is loaded if anything is wrong. `in_file` gives the name that a tensor has in the file, for the messages.
    """
    expected = network.state_dict()
    for name, weight in expected.items():
        if name not in tensors:
            raise ValueError(
                f"{source} lacks tensor {in_file(name)!r} of shape {list(weight.shape)}, which its {CONFIG} asks for: "
                "the checkpoint is incomplete or of another kind"
            )
        if tensors[name].shape != weight.shape:
            raise ValueError(
                f"{source}: tensor {in_file(name)!r} has shape {list(tensors[name].shape)}, and its {CONFIG} asks for "
                f"{list(weight.shape)}: config and weights do not belong together"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise ValueError(
            f"{source} holds tensor {in_file(unknown[0])!r} of shape {list(tensors[unknown[0]].shape)} that this kind "
            f"of head does not have ({len(unknown)} such): its {CONFIG} lacks the option that uses it, or it is of "
            "another kind"
        )
    for name, tensor in tensors.items():
        check_numbers(tensor, in_file(name), source)
    network.load_state_dict(tensors)


def check_numbers(tensor: Tensor, name: str, source: Path) -> None:
    """Refuse weights that are whole numbers, as in quantised checkpoints, or not finite."""
    if not tensor.is_floating_point():
        raise ValueError(
            f"{source}: tensor {name!r} holds {str(tensor.dtype).removeprefix('torch.')}, and weights in float32, "
            "bfloat16 or float16 were expected: take a checkpoint that is not quantised"
        )
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{source}: tensor {name!r} holds NaN or infinity: the file is damaged, get it again")


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes that a config.json names."""
    named = config.get("architectures")
    return tuple(map(str, named)) if isinstance(named, list) else (named,) if isinstance(named, str) else ()


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    if (folder / INDEX).is_file():
        return _sharded(folder)
    found = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        pickles = [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
        if pickles and not found:
            raise ValueError(
                f"{folder} holds its weights as a pickle, {sorted(pickles)[0]}, which can run any code when loaded: "
                f"convert it with safetensors.torch.save_file to {WEIGHTS}"
            )
        raise ValueError(f"{folder} must hold {WEIGHTS}, or {INDEX} with the files it names; found {len(found)} files")
    with _opened(found[0]) as opened:
        return dict.fromkeys(opened.keys(), found[0])


def _sharded(folder: Path) -> dict[str, Path]:
    try:
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): folder / str(file) for tensor, file in names.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} must be JSON with a weight_map of tensors to files: {error!r}") from error
    for path in sorted(set(files.values())):
        if path.parent != folder or not path.is_file():
            raise ValueError(f"{folder / INDEX} names {path.name}, which is not in the folder: get the missing file")
    return files


def _tensor(opened: Any, name: str, file: Path) -> Tensor:
    try:
        tensor: Tensor = opened.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(
            f"{file} holds no tensor {name!r}, although {INDEX} says so ({error}): get both files again"
        ) from error
    return tensor


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        fault = "truncated" if file.is_file() else "not there"
        raise ValueError(f"{file} cannot be read as safetensors ({error}): it is {fault}, get it again") from error
