"""Recurrent states after the first tokens of a pass, computed from what the scans of the pass read.

Most mixers compute their state by one function, a *scan*: S_t = a_t · S_{t-1} + k_t ⊗ w_t, with a decay a_t for each
head. A pass records the arguments of its scans. The states after the tokens that were kept then take a few operations:
no output is computed, nothing is padded to chunks, layers are stacked, and rows that keep different numbers of tokens
share the operations, because a token that is not kept decays nothing and writes nothing.

Scans are recognised by the names of their parameters. That is a guess at what they compute: a mixer is rolled back in
this way only if it gives what a replay of that mixer gives.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from draftproof.core.device import is_cpu, to_device


@dataclass(frozen=True, slots=True)
class Kept:
    """How many of their first tokens some rows of a pass keep.

    rows    these rows; all rows of the pass if None
    counts  tokens that each of them keeps
    most    the largest of the counts
    mask    1 for a token that is kept and 0 for others, up to the most that a row keeps; None if all keep as many
    """

    rows: Int[Tensor, " r"] | None
    counts: Int[Tensor, " r"]
    most: int
    mask: Float[Tensor, "r 1 n"] | None
    _windows: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Mapping[int, int], batch: int, device: torch.device) -> "Kept":
        """Return what rows keep, given as counts by row, in a pass over `batch` rows."""
        numbers, most = list(counts.values()), max(counts.values())
        mask = None
        if min(numbers) < most:
            mask = to_device([[[t < n for t in range(most)]] for n in numbers], device, torch.float32)
        rows = None if len(counts) == batch else to_device(list(counts), device)
        return cls(rows, to_device(numbers, device), most, mask)

    def rows_of(self, value: Tensor) -> Tensor:
        return value if self.rows is None else value[self.rows]

    def tokens_of(self, values: Sequence[Float[Tensor, "B T ..."]]) -> Float[Tensor, "L r n ..."]:
        """Stack the tokens of several layers, up to the most that a row keeps."""
        stacked = torch.stack([value[:, : self.most] for value in values])
        return stacked if self.rows is None else stacked[:, self.rows]

    def masked(self, value: Float[Tensor, "L r H n"]) -> Float[Tensor, "L r H n"]:
        """Return a number for each head and token, with zeros for the tokens that are not kept."""
        return value if self.mask is None else value * self.mask

    def window(self, inputs: Float[Tensor, "B C T"], width: int) -> Float[Tensor, "r C width"]:
        """Return what a convolution still reads after the kept tokens, of the inputs of a pass after `width` others."""
        inputs = self.rows_of(inputs)
        if self.mask is None:
            return inputs[..., self.most : self.most + width]
        if width not in self._windows:
            self._windows[width] = (self.counts[:, None] + torch.arange(width, device=inputs.device))[:, None]
        return inputs.gather(-1, self._windows[width].expand(-1, inputs.shape[1], -1))


Arguments = Mapping[str, Any]
StatesAfter = Callable[[Sequence[Arguments], Sequence[Tensor], Kept], list[Tensor]]
"""Compute the states of some rows in several layers after the tokens that they keep: from the arguments of the scans,
whose shapes are equal, and the states of these rows before."""


def after_state_space(
    read: Sequence[Arguments], before: Sequence[Float[Tensor, "r H P N"]], kept: Kept
) -> list[Float[Tensor, "r H P N"]]:
    """Return the states of selective state spaces (Mamba-2): a_t = exp(A · dt_t), k_t = dt_t · x_t, w_t = B_t."""
    x, B, dt = (kept.tokens_of([each[name] for each in read]) for name in ("hidden_states", "B", "dt"))
    dt = kept.masked(_time_steps(dt, read).float().transpose(-1, -2))
    sums = (_for_each_head(read, "A").float().transpose(-1, -2) * dt).cumsum(-1)
    total = sums[..., -1:]
    weight = (dt * (total - sums).exp()).transpose(-1, -2)
    by_group = (x.float() * weight[..., None]).view(*B.shape[:-1], -1)
    written = by_group.permute(0, 1, 3, 4, 2) @ B.float().transpose(2, 3)
    return _with_rest(written.view(len(read), *before[0].shape), before, total.exp()[..., None])


def _time_steps(dt: Float[Tensor, "L r n H"], read: Sequence[Arguments]) -> Float[Tensor, "L r n H"]:
    """Return the time steps that scans make of what they were given, rounded as they round them."""
    first = read[0]
    if first.get("dt_bias") is not None:
        dt = dt + _for_each_head(read, "dt_bias").to(dt.dtype)
    if first.get("dt_softplus"):
        dt = softplus(dt)
    low, high = first.get("dt_limit", (0.0, float("inf")))
    return dt if low <= 0 and high == float("inf") else dt.clamp(low, high)


def _for_each_head(read: Sequence[Arguments], name: str) -> Float[Tensor, "L 1 1 H"]:
    return torch.stack([each[name] for each in read])[:, None, None]


def after_delta_rule(
    read: Sequence[Arguments], before: Sequence[Float[Tensor, "r H N P"]], kept: Kept
) -> list[Float[Tensor, "r H N P"]]:
    """Return the states of the gated delta rule: a_t = exp(g_t), w_t = beta_t · (v_t − k_t · a_t · S_{t-1}).

    The w_t of all tokens solve a triangular system, as in the chunked form of the rule.
    """
    k, v, beta, g = (
        kept.tokens_of([each[name] for each in read]).float().transpose(2, 3) for name in ("key", "value", "beta", "g")
    )
    if read[0].get("use_qk_l2norm_in_kernel"):
        k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    beta, sums = kept.masked(beta)[..., None], kept.masked(g).cumsum(-1)[..., None]
    k_beta, k_across = k * beta, k.transpose(-1, -2)
    # Only what lies below the diagonal is read; above it the exponent would be positive, and could overflow.
    system = (k_beta @ k_across) * (sums - sums.transpose(-1, -2)).clamp(max=0).exp()
    known = torch.stack([keys @ state.float() for keys, state in zip(k_beta, before, strict=True)])
    w = torch.linalg.solve_triangular(
        system, torch.addcmul(v * beta, known, sums.exp(), value=-1), upper=False, unitriangular=True
    )
    total = sums[..., -1:, :]
    return _with_rest(k_across @ (w * (total - sums).exp()), before, total.exp())


def _with_rest(
    written: Float[Tensor, "L r H X Y"], before: Sequence[Float[Tensor, "r H X Y"]], decay: Float[Tensor, "L r H 1 1"]
) -> list[Float[Tensor, "r H X Y"]]:
    """Return what was written to states and what is left of those before. Uses the memory of `written`."""
    return [new.addcmul_(old, rest).to(old.dtype) for new, old, rest in zip(written, before, decay, strict=True)]


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of scan: the parameters that tell it, and of those which the state depends on."""

    parameters: frozenset[str]
    read: frozenset[str]
    states_after: StatesAfter


