"""The model inside its wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn

SHARDED = '_fsdp_wrapped_module'
INSIDE = ('module', '_orig_mod', SHARDED)  # what DDP, averages and test-time augmentation have, torch.compile, FSDP


def own_model(model: Any) -> nn.Module:
    """Return the model that wrappers are around, each of one child by a name that wrappers use."""
    while True:
        children = {name: child for name, child in model.named_children() if name != 'data_preprocessor'}
        if len(children) != 1 or not children.keys() <= set(INSIDE):
            return model
        (model,) = children.values()
