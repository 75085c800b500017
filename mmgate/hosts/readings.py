"""Readings of vanilla attention, such as its weights: how each host's are computed anew from the inputs of a call.

An adapter's file registers, by :func:`reads`, what can be read of its hosts; :mod:`mmgate.analysis.probes` records it.
A reading is computed from the arguments of a module's call, so that no forward code knows of it and nothing is
computed that is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmgate.hosts.table import Host, full_name, import_adapters
from mmgate.layers.base.deformable import DeformableGate
from mmgate.ops.deformable import attention_weights, offset_locations

Given = dict[str, Any]  # the arguments of a call, by their names
Read = Callable[[Any, Given], Tensor]  # takes a module and the arguments of its call
_READS: dict[Host, dict[str, Read]] = {}


def reads(*classes: Host, **how: Read) -> None:
    """Register, for classes of attention or of modules around it, functions that compute their readings.

    Args:
        *classes: The classes, or dotted names as in :func:`.table.adapts`.
        **how: The functions, by the readings' names, one of :data:`mmgate.analysis.probes.attention.NAMES`. A
            ``geometry`` is (height, width, window, shift), (height, width, window height, window width, shift), or,
            where keys are reduced, (height, width, ratio); a ``map_size`` is (height, width) of the map that gets
            positions and to which a decoder's queries attend.
    """
    for known in classes:
        _READS.setdefault(known, {}).update(how)


def readings_of(module: nn.Module) -> dict[str, Read]:
    """Return the functions that compute a vanilla module's readings (attention weights, ...), by the reading's name.

    They are those registered for its class, or for the nearest of its base classes.
    """
    known: Any = type(module)
    import_adapters(known)
    for base in known.__mro__:
        path = f'.{full_name(base)}'
        name = next((name for name in _READS if isinstance(name, str) and path.endswith(f'.{name}')), '')
        found = _READS.get(base, _READS.get(name))
        if found is not None:
            return found
    return {}


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Set a module and all its parts to evaluation inside a ``with`` block, and each part back to its mode afterwards.

    Dropout is off then and draws no random number. All else that depends on the mode, such as batch norms, runs as in
    evaluation, too.
    """
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


def weights_before_dropout(module: Any, given: Given) -> Tensor:
    """Return the attention weights that a module passes to its ``attn_drop``: ``(B, H, N, M)`` or ``(B nW, H, N, N)``.

    The latter is the shape of attention inside windows.
    """
    return arguments_of(module.attn_drop, 'forward', module, given)[0]


class _Products(TorchFunctionMode):
    """Torch function mode that keeps both factors of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm):
            self.factors.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def values_times_weights(module: Any, given: Given) -> Tensor:
    """Return the values that a module multiplies by its attention weights, in the layout of that product."""
    with _Products() as products:
        weights = weights_before_dropout(module, given)
    # Without dropout the weights are the same memory before and after.
    (values,) = (second for first, second in products.factors if first.data_ptr() == weights.data_ptr())
    return values


def unfused(read: Read) -> Read:
    """Wrap a reading function for timm's modules: it runs without fused attention, which forms no weights."""

    def read_unfused(module: Any, given: Given) -> Tensor:
        fused = module.fused_attn
        module.fused_attn = False
        try:
            return read(module, given)
        finally:
            module.fused_attn = fused

    return read_unfused


def as_tensor(read: Callable[[Any, Given], list[int]]) -> Read:
    """Wrap a reading function that returns numbers, so that it returns a tensor."""
    return lambda module, given: torch.tensor(read(module, given))


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


def deformable_readings(sample: Callable[[Any, Given], Sampled], gate: Any = None) -> dict[str, Read]:
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
