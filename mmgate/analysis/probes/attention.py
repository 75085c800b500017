"""Compute gates, attention weights and sampling locations of an attention module from the inputs of its call.

A reading is computed anew from the arguments of a module's call, so that no forward code knows of it and nothing is
computed that is not asked for. The gate of a gated module declares the module's readings. Vanilla classes are found by
package and name, so that no mm package has to be imported; hosts.py has the hosts that compute attention themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.hosts.points import points_of, sampled
from mmgate.layers.base.deformable import DeformableGate
from mmgate.layers.base.dense import DenseGate
from mmgate.layers.base.gate import Gate
from mmgate.layers.base.gated import GatedModule
from mmgate.layers.base.map import MapGate
from mmgate.ops.deformable import attention_weights, offset_locations

Given = dict[str, Any]  # the arguments of a call, by their names
Read = Callable[[Any, Given], Tensor]  # takes a module and the arguments of its call
PLACES = ('geometry', 'map_size')  # sizes of the map and of windows on it
POINTS = ('locations', 'weights', 'reference_points', 'spatial_shapes', 'num_points')  # of deformable attention
NAMES = ('attention', 'values', *POINTS, 'agents', 'kv', *PLACES)  # all but those that gates declare
GATES = 'gates'  # every reading that the gates of a model declare
ACTIVATION = 'activation'
PREDICTIONS = 'predictions'
AXES = ('pairs', 'levels', 'heads', 'channels')  # of the readings that gates declare
OF_TRANSFORMERS = (
    *('DeformableDetr', 'RTDetr', 'RTDetrV2', 'GroundingDino', 'MMGroundingDino', 'LwDetr', 'RfDetr'),
    *('Mask2FormerPixelDecoderEncoder', 'OneFormerPixelDecoderEncoder'),
    *('DFine', 'Deimv2', 'OmDetTurbo', 'PPDocLayoutV2', 'PPDocLayoutV3', 'PPDocLayoutV4'),
)
_READS: dict[str, dict[str, Read]] = {}


def reads(*classes: str, **how: Read) -> None:
    """Register, for attention classes, functions that compute readings such as their attention weights.

    The keywords are the readings' names, those of :data:`NAMES`.

    A class is named ``'package.Class'``, or by all of its module.
    """
    _READS.update({name: how for name in classes})


def reads_of(module: nn.Module) -> dict[str, Read]:
    """Return the functions that compute a vanilla module's readings (attention weights, ...), by the reading's name.

    They are those registered for its class, or for the nearest of its base classes.
    """
    for base in type(module).__mro__:
        # timm has classes of one name that compute different things
        for name in (f'{base.__module__}.{base.__name__}', f'{base.__module__.split(".")[0]}.{base.__name__}'):
            if name in _READS:
                return _READS[name]
    return {}


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
        return _deformable(lambda module, given: _of_gated(module, given), gate)
    if isinstance(gate, MapGate):
        of_gate: dict[str, Read] = {name: partial(_map_gate, gate, name) for name in gate.gate_readings}
        return {**{name: partial(_map_reading, gate, name) for name in gate.map_readings()}, **of_gate}
    if isinstance(gate, DenseGate):
        reads = {name: how for name, how in reads_of(module).items() if name in PLACES}
        # XCiT attends over channels and has no map of tokens.
        if not getattr(module, 'over_channels', False):
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


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Switch dropout in a module off inside a ``with`` block, so that no random number is drawn, and on afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def arguments_of(module: nn.Module, method: str, host: nn.Module, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run an attention (the host) once more and return the arguments with which it calls a method of its gate.

    The host projects, masks and cuts windows as it always does, so that no probe has to know how.

    Args:
        module: The host's gate, or another part of it, or the host itself.
        method: Name of the method.
        host: The module that was called.
        given: The arguments of that call, by name.
    """
    noted: list[tuple[Any, ...]] = []

    def note(*args: Any) -> object:
        noted.append(args)
        return getattr(type(module), method)(module, *args)

    setattr(module, method, note)
    try:
        with without_dropout(host):
            host.forward(**given)
    finally:
        delattr(module, method)
    return noted[-1]


