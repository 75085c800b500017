"""Gates left out for a while, or taken off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from mmgate.hosts.torch import switch_nested_tensors
from mmgate.layers.base.gated import gated_modules, remove_gate, switched_off
from mmgate.starts import own_gated_modules

from .training import unfreeze

SWAPPED = ('gates_file', 'init_weights', 'apply')  # what gating leaves on a model


def restore_attention(model: nn.Module) -> list[str]:
    """Take the gates off, in ``model`` and in the modules inside; what is shared stays as it was trained.

    Returns:
        The names of the modules; none if nothing is gated.
    """
    return restore(dict(model.named_modules()))


@contextmanager
def gates_disabled(model: nn.Module) -> Iterator[None]:
    """Let the vanilla modules compute instead of the gated ones.

    Attention with a gate that no rule put there stays. A mode that the model is given meanwhile is the gates', too,
    afterwards; another device or dtype is to be given before or after.
    """
    try:
        with switched_off(*(module for _, module in gated_modules(model))):
            switch_nested_tensors(model)
            yield
    finally:
        switch_nested_tensors(model)


def restore(modules: Mapping[str, nn.Module]) -> list[str]:
    """Take off the gates that rules for these models put there, by their names; see :func:`restore_attention`."""
    own = {prefix: own_gated_modules(module) for prefix, module in modules.items()}
    for module in modules.values():
        unfreeze(module)
        forget_trained(module)
    names = []
    for prefix, gated in own.items():
        for module in gated:
            record = module.gating
            names.append(f'{prefix}.{record.chosen_name(record.name)}'.lstrip('.'))
            remove_gate(module)
        switch_nested_tensors(modules[prefix])
        if gated:
            for name in SWAPPED:
                vars(modules[prefix]).pop(name, None)
    return names


def forget_trained(model: nn.Module) -> None:
    """Let a checkpoint that is loaded, or an initialisation, from now on fill what a file of gates had filled."""
    vars(model).pop('after_init_weights', None)
    handle = vars(model).pop('gates_file_hook', None)
    if handle is not None:
        handle.remove()
