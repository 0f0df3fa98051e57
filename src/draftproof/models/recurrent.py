"""Recurrent states that can be rolled back to the tokens that were kept.

A mixer (a Mamba or DeltaNet block, a gated short convolution) folds every token into a state of fixed size, which
cannot be shortened. So a pass keeps the states before it. When not all of its tokens are kept, the states after those
that are come from what the pass recorded, in one of two ways:

- From scans (scans.py): a convolution's state is a part of its inputs, and a recurrent state is computed from what the
  mixer's scan read. For mixers in which that gives what a replay gives.
- By replay, for all others: a pass records each mixer's arguments, and the results of its linear layers. The mixers run
  again from the states before, over the first n tokens of each row; their linear layers, nearly all of their weights,
  are not computed again, but return their results.

Mixers are found by looking at which modules write to a cache's recurrent layers, not by a list of names.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import LinearAttentionLayer

from draftproof.core.types import InexactError
from draftproof.models.scans import Kept, Scan, hear_scans, states_after

States = dict[tuple[str, int], Tensor]
"""The states of one layer by kind ("conv" or "recurrent") and number; the first dimension is the row."""

CLOSE: Final = 1e-4
"""How far states may be apart in float32 to be the same, as a share of the largest number."""


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers dispatches on this class
    """One layer's recurrent states. An update makes new tensors, so that those before a pass need no copy.

    It always holds states, which are zero at first. That gives what transformers computes without a state.
    """

    def __init__(self, states: States) -> None:
        super().__init__(number_of_states=1 + max((index for _, index in states), default=0))
        # transformers then does not write a single token's convolution in place.
        self.record_past = True
        self.states = states
        self.conv_inputs: dict[int, Tensor] = {}
        """What each convolution read in the last pass, after its state before."""

    @property
    def states(self) -> States:
        return {
            (kind, index): state
            for kind, by_index in (("conv", self.conv_states), ("recurrent", self.recurrent_states))
            for index, state in by_index.items()
            if state is not None
        }

    @states.setter
    def states(self, states: States) -> None:
        for (kind, index), state in states.items():
            (self.conv_states if kind == "conv" else self.recurrent_states)[index] = state
            self.has_previous_state[index] = True

    def put(self, rows: Int[Tensor, " r"] | None, states: States) -> None:
        """Replace the states of these rows; of all rows if None."""
        if rows is None:
            self.states = states
        else:
            for key, state in self.states.items():
                state.index_copy_(0, rows, states[key])

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_kwargs: Any) -> Tensor:
        """Append inputs of a convolution; return them after those that it still reads."""
        before = self.conv_states[state_idx]
        whole = torch.cat([before, conv_states], -1)
        self.conv_states[state_idx] = whole[..., -before.shape[-1] :].clone()  # a view would keep `whole` alive
        self.conv_inputs[state_idx] = whole
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class Call(NamedTuple):
    """How a mixer was called in a pass.

    scans  what its scans read
    args, kwargs, linear  its arguments, and the results of its linear layers in their order: None if it is not replayed
    """

    scans: list[Scan]
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    linear: list[Tensor] | None = None


_recording: ContextVar[dict[int, Call] | None] = ContextVar("calls of mixers that are recorded", default=None)
"""The calls of the running pass by layer. A context variable, so that threads may share a model."""

_replaying: ContextVar[Iterator[Tensor] | None] = ContextVar("results of linear layers in a replay", default=None)


@contextmanager
def recording(calls: dict[int, Call]) -> Iterator[None]:
    """Record the calls of mixers within the context."""
    token = _recording.set(calls)
    try:
        yield
    finally:
        _recording.reset(token)


@dataclass(slots=True)
class Mixer:
    """A module that updates the states of one layer, installed to be recorded and replayed.

    one_row         zero states of one row
    steps_in_place  whether a pass over one token writes into the recurrent state that it reads; True until it is seen
    replayed        whether a rollback replays it, instead of computing its states from what its scan read
    """

    layer: int
    module: nn.Module
    one_row: States
    steps_in_place: bool = True
    replayed: bool = True

    def zeros(self, rows: int) -> States:
        return {key: state.new_zeros((rows, *state.shape[1:])) for key, state in self.one_row.items()}

    def replay(
        self, call: Call, before: States, shape: tuple[int, int], rows: Int[Tensor, " r"] | None, n: int
    ) -> States:
        """Return the states after the first n tokens of these rows; all rows if None.

        before  the states of these rows before the pass
        shape   rows and tokens of the pass
        """
        layer = StateLayer(before)
        if n == 1 and self.steps_in_place:
            layer.states = {key: state.clone() for key, state in before.items()}
        # A mixer reads its own layer only.
        cache = TransformersCache(layers=[layer] * (self.layer + 1))
        parts = (call.args, call.kwargs, call.linear)
        args, kwargs, linear = (_cut(part, shape, rows, n, cache) for part in parts)
        token = _replaying.set(iter(linear))
        try:
            self.module(*args, **kwargs)
        finally:
            _replaying.reset(token)
        return layer.states


def from_scans(
    mixers: Sequence[Mixer],
    calls: Mapping[int, Call],
    before: Mapping[int, States],
    layers: Mapping[int, StateLayer],
    kept: Kept,
) -> dict[int, States]:
    """Return the states of rows after the tokens that they keep by layer, from what convolutions and scans read.

    before  the states of all rows before the pass, by layer
    layers  which know what their convolutions read in the pass
    """
    new: dict[int, States] = {mixer.layer: {} for mixer in mixers}
    recurrent = []
    for layer, states in new.items():
        for (kind, index), state in before[layer].items():
            if kind == "conv":
                states[kind, index] = kept.window(layers[layer].conv_inputs[index], state.shape[-1])
            else:
                (scan,) = calls[layer].scans
                recurrent.append(((layer, index), scan, kept.rows_of(state)))
    places, scans, old = zip(*recurrent, strict=True) if recurrent else ((), (), ())
    for (layer, index), state in zip(places, states_after(scans, old, kept), strict=True):
        new[layer]["recurrent", index] = state
    return new


def same_states(found: States, right: States) -> bool:
    """Tell whether states are the same up to rounding."""
    return all(
        bool((found[key].float() - state.float()).abs().max() <= CLOSE * state.float().abs().max())
        for key, state in right.items()
    )


def in_parts(mixers: Sequence[Mixer], rows: int, limit: int) -> Iterator[list[Mixer]]:
    """Cut a list of mixers into parts whose states take at most `limit` bytes, or that are one mixer."""
    part: list[Mixer] = []
    size = 0
    for mixer in mixers:
        own = rows * sum(state.nbytes for state in mixer.one_row.values())
        if part and size + own > limit:
            yield part
            part, size = [], 0
        part.append(mixer)
        size += own
    if part:
        yield part


def _cut(value: Any, shape: tuple[int, int], rows: Int[Tensor, " r"] | None, n: int, cache: TransformersCache) -> Any:
    """Return an argument of a call for these rows and their first n tokens, with another cache."""
    if isinstance(value, TransformersCache):
        return cache
    if isinstance(value, tuple | list):
        return type(value)(_cut(part, shape, rows, n, cache) for part in value)
    if isinstance(value, dict):
        return {key: _cut(part, shape, rows, n, cache) for key, part in value.items()}
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != shape[1]:
        return value
    return value[:, :n] if rows is None or len(value) != shape[0] else value[rows, :n]


class _RecordedLinear(nn.Module):
    """A mixer's linear layer, whose results are recorded in a pass, and returned from there in a replay."""

    def __init__(self, layer: int, linear: nn.Module) -> None:
        super().__init__()
        self.layer, self.linear = layer, linear

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        replayed = _replaying.get()
        if replayed is not None:
            return next(replayed)
        result: Tensor = self.linear(*args, **kwargs)
        calls = _recording.get()
        results = None if calls is None else calls[self.layer].linear
        if results is not None:
            results.append(result)
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("linear"), name)  # a mixer may look at the weight