FORMS: Final = (
    Form(
        frozenset({"hidden_states", "dt", "A", "B", "C", "dt_bias", "dt_softplus", "dt_limit", "initial_states"}),
        frozenset({"hidden_states", "dt", "A", "B", "dt_bias", "dt_softplus", "dt_limit"}),
        after_state_space,
    ),
    Form(
        frozenset({"query", "key", "value", "g", "beta", "initial_state", "use_qk_l2norm_in_kernel"}),
        frozenset({"key", "value", "g", "beta", "use_qk_l2norm_in_kernel"}),
        after_delta_rule,
    ),
)


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan of a pass: its form, and those of its arguments that the state depends on."""

    form: Form
    read: Arguments

    def alike(self) -> Hashable:
        """Return what scans that can be stacked have in common: their form, shapes and settings."""
        values = ((name, self.read[name]) for name in sorted(self.read))
        return self.form, tuple(
            (name, tuple(value.shape) if isinstance(value, Tensor) else repr(value)) for name, value in values
        )


def states_after(scans: Sequence[Scan], before: Sequence[Tensor], kept: Kept) -> list[Tensor]:
    """Return the states that some rows have in each scan's layer after the tokens that they keep.

    before  the states of these rows before the pass
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (scan, state) in enumerate(zip(scans, before, strict=True)):
        groups.setdefault((scan.alike(), state.shape), []).append(i)
    states: dict[int, Tensor] = {}
    for members in groups.values():
        form = scans[members[0]].form
        made = form.states_after([scans[i].read for i in members], [before[i] for i in members], kept)
        states |= dict(zip(members, made, strict=True))
    return [states[i] for i in range(len(scans))]


def hear_scans(module: nn.Module, hear: Callable[[Scan], None]) -> None:
    """Let `hear` know the scans of a module of ours: the module runs the same code, in which scans are announced.

    On a CPU, the chunks of a scan are fitted to the pass too: padding to 64 tokens takes longer than eight of them.
    transformers' functions stay as they are. A module whose forward was replaced (offloading does) is left alone.
    """
    forward = type(module).forward
    if isinstance(forward, FunctionType) and "forward" not in vars(module):
        module.forward = MethodType(_announcing(forward, hear), module)


def _announcing(function: FunctionType, hear: Callable[[Scan], None]) -> FunctionType:
    """Return a function of the same code, also within decorators, whose calls of scans are announced to `hear`."""
    inner = getattr(function, "__wrapped__", None)

    def cell_of(cell: CellType) -> CellType:
        return CellType(_announcing(inner, hear)) if inner is not None and _content(cell) is inner else cell

    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        form = _form_of(names.get(name))
        if form is not None:
            names[name] = _announced(names[name], form, hear)
    closure = None if function.__closure__ is None else tuple(map(cell_of, function.__closure__))
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _form_of(function: Any) -> Form | None:
    """Return the form of a function that has the parameters of a scan."""
    if not callable(function) or isinstance(function, type):
        return None
    try:
        parameters = signature(function).parameters.keys()
    except (TypeError, ValueError):
        return None
    return next((form for form in FORMS if form.parameters <= parameters), None)


def _announced(scan: Callable[..., Any], form: Form, hear: Callable[[Scan], None]) -> Callable[..., Any]:
    parameters = signature(scan).parameters
    chunk_size = parameters["chunk_size"].default if "chunk_size" in parameters else None

    def announced(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        hear(Scan(form, {name: value for name, value in given.items() if name in form.read}))
        if isinstance(chunk_size, int) and "chunk_size" not in given and is_cpu(args[0].device):
            kwargs["chunk_size"] = min(chunk_size, args[0].shape[1])
        return scan(*args, **kwargs)

    return announced
