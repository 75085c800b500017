"""Places of tokens on the image, for figures: a call of a module around the attention tells them.

Attention sees tokens, and does not know the map that they are of. Its weights are notes; this is one table of the
modules that do know, by the names of their classes, because windows and reduced keys are drawn in the same way
whatever computes their weights. A module that is not in the table, or a gate, may note ``'geometry'`` itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from mmgate.adapter import host_class, is_off
from mmgate.errors import full_name
from mmgate.gates.base.map import MapAdapter
from mmgate.notes import note

GEOMETRY = 'geometry'
MAP_SIZE = 'map_size'
PLACES = (GEOMETRY, MAP_SIZE)


def _reduced(module: Any, given: Mapping[str, Any]) -> list[int]:
    return [*given['hw_shape'], module.sr_ratio]


def _windows(module: Any, given: Mapping[str, Any]) -> list[int]:
    return [*given['hw_shape'], module.window_size, 0]


def _shifted_windows(module: Any, given: Mapping[str, Any]) -> list[int]:
    size = given['hw_shape']
    shift = module.shift_at(size) if hasattr(module, 'shift_at') else module.shift_size
    if min(size) == module.window_size and not getattr(module, 'pad_small_map', True):
        shift = 0  # in mmpretrain one window then holds the smaller side
    return [*size, module.window_size, shift]


def _encoded(module: Any, given: Mapping[str, Any]) -> list[int]:
    return [*(given['mask'] if given.get('mask') is not None else given['input']).shape[-2:]]


# By the end of a class's dotted name (a subclass is called as its base): the name of the place, and the function of the
# module and the arguments of its call that returns it. A geometry is (height, width, window, shift), (height, width,
# window height, window width, shift) or, where keys are reduced, (height, width, ratio); a map size is (height, width)
# of the map that gets positions and to which a decoder's queries attend.
TABLE: dict[str, tuple[str, Callable[[Any, Mapping[str, Any]], list[int]]]] = {
    'backbones.swin.ShiftWindowMSA': (GEOMETRY, _shifted_windows),
    'utils.attention.ShiftWindowMSA': (GEOMETRY, _shifted_windows),
    'backbones.pvt.SpatialReductionAttention': (GEOMETRY, _reduced),
    'backbones.mit.EfficientMultiheadAttention': (GEOMETRY, _reduced),
    'backbones.twins.GlobalSubsampledAttention': (GEOMETRY, _reduced),
    'backbones.twins.LocallyGroupedSelfAttention': (GEOMETRY, _windows),
    'backbones.tinyvit.TinyViTBlock': (
        GEOMETRY,
        lambda module, given: [*module.img_size, module.window_size, 0],
    ),
    'gcvit.GlobalContextVitBlock': (
        GEOMETRY,
        lambda module, given: [*given['x'].shape[1:3], *module.window_size, 0],
    ),
    'positional_encoding.SinePositionalEncoding': (MAP_SIZE, _encoded),
    'positional_encoding.LearnedPositionalEncoding': (MAP_SIZE, _encoded),
}


def place_of(module: nn.Module) -> str | None:
    """Return the name of the place that calls of a module tell, or None."""
    found = _entry(module)
    return None if found is None else found[0]


def note_place(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    """Note the place that a call of a module tells; a forward hook of a module in the table."""
    found = _entry(module)
    assert found is not None
    name, read = found
    note(module, name, lambda: torch.tensor(read(module, _bound(module, args, kwargs))))


def _entry(module: nn.Module) -> tuple[str, Callable[[Any, Mapping[str, Any]], list[int]]] | None:
    if isinstance(module, MapAdapter) and not is_off(module):  # whose gate attends over the whole map instead
        return None
    known: Any = host_class(module)
    names = (f'.{full_name(base)}' for base in known.__mro__)
    return next((entry for name in names for end, entry in TABLE.items() if name.endswith(f'.{end}')), None)


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as a dict by the parameter names of the module's ``forward``, with its defaults."""
    # A function set on the module may take any arguments.
    bound = inspect.signature(MethodType(type(module).forward, module)).bind(*args, **kwargs)
    bound.apply_defaults()
    return {**bound.arguments.pop('kwargs', {}), **bound.arguments}
