"""Name the types of transformers in annotations without importing transformers.

Importing its modelling code takes about three seconds and 220 MB, and the bundled model is run without it (llama.py).
"""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
else:  # what run-time type checks compare with
    PreTrainedConfig, PreTrainedModel = object, nn.Module

__all__ = ["PreTrainedConfig", "PreTrainedModel"]
