"""Serve a Llama model on four-bit weights: a `Model` whose passes are those of llama_pass.py, without transformers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.core.device import is_cpu
from draftproof.models.compiled_pass import CompiledPass
from draftproof.models.heap import trim_heap
from draftproof.models.interface import Cache, Forward
from draftproof.models.llama import Llama
from draftproof.models.llama_pass import LlamaPass
from draftproof.models.packed import PackedPass, Span, check_layers
from draftproof.models.pool import LayerShape

if TYPE_CHECKING:
    from draftproof.models.cache import SlotCache


class LlamaModel:
    """A Llama model on four-bit weights as a `Model`, on a CPU."""

    def __init__(self, net: Llama, run: LlamaPass | CompiledPass) -> None:
        self._net, self._run = net, run
        self._parts: dict[int, LlamaModel] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "LlamaModel | None":
        """Return the `Model` of a Llama model, ours or of transformers; None if it cannot run `LlamaPass`."""
        net = Llama.of(model)
        run = None if net is None or not is_cpu(net.device) else LlamaPass.of(net)
        if net is None or run is None:
            return None
        if not isinstance(model, Llama):
            from draftproof.models.compatibility import refuse_unsupported

            refuse_unsupported(model)
        trim_heap()  # joining matrices has freed their parts
        return cls(net, run)

    @property
    def vocab_size(self) -> int:
        return int(self._net.get_output_embeddings().out_features)

    @property
    def max_length(self) -> int | None:
        return int(self._net.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def packing_refusal(self) -> str | None:
        return None

    @property
    def assumed_costs(self) -> Mapping[str, float]:
        """Return what passes and drafts of this model cost before any was measured, as fields of `Costs`."""
        return self._run.costs

    def new_cache(self, rows: int, capacity: int = 0) -> "SlotCache":
        from draftproof.models.cache import SlotCache  # imports transformers, which an engine's rounds do not need

        return SlotCache(len(self.kv_shapes()), rows, capacity, self.device)

    def first_layers(self, count: int) -> "LlamaModel":
        """Return a model of the first `count` layers, the norm and the output layer, on the same weights.

        As a drafter it costs no memory but its own cache. It is made once for each count.
        """
        if count not in self._parts:
            part = self._net.first_layers(count)
            run = LlamaPass.of(part)
            assert run is not None  # its layers are those of a model that has one
            self._parts[count] = LlamaModel(part, run)
        return self._parts[count]

    def kv_shapes(self) -> tuple[LayerShape, ...]:
        return self._run.kv_shapes

    def packed_pass(self, tokens: Int[Tensor, " N"], spans: Sequence[Span]) -> PackedPass:
        """Return a pass over these tokens, span after span."""
        return PackedPass(tokens, spans, (("full_attention", None),))

    def packed(
        self,
        this: PackedPass,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        scored: int | Int[Tensor, " J"],
        layers: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "J V"], tuple[Float[Tensor, "N H"], ...]]:
        """Run a packed pass over a pool's buffers; return the logits that are wanted, and the states after `layers`.

        scored  the last so many tokens of the pass, or the indices of those that get logits
        """
        check_layers(layers, len(self.kv_shapes()))
        with torch.inference_mode():
            logits, *hidden = self._run(this, this.positions, keys, values, scored, layers)
        return logits, tuple(hidden)

    def __call__(
        self,
        tokens: Int[Tensor, "B T"],
        cache: Cache,
        *,
        parents: Int[Tensor, "B K"] | None = None,
        scored: int | None = None,
        layers: Sequence[int] = (),
    ) -> Forward:
        """Score `tokens` as the continuation of each cached row; see `Model`."""
        from draftproof.models.slot_pass import over_slots

        return over_slots(self, tokens, cache, parents, scored, layers)
