"""What can be read off an attention module's inputs: gates, attention weights, sampling locations, maps.

They are computed anew from what the module was called with, so that no forward code knows of it and nothing is
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
from mmgate.ops.ms_deform_attn import attention_weights, offset_locations

Given = dict[str, Any]  # the arguments of a call, by their names
Read = Callable[[Any, Given], Tensor]
GATES = ('gate', 'gate_k', 'gate_v', 'gate_out')
PLACES = ('geometry', 'map_size')  # where attention lies, read beside it
POINTS = ('locations', 'weights', 'reference_points', 'spatial_shapes', 'gate')  # of deformable attention
NAMES = (*GATES, 'attention', *POINTS[:4], 'agents', 'kv', *PLACES)
OF_TRANSFORMERS = (
    *('DeformableDetr', 'RTDetr', 'RTDetrV2', 'GroundingDino', 'MMGroundingDino', 'LwDetr', 'RfDetr'),
    *('Mask2FormerPixelDecoderEncoder', 'OneFormerPixelDecoderEncoder'),
)
_READS: dict[str, dict[str, Read]] = {}


def reads(*classes: str, **how: Read) -> None:
    """Say how readings, named as in :data:`NAMES`, of classes named ``'package.Class'`` are computed."""
    _READS.update({name: how for name in classes})


def reads_of(module: nn.Module) -> dict[str, Read]:
    """Return what can be read of a module, as its class or the nearest of its bases says."""
    for base in type(module).__mro__:
        found = _READS.get(f'{base.__module__.split(".")[0]}.{base.__name__}')
        if found is not None:
            return {name: how for name, how in found.items() if _has(module, name)}
    return {}


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


Sampled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # query, offsets, logits, reference points, shapes of levels


def _of_mmcv(module: Any, given: Given) -> Sampled:
    query, position = given['query'], given.get('query_pos')
    query = query if position is None else query + position
    query = query if module.batch_first else query.transpose(0, 1)
    sizes = (module.num_heads, module.num_levels, module.num_points)
    offsets, logits = module.sampling_offsets(query), module.attention_weights(query)
    places = (given['reference_points'], given['spatial_shapes'])
    return query, offsets.unflatten(-1, (*sizes, 2)), logits.unflatten(-1, sizes), *places


def _of_transformers(module: Any, given: Given) -> Sampled:
    query, position = given['hidden_states'], given.get('position_embeddings')
    query = query if position is None else query + position
    shapes = given.get('spatial_shapes')
    shapes = torch.tensor(given['spatial_shapes_list']) if shapes is None else shapes
    number = module.n_points[0] if isinstance(module.n_points, (list, tuple)) else module.n_points
    points = given['reference_points'].expand(-1, -1, module.n_levels, -1)  # which are those of all levels
    return query, *sampled(module, query, number, points), points, shapes


def _deformable(sample: Callable[[Any, Given], Sampled]) -> dict[str, Read]:
    """Return how locations ``(B, Q, H, L, P, 2)``, weights ``(B, Q, H, L, P)`` and a gate that broadcasts are read.

    Locations are (x, y), 0 to 1 over a level, padding included.
    """

    def weights(module: Any, given: Given) -> Tensor:
        (query, _, logits, *_), gate = sample(module, given), gate_of(module)
        return attention_weights(logits, **(gate.gating(query) if hasattr(gate, 'gating') else {}))

    def locations(module: Any, given: Given) -> Tensor:
        _, offsets, _, points, shapes = sample(module, given)
        return offset_locations(offsets, points, shapes)

    return dict(
        locations=locations,
        weights=weights,
        reference_points=lambda module, given: sample(module, given)[3],
        spatial_shapes=lambda module, given: sample(module, given)[4],
        gate=lambda module, given: gate_of(module).read_gate('gate', sample(module, given)[0]),
    )


def _torch_attention(module: Any, given: Given) -> Tensor:
    """Return the attention weights ``(B, H, N, M)`` of torch's module, which mmcv's and PVT's hold."""
    with without_dropout(module):
        return module.forward(**{**given, 'need_weights': True, 'average_attn_weights': False})[1]


def _dense_gate(module: Any, given: Given) -> Tensor:
    inputs = [given[name] for name in ('query', 'key', 'value')]
    return module.read_gate('gate', *(inputs if module.batch_first else [x.transpose(0, 1) for x in inputs]))


reads('mmcv.MultiScaleDeformableAttention', 'mmgate.MultiScaleDeformableAttention', **_deformable(_of_mmcv))
reads(
    'mmgate.HostedDeformableAttention',
    *(f'transformers.{name}MultiscaleDeformableAttention' for name in OF_TRANSFORMERS),
    **_deformable(_of_transformers),
)
reads('torch.MultiheadAttention', attention=_torch_attention)
reads('mmgate.DenseAttention', attention=_torch_attention, gate=_dense_gate)
