"""Deformable attention with a different number of sampling points on each level, as in D-FINE.

With ``P_l`` points on level ``l``, a head has ``N = P_1 + .. + P_L`` samples, those of one level after those of
another. Logits, gate and points then have one axis ``N`` instead of the axes ``L`` and ``P``, and the softmax goes over
it.

A backend that wants equal numbers gets such samples in one of two ways, see ``samples.py``: each sample has a level
with one point, which costs nothing if levels may overlap, or levels are filled up with samples of weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmgate.errors import ConfigError

OFF = -9.0  # a location that lies off every map


def check_points(num_points: Sequence[int], levels: int) -> tuple[int, ...]:
    """Check the numbers of sampling points, and return one for each level as a tuple.

    Args:
        num_points: Numbers of points.
        levels: Number of levels L.

    Raises:
        ConfigError: There is another number of them, or one is no positive integer.
    """
    if not isinstance(num_points, Sequence):
        raise ConfigError(f'num_points={num_points!r} must be a list of {levels} positive integers, one a level.')
    counts = tuple(num_points)
    if len(counts) != levels:
        raise ConfigError(f'num_points={[*counts]} has {len(counts)} numbers for {levels} levels; give one for each.')
    # True is an int, and would be one point.
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
        raise ConfigError(f'num_points={[*counts]} must have a positive integer for each level.')
    return counts


def points_of_levels(num_points: int | Sequence[int], levels: int) -> int | tuple[int, ...]:
    """Return one number of sampling points if all levels have the same, else one number for each level.

    Raises:
        ConfigError: The one number is not positive; or see :func:`check_points`.
    """
    if isinstance(num_points, int):
        if num_points < 1 or isinstance(num_points, bool):
            raise ConfigError(f'num_points={num_points} must be a positive integer.')
        return num_points
    counts = check_points(num_points, levels)
    return counts[0] if len(set(counts)) == 1 else counts


def axes_of_samples(num_points: int | Sequence[int], levels: int) -> tuple[int, ...]:
    """Return the shape of a head's samples: ``(L, P)``, or ``(N,)`` if levels have different numbers of points."""
    return (levels, num_points) if isinstance(num_points, int) else (sum(num_points),)


def spread(x: Tensor, num_points: Sequence[int], axis: int) -> Tensor:
    """Repeat the entry of each level for each of its sampling points: L entries along an axis become N."""
    parts = x.split(1, axis)
    kept = [-1] * parts[0].dim()
    repeated = []
    # No index has to be copied to the device, and exports hold no loop.
    for part, count in zip(parts, num_points, strict=True):
        sizes = list(kept)
        sizes[axis] = count
        repeated.append(part.expand(sizes))
    return torch.cat(repeated, axis)


def pad_points(x: Tensor, num_points: Sequence[int], fill: float, axis: int = 3) -> Tensor:
    """Split an axis of N samples into levels and points (L, P), padded with ``fill`` to the largest number P."""
    most = max(num_points)
    levels = []
    for part in x.split(list(num_points), axis):
        missing = list(part.shape)
        missing[axis] = most - missing[axis]
        levels.append(torch.cat([part, part.new_full(missing, fill)], axis))
    return torch.stack(levels, axis)
