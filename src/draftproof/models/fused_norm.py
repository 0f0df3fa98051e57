"""RMSNorm in one step, and what fused modules share: which devices are served, and by which steps."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from draftproof.core.device import runs_kernels
from draftproof.models.comparison import computes_the_same

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class FusedNorm(nn.Module):
    """RMSNorm in one step, or together with the sum before or after it."""

    def __init__(self, weight: Tensor, eps: float, plus_one: bool, round_first: bool) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps
        self.plus_one = plus_one
        self._options = {"plus_one": plus_one, "round_first": round_first}
        steps = steps_of(weight.device)
        self.step, self.sum_step, self.step_and_sum = steps.rms_norm, steps.sum_and_norm, steps.norm_and_sum
        self.ready: tuple[Tensor, Tensor] | None = None
        """A sum whose norm was computed with it, and that norm, until it is asked for."""

    @classmethod
    def of(cls, module: nn.Module) -> "FusedNorm | None":
        """Return the fused form of a module that is an RMSNorm; None if it computes anything else."""
        weight = getattr(module, "weight", None)
        if list(module.children()) or not isinstance(weight, Tensor) or weight.ndim != 1 or len(vars(module)) > 20:
            return None
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(eps, float) or not serves(weight.device, weight.dtype) or not _takes_one_tensor(module):
            return None
        if is_hooked(module):
            return None
        for plus_one, round_first in ((False, True), (False, False), (True, False)):
            made = cls(weight, eps, plus_one, round_first)
            if computes_the_same(module, made, (weight.shape[0],), weight):
                return made
        return None

    def forward(self, x: Tensor) -> Tensor:
        ready, self.ready = self.ready, None
        if ready is not None and ready[0] is x:
            return ready[1]
        made: Tensor = self.step(x, self.weight, self.variance_epsilon, **self._options)
        return made

    def over(self, x: Tensor) -> None:
        """Write the norm of x over x, which may be a part of more."""
        self.step(x, self.weight, self.variance_epsilon, **self._options, out=x)

    def sum(self, x: Tensor, added: Tensor, factor: float = 1.0) -> Tensor:
        """Return x + factor · added. Its norm is computed in the same step, and kept for the call that asks for it."""
        self.ready = self.sum_step(x, added, self.weight, self.variance_epsilon, **self._options, factor=factor)
        total: Tensor = self.ready[0]
        return total

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + the norm of x."""
        made: Tensor = self.step_and_sum(residual, x, self.weight, self.variance_epsilon, **self._options)
        return made


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there are steps for a device and a dtype."""
    return dtype in DTYPES if runs_kernels(device) else device.type == "cpu" and dtype == torch.float32


def steps_of(device: torch.device) -> Any:
    """Return the module with a device's steps: `kernels.layer`, or on a CPU `layer_steps`."""
    if runs_kernels(device):
        from draftproof.kernels import layer

        return layer
    from draftproof.models import layer_steps

    return layer_steps


def is_hooked(module: nn.Module) -> bool:
    """Return whether someone is called when a module or its parts run: a replacement would not call them."""
    return any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


def _takes_one_tensor(module: nn.Module) -> bool:
    return module.forward.__code__.co_argcount == 2 if hasattr(module.forward, "__code__") else True
