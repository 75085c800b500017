"""What can be read off an attention module's inputs: gates, attention weights, sampling locations, maps.

A probe computes them anew from what the module was called with, so that no forward code knows of it and nothing is
computed that is not asked for. Classes are found by package and name, so that no mm package has to be imported.
whole_maps.py and hosts.py have those of attentions over whole maps and of hosts that attend by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.hosts.hosted import HostedDeformableAttention, sampled
from mmgate.hosts.window import GatedWindowMSA
from mmgate.layers import MultiScaleDeformableAttention
from mmgate.ops.ms_deform_attn import attention_weights, offset_locations

Readings = Mapping[str, Callable[[], Tensor]]  # names of what can be read, each computed when called
Probe = Callable[..., Readings]
GATES = ('gate', 'gate_k', 'gate_v', 'gate_out')
PLACES = ('geometry', 'map_size')  # where attention lies, read beside it
POINTS = ('locations', 'weights', 'reference_points', 'spatial_shapes', 'gate')  # of deformable attention
NAMES = (*GATES, 'attention', *POINTS[:4], 'agents', 'kv', *PLACES)
OF_TRANSFORMERS = (
    *('DeformableDetr', 'RTDetr', 'RTDetrV2', 'GroundingDino', 'MMGroundingDino', 'LwDetr', 'RfDetr'),
    *('Mask2FormerPixelDecoderEncoder', 'OneFormerPixelDecoderEncoder'),
)
_PROBES: dict[str, tuple[Probe, tuple[str, ...]]] = {}


def probes(*classes: str, reads: tuple[str, ...]) -> Callable[[Probe], Probe]:
    """Register ``probe(module, **bound arguments of its forward)`` for classes named ``'package.Class'``.

    ``reads`` are the names that it may return, of :data:`NAMES`.
    """

    def register(probe: Probe) -> Probe:
        _PROBES.update({name: (probe, reads) for name in classes})
        return probe

    return register


def probe_for(module: nn.Module) -> tuple[Probe, tuple[str, ...]] | None:
    """Return the probe of a module's class or of the nearest of its bases, and what it reads; None if there is none."""
    for base in type(module).__mro__:
        found = _PROBES.get(f'{base.__module__.split(".")[0]}.{base.__name__}')
        if found is not None:
            return found[0], tuple(name for name in found[1] if _has(module, name))
    return None


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names that the module's ``forward`` gives them, defaults filled in."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return {**bound.arguments.pop('kwargs', {}), **bound.arguments}


def is_alone(module: nn.Module) -> bool:
    """Whether a module is a gate without projections, which its host never calls as a module."""
    return not getattr(module, 'has_projections', True)


def _has(module: nn.Module, name: str) -> bool:
    """Whether this module has what its class may have."""
    if name in GATES:
        return name in getattr(gate_of(module), 'gate_readings', ())
    if name == 'attention':  # read at the gate, where the host holds one
        return not any(is_alone(child) for child in module.children())
    if name == 'geometry':  # a class token lies nowhere
        return not getattr(module, 'class_tokens', 0)
    return True


def gate_of(module: Any) -> Any:
    """Return the gate that a module is, or that Swin's windows and deformable attention of transformers' hold."""
    if isinstance(module, HostedDeformableAttention):
        return module.gate
    return module.attn if isinstance(module, GatedWindowMSA) else module


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """No dropout in a module, and so no random number taken that the model would have got."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def handed(module: Any, method: str, host: Any, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what ``module`` gets in a call of its ``method``, while ``host`` runs once more.

    So a host that projects, masks and cuts windows in its own manner needs no probe of its own.
    """
    noted: list[tuple[Any, ...]] = []

    def note(*args: Any) -> Any:
        noted.append(args)
        return getattr(type(module), method)(module, *args)

    setattr(module, method, note)
    try:
        with without_dropout(host):
            host.forward(**given)
    finally:
        delattr(module, method)
    return noted[-1]


def _points(module: Any, gate: Any, query: Tensor, sample: Any, points: Tensor, shapes: Tensor) -> Readings:
    """Return sampling locations ``(B, Q, H, L, P, 2)``, weights ``(B, Q, H, L, P)``, and the gate that broadcasts.

    Locations are (x, y), 0 to 1 over a level, padding included; ``sample`` returns offsets and logits.
    """
    gated = isinstance(gate, MultiScaleDeformableAttention)
    return dict(
        locations=lambda: offset_locations(sample()[0], points, shapes),
        weights=lambda: attention_weights(sample()[1], **(gate.gating(query) if gated else {})),
        reference_points=lambda: points,
        spatial_shapes=lambda: shapes,
        gate=lambda: gate.read_gate('gate', query),
    )


@probes('mmcv.MultiScaleDeformableAttention', 'mmgate.MultiScaleDeformableAttention', reads=POINTS)
def deformable(module: Any, **given: Any) -> Readings:
    """Read points, weights and gate of mmcv's deformable attention and ours."""
    query, position = given['query'], given.get('query_pos')
    query = query if position is None else query + position
    query = query if module.batch_first else query.transpose(0, 1)
    sizes = (module.num_heads, module.num_levels, module.num_points)

    def sample() -> tuple[Tensor, Tensor]:
        offsets = module.sampling_offsets(query).unflatten(-1, (*sizes, 2))
        return offsets, module.attention_weights(query).unflatten(-1, sizes)

    return _points(module, module, query, sample, given['reference_points'], given['spatial_shapes'])


@probes(
    'mmgate.HostedDeformableAttention',
    *(f'transformers.{name}MultiscaleDeformableAttention' for name in OF_TRANSFORMERS),
    reads=POINTS,
)
def of_transformers(module: Any, **given: Any) -> Readings:
    """Read the same of transformers' detectors, where reference points and boxes are those of all levels."""
    query, position = given['hidden_states'], given.get('position_embeddings')
    query = query if position is None else query + position
    shapes = given.get('spatial_shapes')
    shapes = torch.tensor(given['spatial_shapes_list']) if shapes is None else shapes
    number = module.n_points[0] if isinstance(module.n_points, (list, tuple)) else module.n_points
    points = given['reference_points'].expand(-1, -1, module.n_levels, -1)
    return _points(module, gate_of(module), query, lambda: sampled(module, query, number, points), points, shapes)


@probes('torch.MultiheadAttention', reads=('attention',))
def torch_attention(module: Any, **given: Any) -> Readings:
    """Read the attention weights ``(B, H, N, M)`` of torch's module, which mmcv's and PVT's hold."""

    def attention() -> Tensor:
        with without_dropout(module):
            return module.forward(**{**given, 'need_weights': True, 'average_attn_weights': False})[1]

    return dict(attention=attention)


@probes('mmgate.DenseAttention', reads=('gate', 'attention'))
def dense(module: Any, **given: Any) -> Readings:
    """Read attention weights ``(B, H, N, M)`` and gate of a gated dense attention."""
    inputs = [given[name] for name in ('query', 'key', 'value')]
    inputs = inputs if module.batch_first else [x.transpose(0, 1) for x in inputs]
    attention = torch_attention(module, **given)['attention']
    return dict(attention=attention, gate=lambda: module.read_gate('gate', *inputs))