@dataclass(slots=True)
class _BeforeMixer:
    """Forward pre-hook of a mixer: records its arguments, and fits the chunks of its scan to the pass.

    A scan pads a pass to whole chunks, of 256 tokens in Mamba-2, at quadratic cost. Any size gives the same result.
    """

    mixer: Mixer
    chunk_size: int | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.chunk_size is not None:
            module.chunk_size = min(self.chunk_size, _tokens(args, kwargs))  # type: ignore[assignment]
        calls = _recording.get()
        if calls is not None:
            calls[self.mixer.layer] = Call([], args, kwargs, []) if self.mixer.replayed else Call([])


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the tokens in a mixer's input, the first of its arguments."""
    first = args[0] if args else next(iter(kwargs.values()))
    return int(first.shape[1])


class _Watched(TransformersCache):  # type: ignore[misc]
    """A cache that notes which modules write to each layer's recurrent states."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.running: list[nn.Module] = []
        self.writers: dict[int, set[nn.Module]] = {}

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self.writers.setdefault(layer_idx, set()).add(self.running[-1])
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self.writers.setdefault(layer_idx, set()).add(self.running[-1])
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    @contextmanager
    def following(self, net: nn.Module) -> Iterator[None]:
        """Follow which modules are running within the context."""
        handles = []
        for module in net.modules():
            handles.append(module.register_forward_pre_hook(lambda module, _: self.running.append(module)))
            handles.append(module.register_forward_hook(lambda *_: self.running.pop() and None, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def find_mixers(net: PreTrainedModel, layers: list[Any], run: Callable[[TransformersCache], object]) -> list[Mixer]:
    """Find the mixers of our copy of a model by a pass, and install what records and replays them.

    layers  of an empty cache, as transformers makes it
    run     runs a pass over one row with a cache
    """
    watched = _Watched(layers)
    with watched.following(net):
        run(watched)
    name = type(net).__name__
    if not watched.writers:
        raise InexactError(
            f"{name} cannot roll back after a rejection: it keeps its recurrent states outside of the cache that "
            "transformers gives it. Use a model with attention in every layer, or transformers' own generate"
        )
    mixers = []
    for layer, (module, *others) in sorted((layer, list(writers)) for layer, writers in watched.writers.items()):
        if others:
            raise InexactError(
                f"{name} cannot roll back after a rejection: in layer {layer}, {type(module).__name__} and "
                f"{type(others[0]).__name__} both write to the recurrent state, and replay knows one module for a layer"
            )
        mixers.append(Mixer(layer, module, _zeros(layers[layer])))
        _install(mixers[-1])
    return mixers


def _zeros(layer: Any) -> States:
    """Return zero states like those that a pass over one row left in a layer."""
    kinds = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return {
        (kind, i): torch.zeros_like(state) for kind, states in kinds for i, state in states.items() if state is not None
    }


def _install(mixer: Mixer) -> None:
    """Let a mixer be recorded and replayed, and obey its limits in passes over one token."""
    module = mixer.module
    _record_linear_layers(mixer.layer, module)
    _limit_time_steps(module)
    module.register_forward_pre_hook(_BeforeMixer(mixer, getattr(module, "chunk_size", None)), with_kwargs=True)

    def hear(scan: Scan) -> None:
        calls = _recording.get()
        if calls is not None:
            calls[mixer.layer].scans.append(scan)

    hear_scans(module, hear)


def _record_linear_layers(layer: int, module: nn.Module) -> None:
    """Wrap the outermost linear layers: an adapter is one, around others. They may be shared with the user's model."""
    for name, child in list(module.named_children()):
        if hasattr(child, "in_features") and hasattr(child, "out_features"):
            setattr(module, name, _RecordedLinear(layer, child))
        else:
            _record_linear_layers(layer, child)


def _limit_time_steps(module: nn.Module) -> None:
    """Clamp a Mamba-2 mixer's time steps where they are projected.

    transformers 5.22 clamps them in its scan, but not in a step over one token (Nemotron-H, Zamba2), so that a text's
    distribution would depend on how it is cut into passes. The softplus between projection and scan is monotonic.
    """
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if low <= 0 and high == math.inf:
        return
    bias = module.get_parameter("dt_bias").detach()
    least, most = (-math.inf if limit <= 0 else _inverse_softplus(limit) for limit in (low, high))

    def clamp(_module: nn.Module, _args: Any, projected: Tensor) -> Tensor:
        rest, steps = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
        return torch.cat([rest, steps.maximum((least - bias).to(steps)).minimum((most - bias).to(steps))], -1)

    module.get_submodule("in_proj").register_forward_hook(clamp)


def _inverse_softplus(value: float) -> float:
    return value if value > 30 else math.log(math.expm1(value))
