"""Switch the gates of a model off for a while, or remove them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from mmgate.frozen import forget_start
from mmgate.hosts.torch import switch_nested_tensors
from mmgate.layers.base.gated import gated_modules, remove_gate, switched_off
from mmgate.starts import GATED, forget_initialisation, own_gated_modules
from mmgate.wrappers import named_parts, own_model, without_wrappers

from .training import unfreeze

# Attributes that gating leaves on a model.
SWAPPED = ('gates_file', GATED)


def restore_attention(model: nn.Module) -> list[str]:
    """Make a gated model vanilla again: remove its gates; all other parameters keep their trained values.

    Returns:
        The names of the modules, as :func:`swap_attention` returned them; none if nothing is gated.
    """
    model = own_model(model)
    names = restore(dict(named_parts(model)))
    # Rules for a model around this one, or of which this is a part by other means, have gated the rest.
    for name, module in list(gated_modules(model)):
        names.append(without_wrappers(module.gating.chosen_name(name)))
        remove_gate(module)
    switch_nested_tensors(model)
    return names


@contextmanager
def gates_disabled(model: nn.Module) -> Iterator[None]:
    """Switch the gates of a model off inside a ``with`` block, so that it computes as the vanilla model.

    An attention that was built with a gate, not by a rule, stays gated. A mode that is set meanwhile holds for the
    gates afterwards. Move the model to another device or dtype before or after the context.

    The model itself changes, for all threads: a forward pass that another thread runs when the context is entered or
    left may fail. Where threads share a model, hold a lock around both, or give the context a copy of the model.
    """
    try:
        with switched_off(*(module for _, module in gated_modules(model))):
            switch_nested_tensors(model)
            yield
    finally:
        switch_nested_tensors(model)


def restore(modules: Mapping[str, nn.Module]) -> list[str]:
    """Remove the gates that rules for these models have placed; rules for models inside them are not concerned.

    See :func:`restore_attention`.

    Args:
        modules: The models, by the prefix of their names in what is returned.
    """
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
            forget_start(modules[prefix])
            forget_initialisation(modules[prefix])
            for name in SWAPPED:
                vars(modules[prefix]).pop(name, None)
    return names


def forget_trained(model: nn.Module) -> None:
    """Stop protecting the tensors that a gates file has filled: checkpoints and initialisation may fill them again."""
    vars(model).pop('after_init_weights', None)
    handle = vars(model).pop('gates_file_hook', None)
    if handle is not None:
        handle.remove()
