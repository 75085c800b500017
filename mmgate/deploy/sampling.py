"""Deformable attention in exported graphs: gathered rows instead of GridSample nodes.

TensorRT compiles deformable attention of GridSample nodes wrongly and says nothing (NVIDIA/TensorRT issue 4813).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mmgate.ops import backend as choice
from mmgate.ops.backend import Backend
from mmgate.ops.deformable.reference import corners
from mmgate.ops.deformable.samples import Samples, one_point_levels, weighted

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


def gathering() -> Replacement:
    """Return the replacement that makes a captured graph sample by :func:`gather`; :func:`.tracing.traceable` takes it.

    Its value is our table of operators with this one backend for deformable attention.
    """
    backends = (Backend('gather', gather, exportable=True),)
    return choice, 'OPERATORS', choice.OPERATORS | {'ms_deform_attn': backends}


@contextmanager
def exportable_sampling() -> Iterator[None]:
    """Write deformable attention as gathered rows inside a ``with`` block, for exporters of other packages."""
    with replaced(gathering()):
        yield
