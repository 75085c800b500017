"""Copies of a model as torch's DataParallel makes them for further GPUs."""

from __future__ import annotations

from typing import Any

from torch import nn


def replicated(model: nn.Module) -> Any:
    """Return a copy as torch.nn.parallel.replicate makes it, which here shares the model's parameters."""
    modules = list(model.modules())
    copies = {id(module): module._replicate_for_data_parallel() for module in modules}  # type: ignore[operator]
    for module in modules:
        for name, child in module._modules.items():
            copies[id(module)]._modules[name] = None if child is None else copies[id(child)]
        for name, parameter in module._parameters.items():
            setattr(copies[id(module)], name, parameter)
    return copies[id(model)]
