"""Two ways to write deformable attention into an exported graph: gathered rows, or GridSample nodes.

TensorRT compiles deformable attention of GridSample nodes wrongly and says nothing (NVIDIA/TensorRT issue 4813), so
gathering is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.ops import backend as choice
from mmgate.ops.backend import Backend
from mmgate.ops.deformable import grid_sample
from mmgate.ops.deformable.reference import corners
from mmgate.ops.deformable.samples import Samples, one_point_levels, weighted

from .sizes import SymbolicSizes
from .tracing import Replacement, replaced


def gather(samples: Samples) -> Tensor:
    """Compute multi-scale deformable attention by one gather and one matrix product, for export.

    The rows of all corners are gathered by one index, which runtimes do at memory speed, and summed by one matrix
    product.
    """
    value, spatial_shapes, level_start_index, locations, weights, _ = one_point_levels(weighted(samples))
    batch, tokens, heads, dim = value.shape
    queries = weights.shape[1]
    levels, points = weights.shape[3:]
    head = torch.arange(heads, device=value.device)[:, None, None]
    image = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    first = (image * tokens + level_start_index[:, None]) * heads + head  # (B, 1, H, L, 1)
    rows = []
    shares = []
    for index, bilinear in corners(spatial_shapes, locations.to(weights.dtype)):
        rows.append(first + index * heads)
        shares.append(weights * bilinear)
    shape = (batch, queries, heads, 4 * levels * points)
    row = torch.stack(rows, 3).view(shape)
    share = torch.stack(shares, 3).view(shape)
    gathered = value.reshape(-1, dim)[row].to(share.dtype)  # (B, Q, H, 4 L P, D)
    return (share[..., None, :] @ gathered).view(batch, queries, heads * dim).to(value.dtype)


def grid(samples: Samples) -> Tensor:
    """Compute multi-scale deformable attention with ``grid_sample``, level by level, for export.

    Tokens of the levels follow one another.
    """
    finished = weighted(samples)
    # mmdet's sizes are numbers and symbols, see :class:`SymbolicSizes`; those of a tensor are kept where it is made.
    if not isinstance(finished.spatial_shapes, Tensor):
        areas = [height * width for height, width in finished.spatial_shapes.tolist()]
        starts: Any = SymbolicSizes([sum(areas[:level]) for level in range(len(areas))])
        finished = finished._replace(level_start_index=starts)
    return grid_sample.sum_samples(finished)


SAMPLERS: dict[str, Callable[[Samples], Tensor]] = {'gather': gather, 'grid': grid}


def check_form(name: str) -> None:
    """Raise ConfigError if ``name`` is none of :data:`SAMPLERS`."""
    if name not in SAMPLERS:
        raise ConfigError(f'msda={name!r}: it is one of {", ".join(map(repr, SAMPLERS))}.')


def sampled_by(name: str) -> Replacement:
    """Return the replacement that makes a captured graph sample by one of :data:`SAMPLERS`.

    :func:`.tracing.traceable` takes it.
    """
    backends = (Backend(name, SAMPLERS[name], exportable=True),)
    return choice, 'OPERATORS', choice.OPERATORS | {'ms_deform_attn': backends}


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