class Sampled(NamedTuple):
    """The arguments that a deformable attention gives its operator in a call, before any gate.

    Attributes:
        query: Queries with their position ``(B, Q, C)``.
        offsets: ``(B, Q, H, L, P, 2)``, or ``(B, Q, H, N, 2)`` if levels have different numbers of points.
        logits: ``(B, Q, H, L, P)``, or ``(B, Q, H, N)``.
        reference_points: ``(B, Q, L, 2 or 4)``.
        spatial_shapes: ``(L, 2)``.
        num_points: Points of a level, or of each if they differ.
    """

    query: Tensor
    offsets: Tensor
    logits: Tensor
    reference_points: Tensor
    spatial_shapes: Tensor
    num_points: int | tuple[int, ...]


def _of_gated(module: Any, given: Given) -> Sampled:
    query, _, shapes, _, offsets, logits, points = arguments_of(module, 'sample', module, given)
    points = points.expand(-1, -1, len(shapes), -1)
    return Sampled(query, offsets, logits, points, shapes, module.gate.num_points)


def _of_mmcv(module: Any, given: Given) -> Sampled:
    query = given['query']
    position = given.get('query_pos')
    query = query if position is None else query + position
    query = query if module.batch_first else query.transpose(0, 1)
    sizes = (module.num_heads, module.num_levels, module.num_points)
    offsets = module.sampling_offsets(query).unflatten(-1, (*sizes, 2))
    logits = module.attention_weights(query).unflatten(-1, sizes)
    return Sampled(query, offsets, logits, given['reference_points'], given['spatial_shapes'], module.num_points)


def _of_transformers(module: Any, given: Given) -> Sampled:
    query = given['hidden_states']
    position = given.get('position_embeddings')
    query = query if position is None else query + position
    shapes = given.get('spatial_shapes')
    shapes = torch.tensor(given['spatial_shapes_list']) if shapes is None else shapes
    # One reference point serves all levels.
    points = given['reference_points'].expand(-1, -1, module.n_levels, -1)
    return Sampled(query, *sampled(module, query, points), points, shapes, points_of(module))


def _of_ms_deform_attn(module: Any, given: Given) -> Sampled:
    """Return query, offsets, logits and places of a call of rfdetr's or ultralytics' ``MSDeformAttn``."""
    query = given['query']
    points = given['reference_points'] if 'reference_points' in given else given['refer_bbox']
    shapes = given['input_spatial_shapes'] if 'input_spatial_shapes' in given else given['value_shapes']
    points = points.expand(-1, -1, module.n_levels, -1)
    return Sampled(query, *sampled(module, query, points), points, torch.as_tensor(shapes), points_of(module))


def _deformable(sample: Callable[[Any, Given], Sampled], gate: Any = None) -> dict[str, Read]:
    """Return functions that compute the readings (sampling locations, weights, gate) of a deformable attention.

    They are the sampling locations ``(B, Q, H, L, P, 2)`` as (x, y), 0 to 1 over a level with its padding; the weights
    ``(B, Q, H, L, P)``; reference points, shapes of levels and the number of points of each level ``(L,)``; and what
    the gate declares. If levels have different numbers of points, locations are ``(B, Q, H, N, 2)`` and weights
    ``(B, Q, H, N)``: the points of the first level, then those of the second, and so on.

    Args:
        sample: Returns a call's samples.
        gate: The module's gate, if it has one.
    """

    def weights(module: Any, given: Given) -> Tensor:
        found = sample(module, given)
        return attention_weights(found.logits, **({} if gate is None else gate.modulate(found.query)))

    def locations(module: Any, given: Given) -> Tensor:
        found = sample(module, given)
        uneven = None if isinstance(found.num_points, int) else found.num_points
        return offset_locations(found.offsets, found.reference_points, found.spatial_shapes, uneven)

    def num_points(module: Any, given: Given) -> Tensor:
        found = sample(module, given)
        levels = len(found.spatial_shapes)
        return torch.tensor([found.num_points] * levels if isinstance(found.num_points, int) else found.num_points)

    reads: dict[str, Read] = dict(
        locations=locations,
        weights=weights,
        reference_points=lambda module, given: sample(module, given).reference_points,
        spatial_shapes=lambda module, given: sample(module, given).spatial_shapes,
        num_points=num_points,
    )
    for name in () if gate is None else gate.gate_readings:
        reads[name] = partial(_deformable_gate, gate, name, sample)
    return reads


