"""Modules by path: the one syntax of patterns, for rules and for hooks; the model inside its wrappers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmgate._environment import torch_alone


def path_regex(pattern: str) -> re.Pattern[str]:
    """Return what a pattern over dotted names means: ``*`` anything within one name, ``**`` any number of names."""
    parts = re.split(r'(\*\*|\*)', pattern)
    return re.compile(''.join({'**': '.*', '*': '[^.]*'}.get(part, re.escape(part)) for part in parts))


def modules_at(model: nn.Module, patterns: Sequence[str], *, each: bool) -> dict[str, nn.Module]:
    """Return the modules that the patterns match by name; of one and another inside it the outer alone.

    Args:
        model: Where to look.
        patterns: See :func:`path_regex`.
        each: Whether every pattern has to match; else one of them.

    Raises:
        ValueError: A pattern, or all of them, match nothing; the message lists the model's parts.
    """
    names = dict(model.named_modules())
    names.pop('', None)
    found: dict[str, nn.Module] = {}
    idle = []
    for pattern in patterns:
        matched = {name: module for name, module in names.items() if path_regex(pattern).fullmatch(name)}
        found.update(matched)
        idle += [] if matched else [repr(pattern)]
    if idle and (each or not found):
        raise ValueError(
            f'{", ".join(idle)} match{"es" if len(idle) == 1 else ""} no module of {type(model).__name__}; it has '
            f'{", ".join(name for name, _ in model.named_children())}, and within them, for instance, '
            f'{", ".join(name for name in names if name.count(".") == 2 and name.endswith(".0"))}.'
        )
    return {name: module for name, module in found.items() if not any(name.startswith(f'{outer}.') for outer in found)}


def own_model(model: Any) -> nn.Module:
    """Return the model that wrappers such as DistributedDataParallel are around."""
    while _is_wrapper(model):
        model = model.module
    return model


def _is_wrapper(model: nn.Module) -> bool:
    if isinstance(model, DistributedDataParallel) or torch_alone():
        return isinstance(model, DistributedDataParallel)
    from mmengine.model import is_model_wrapper

    return is_model_wrapper(model)
