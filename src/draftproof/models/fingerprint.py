"""Tell whether a model has changed since something was derived from it.

A structural copy (weight_sharing.py) shares a model's tensors, so it follows weights that change in place. It does not
follow a replaced parameter or module, another device or dtype, a changed attribute (an adapter switched off) or a new
hook: those change the fingerprint.
"""

import sys
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

T = TypeVar("T")

Fingerprint = tuple[Any, ...]

_MODULE_STATE: Final = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has; of these only the tensors, submodules and hooks count, which are read by name."""

_VALUES: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)
"""Types that are compared by value."""


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return what a copy of the model depends on, to be compared with `==`: a few milliseconds for 500 modules.

    Objects of unknown types are compared by identity.
    """
    configs: dict[int, Fingerprint] = {}
    return (*(_module(module, configs) for module in model.modules()), tuple(configs.values()))


def weights_version(model: nn.Module) -> int:
    """Return a number that grows when weights change in place, for what copies their values."""
    return sum(weight._version for weight in model.parameters() if not weight.is_inference())


class PerModel(Generic[T]):
    """A cache of one value for each model and name, dropped with the model; threads may share it.

    The value must not refer to the model, which would then never be dropped.
    """

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[nn.Module, dict[str, tuple[Any, T]]] = WeakKeyDictionary()
        self._lock = Lock()

    def get(self, model: nn.Module, name: str, key: Any, make: Callable[[], T]) -> T:
        """Return the value of this name, made with `make` if there is none or it was made for another key.

        Put `fingerprint(model)` into the key of what depends on the model.
        """
        with self._lock:
            found = self._entries.get(model, {}).get(name)
        if found is not None and found[0] == key:
            return found[1]
        value = make()
        with self._lock:
            self._entries.setdefault(model, {})[name] = (key, value)
        return value


def _module(module: nn.Module, configs: dict[int, Fingerprint]) -> Fingerprint:
    own = vars(module)
    return (
        type(module),
        *((name, _tensor(tensor)) for name, tensor in own["_parameters"].items()),
        *((name, _tensor(tensor)) for name, tensor in own["_buffers"].items()),
        tuple(own["_modules"]),
        *(tuple(own[hooks]) for hooks in ("_forward_hooks", "_forward_pre_hooks")),
        *((name, _value(own[name], configs)) for name in own if name not in _MODULE_STATE),
    )


def _tensor(tensor: Tensor | None) -> Fingerprint:
    """Identify a parameter or buffer. A copy keeps it alive, so that its id is not used again."""
    if tensor is None:
        return ()
    # Quantised and fake tensors, subclasses, may have no address.
    address = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else None
    return (id(tensor), address, tensor.dtype, tensor.device)


def _value(value: Any, configs: dict[int, Fingerprint]) -> Any:
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, Mapping):
        return tuple((_value(name, configs), _value(each, configs)) for name, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_value(each, configs) for each in value)
    if _is_config(value):
        if id(value) not in configs:  # most modules refer to the same one
            configs[id(value)] = ()
            configs[id(value)] = tuple((name, _value(each, configs)) for name, each in vars(value).items())
        return id(value)
    if isinstance(value, Tensor) and not value.is_inference():
        return (id(value), value._version)  # neither parameter nor buffer: a copy has its own
    return (type(value), id(value))


def _is_config(value: Any) -> bool:
    """Return whether this is a configuration of transformers; without transformers there is none."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.PreTrainedConfig | transformers.GenerationConfig)
