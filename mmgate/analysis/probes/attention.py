"""Compute gates, attention weights and sampling locations of an attention module from the inputs of its call.

A reading is computed anew from the arguments of a module's call, so that no forward code knows of it and nothing is
computed that is not asked for. The gate of a gated module declares the module's readings. Of vanilla modules the files
of their adapters register them, see :mod:`mmgate.hosts.readings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.hosts.readings import Given, Read, Sampled, arguments_of, deformable_readings, readings_of
from mmgate.hosts.torch import torch_weights
from mmgate.layers.base.deformable import DeformableGate
from mmgate.layers.base.dense import DenseGate
from mmgate.layers.base.gate import Gate
from mmgate.layers.base.gated import GatedModule
from mmgate.layers.base.map import MapGate

PLACES = ('geometry', 'map_size')  # sizes of the map and of windows on it
POINTS = ('locations', 'weights', 'reference_points', 'spatial_shapes', 'num_points')  # of deformable attention
NAMES = ('attention', 'values', *POINTS, 'agents', 'kv', *PLACES)  # all but those that gates declare
GATES = 'gates'  # every reading that the gates of a model declare
ACTIVATION = 'activation'
PREDICTIONS = 'predictions'
AXES = ('pairs', 'levels', 'heads', 'channels')  # of the readings that gates declare


def gated_reads(module: GatedModule) -> dict[str, dict[str, Read]]:
    """Return the functions that compute a gated module's readings (gate, attention weights, ...), for each gate.

    A module's only gate has the name ``''``.

    Raises:
        ConfigError: A gate declares a reading by a name that :func:`.recording.record` takes for another, which it
            would hide, or with axes that are none of :data:`AXES`.
    """
    gates = {name: gate for name, gate in module.gate.named_modules() if isinstance(gate, Gate)}
    if isinstance(module.gate, Gate):
        gates = {'': module.gate}
    for gate in gates.values():
        _check_readings(gate)
    return {name: _gate_reads(module, gate) for name, gate in gates.items()}


def _check_readings(gate: Gate) -> None:
    """Raise ConfigError unless the readings that a gate declares have known axes, and names that are free."""
    if not isinstance(gate.gate_readings, Mapping):
        raise ConfigError(
            f'{type(gate).__name__}.gate_readings must be a dict of names and axes, got {gate.gate_readings!r}.'
        )
    taken = ', '.join(name for name in gate.gate_readings if name in (*NAMES, GATES, ACTIVATION, PREDICTIONS))
    if taken:
        raise ConfigError(
            f'{type(gate).__name__} declares the reading {taken} in gate_readings, the name of another reading of '
            'attention; choose another name.'
        )
    for name, axes in gate.gate_readings.items():
        if axes not in AXES:
            raise ConfigError(
                f'{type(gate).__name__} declares the reading {name} with the axes {axes!r} in gate_readings; choose '
                f'one of {", ".join(AXES)}.'
            )


def _gate_reads(module: Any, gate: Gate) -> dict[str, Read]:
    if isinstance(gate, DeformableGate):
        return deformable_readings(_of_gated, gate)
    if isinstance(gate, MapGate):
        of_gate: dict[str, Read] = {name: partial(_map_gate, gate, name) for name in gate.gate_readings}
        return {**{name: partial(_map_reading, gate, name) for name in gate.map_readings()}, **of_gate}
    if isinstance(gate, DenseGate):
        reads = {name: how for name, how in readings_of(module).items() if name in PLACES}
        if not module.over_channels:
            reads['attention'] = partial(_dense_attention, gate)
            reads['values'] = partial(_dense_values, gate)
            reads.update({name: partial(_dense_gate, gate, name) for name in gate.gate_readings})
        return reads
    return {}


def gate_at(module: nn.Module) -> Gate:
    """Return the first gate in a gated module, or the module itself if it is a gate."""
    if isinstance(module, GatedModule):
        return module.gates()[0]
    assert isinstance(module, Gate), type(module).__name__
    return module


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as a dict by the parameter names of the module's ``forward``, with its defaults."""
    # A function set on the module may take any arguments.
    bound = inspect.signature(MethodType(type(module).forward, module)).bind(*args, **kwargs)
    bound.apply_defaults()
    return {**bound.arguments.pop('kwargs', {}), **bound.arguments}


def _of_gated(module: Any, given: Given) -> Sampled:
    query, _, shapes, _, offsets, logits, points, *_ = arguments_of(module, 'sample', module, given)
    points = points.expand(-1, -1, len(shapes), -1)
    return Sampled(query, offsets, logits, points, shapes, module.gate.num_points)


def _dense_values(gate: DenseGate, module: Any, given: Given) -> Tensor:
    """Compute the values ``(B, H, M, d)`` of a dense attention with a gate, gated if the gate acts on values."""
    _, _, value, inputs, _ = arguments_of(gate, 'attend', module, given)
    return gate.weighed_values(value, inputs)


def _dense_attention(gate: DenseGate, module: Any, given: Given) -> Tensor:
    """Return the attention weights ``(B, H, N, M)`` of a dense attention with a gate.

    A row whose keys are all masked is uniform, or 0 in torch's module.
    """
    if 'need_weights' in given:
        return torch_weights(module, given)
    query, key, _, inputs, bias = arguments_of(gate, 'attend', module, given)
    return gate.attention_map(query, key, inputs, bias)


def _dense_gate(gate: DenseGate, name: str, module: Any, given: Given) -> Tensor:
    return gate.read_gate(name, *arguments_of(gate, 'attend', module, given)[3])


def _map_reading(gate: MapGate, name: str, module: Any, given: Given) -> Tensor:
    return gate.read_map(name, *arguments_of(gate, 'mix', module, given))


def _map_gate(gate: MapGate, name: str, module: Any, given: Given) -> Tensor:
    return gate.read_gate(name, arguments_of(gate, 'mix', module, given)[0])  # (B, N, C)
