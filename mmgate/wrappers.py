"""Find the model inside wrappers such as DistributedDataParallel."""

from __future__ import annotations

from torch import nn

SHARDED = '_fsdp_wrapped_module'
# Names of the child in wrappers: of DDP, averages and test-time augmentation; of torch.compile; of FSDP.
INSIDE = ('module', '_orig_mod', SHARDED)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as DistributedDataParallel, torch.compile or EMA; else the model itself.

    A wrapper is a module with one child of a name in :data:`INSIDE`.
    """
    while True:
        children = {name: child for name, child in model.named_children() if name != 'data_preprocessor'}
        if len(children) != 1 or not children.keys() <= set(INSIDE):
            return model
        (model,) = children.values()
