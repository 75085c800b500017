"""Two ways to write deformable attention into an exported graph: gathered rows, or GridSample nodes.

TensorRT compiles deformable attention of GridSample nodes wrongly and says nothing (NVIDIA/TensorRT issue 4813), so
gathering is the default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.ops.backend import Backend
from mmgate.ops.ms_deform_attn import grid_sample
from mmgate.ops.ms_deform_attn.reference import corners
from mmgate.ops.ms_deform_attn.uneven import Uneven, as_given, by_sample
from mmgate.ops.ms_deform_attn.weights import attend_by

from .sizes import SymbolicSizes
from .tracing import Replacement, replaced

# A function of the same name hides the package in ``mmgate.ops``.
package = importlib.import_module('mmgate.ops.ms_deform_attn')


def gather(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Sample multi-scale deformable attention by one gather and one matrix product, for export.

    The arguments are those of :func:`mmgate.ops.ms_deform_attn.reference.sample`.

    The rows of all corners are gathered by one index, which runtimes do at memory speed, and summed by one matrix
    product.
    """
    batch, tokens, heads, dim = value.shape
    queries = weights.shape[1]
    levels, points = weights.shape[3:]
    head = torch.arange(heads, device=value.device)[:, None, None]
    image = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    first = (image * tokens + level_start_index[:, None]) * heads + head  # (B, 1, H, L, 1)
    rows = []
    shares = []
    for index, bilinear in corners(spatial_shapes, sampling_locations.to(weights.dtype)):
        rows.append(first + index * heads)
        shares.append(weights * bilinear)
    shape = (batch, queries, heads, 4 * levels * points)
    row = torch.stack(rows, 3).view(shape)
    share = torch.stack(shares, 3).view(shape)
    samples = value.reshape(-1, dim)[row].to(share.dtype)  # (B, Q, H, 4 L P, D)
    return (share[..., None, :] @ samples).view(batch, queries, heads * dim).to(value.dtype)


def grid(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    weights: Tensor,
    num_points: Sequence[int] | None = None,
) -> Tensor:
    """Sample multi-scale deformable attention with ``grid_sample``, level by level, for export.

    The arguments are those of :func:`mmgate.ops.ms_deform_attn.grid_sample.sample`.

    Tokens of the levels follow one another.
    """
    starts: Any = level_start_index
    # mmdet's sizes are numbers and symbols, see :class:`SymbolicSizes`; those of a tensor are kept where it is made.
    if not isinstance(spatial_shapes, Tensor):
        areas = [height * width for height, width in spatial_shapes.tolist()]
        starts = SymbolicSizes([sum(areas[:level]) for level in range(len(areas))])
    return grid_sample.sample(value, spatial_shapes, starts, sampling_locations, weights, num_points)


SAMPLERS: dict[str, tuple[Callable[..., Tensor], Uneven]] = {'gather': (gather, by_sample), 'grid': (grid, as_given)}


def check_form(name: str) -> None:
    """Raise ConfigError if ``name`` is none of :data:`SAMPLERS`."""
    if name not in SAMPLERS:
        raise ConfigError(f'msda={name!r}: it is one of {", ".join(map(repr, SAMPLERS))}.')


def sampled_by(name: str) -> Replacement:
    """Return the replacement that makes a captured graph sample by one of :data:`SAMPLERS`.

    :func:`.tracing.traceable` takes it.
    """
    return package, 'BACKENDS', (Backend(name, attend_by(*SAMPLERS[name]), exportable=True),)


@contextmanager
def sampling_by(name: str) -> Iterator[None]:
    """Choose inside a ``with`` block how deformable attention is exported, for exporters of other packages.

    The forms are those of :data:`SAMPLERS`.

    Raises:
        ConfigError: There is no form of that name.
    """
    check_form(name)
    with replaced(sampled_by(name)):
        yield
