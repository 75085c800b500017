"""What of a model are gates."""

from __future__ import annotations

from torch import nn

from mmgate.layers.base.init import gate_parameters as declared_parameters
from mmgate.weight_init import Swap, standing_swaps


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that gates add to their hosts.

    Args:
        model: With gates, by whatever way they came in; a wrapper around it (DDP, EMA) adds its prefix to the names.
    """
    added = {id(parameter) for _, parameter in declared_parameters(model)}
    for swap in swaps_by_path(model).values():  # a gate of someone's own may declare nothing
        shared = {ours for _, ours in swap.shared}
        own = dict(swap.gate.named_parameters(remove_duplicate=False))
        buffers = dict(swap.gate.named_buffers(remove_duplicate=False))
        for name in shared - own.keys() - buffers.keys():  # parametrized since; what is in its place is no gate either
            parent, dot, _ = name.rpartition('.')
            shared |= {part for part in own if part.startswith(f'{parent}{dot}')}
        added |= {id(own[name]) for name in own.keys() - shared} - {id(own[name]) for name in own.keys() & shared}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in added}


def swaps_by_path(model: nn.Module) -> dict[str, Swap]:
    """Return what was swapped, by the name of the gate in the model."""
    return {
        f'{prefix}.{swap.name}'.lstrip('.'): swap
        for prefix, module in model.named_modules()
        for swap in standing_swaps(module)
    }