def _deformable_gate(
    gate: DeformableGate, name: str, sample: Callable[[Any, Given], Sampled], module: Any, given: Given
) -> Tensor:
    return gate.read_gate(name, sample(module, given).query)


def _torch_attention(module: Any, given: Given) -> Tensor:
    """Compute the attention weights ``(B, H, N, M)`` of a call of torch's MultiheadAttention.

    mmcv's and PVT's attention wrap that module.
    """
    with without_dropout(module):
        return module.forward(**{**given, 'need_weights': True, 'average_attn_weights': False})[1]


def _torch_values(module: Any, given: Given) -> Tensor:
    """Compute the projected values ``(B, H, M, d)`` of a call of torch's MultiheadAttention, with those appended."""
    value = given['value'] if module.batch_first else given['value'].transpose(0, 1)
    weight = module.v_proj_weight if module.in_proj_weight is None else module.in_proj_weight.chunk(3)[2]
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[2]
    projected = F.linear(value, weight, bias)
    if module.bias_v is not None:
        projected = torch.cat([projected, module.bias_v.expand(len(projected), 1, -1)], 1)
    if module.add_zero_attn:
        projected = F.pad(projected, (0, 0, 0, 1))
    return projected.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)


def _dense_values(gate: DenseGate, module: Any, given: Given) -> Tensor:
    """Compute the values ``(B, H, M, d)`` of a dense attention with a gate, gated if the gate acts on values."""
    _, _, value, inputs, _ = arguments_of(gate, 'attend', module, given)
    return gate.weighed_values(value, inputs)


def _dense_attention(gate: DenseGate, module: Any, given: Given) -> Tensor:
    """Return the attention weights ``(B, H, N, M)`` of a dense attention with a gate.

    A row whose keys are all masked is uniform, or 0 in torch's module.
    """
    if 'need_weights' in given:
        return _torch_attention(module, given)
    query, key, _, inputs, bias = arguments_of(gate, 'attend', module, given)
    return gate.attention_map(query, key, inputs, bias)


def _dense_gate(gate: DenseGate, name: str, module: Any, given: Given) -> Tensor:
    return gate.read_gate(name, *arguments_of(gate, 'attend', module, given)[3])


def _map_reading(gate: MapGate, name: str, module: Any, given: Given) -> Tensor:
    return gate.read_map(name, *arguments_of(gate, 'mix', module, given))


def _map_gate(gate: MapGate, name: str, module: Any, given: Given) -> Tensor:
    return gate.read_gate(name, arguments_of(gate, 'mix', module, given)[0])  # (B, N, C)


reads('mmcv.MultiScaleDeformableAttention', **_deformable(_of_mmcv))
reads(
    *(f'transformers.{name}MultiscaleDeformableAttention' for name in OF_TRANSFORMERS), **_deformable(_of_transformers)
)
reads('rfdetr.MSDeformAttn', 'ultralytics.MSDeformAttn', **_deformable(_of_ms_deform_attn))
reads('torch.MultiheadAttention', attention=_torch_attention, values=_torch_values)
