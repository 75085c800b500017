r"""RoIAlign over the levels of a pyramid: ONNX's operator, or a loop of plain ones.

    out[r, i, j] = mean over the n_y n_x points of bin (i, j) of  bilinear V_l(point)

Layout: maps (B, C, H_l, W_l); RoIs (R, 5) as (image, x1, y1, x2, y2) in pixels of the image; output (R, C, h, w).
The number of points follows the RoI's size where ``sampling_ratio`` is 0, hence the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .sizes import Sizes
from .tracing import repeat, writes_onnx


@dataclass(frozen=True)
class Align:
    """Options of mmcv's ``RoIAlign``.

    Attributes:
        height: Bins down a RoI.
        width: Bins across it.
        sampling_ratio: Points along a bin; 0 for one a pixel.
        aligned: Whether pixel centres lie at half-integers.
    """

    height: int
    width: int
    sampling_ratio: int
    aligned: bool


def pyramid_roi_align(
    maps: Sequence[Tensor], rois: Tensor, levels: Tensor, scales: Sequence[float], options: Align
) -> Tensor:
    """Return the features of each RoI from the level that it is assigned to.

    Args:
        maps: ``(B, C, H_l, W_l)`` for each level.
        rois: ``(R, 5)`` as (image, x1, y1, x2, y2).
        levels: ``(R,)``, int64.
        scales: Pixels of a level to a pixel of the image.
        options: How to sample.

    Returns:
        ``(R, C, h, w)``.
    """
    if not writes_onnx():
        return _sampled(maps, rois, levels, scales, options)
    output: Any = None  # there is one level at least
    for level, (map_, scale) in enumerate(zip(maps, scales, strict=True)):
        here = (levels == level).to(rois.dtype)[:, None]
        # a RoI of no size has no points: its features are 0, and cost nothing
        boxes, images = rois[:, 1:] * here, rois[:, 0].long()
        features = _node(map_, boxes, images, scale, options) * here[..., None, None]
        output = output + features if level else features
    return output


def _node(map_: Tensor, boxes: Tensor, images: Tensor, scale: float, options: Align) -> Tensor:
    """Return the features ``(R, C, h, w)`` of boxes ``(R, 4)`` in images ``(R,)`` from one level: a RoiAlign."""
    attributes: dict[str, Any] = dict(
        coordinate_transformation_mode='half_pixel' if options.aligned else 'output_half_pixel',
        output_height=options.height,
        output_width=options.width,
        sampling_ratio=options.sampling_ratio,
        spatial_scale=float(scale),
    )
    shape = (boxes.shape[0], map_.shape[1], options.height, options.width)
    return torch.onnx.ops.symbolic('RoiAlign', (map_, boxes, images), attributes, dtype=map_.dtype, shape=shape)


def _sampled(maps: Sequence[Tensor], rois: Tensor, levels: Tensor, scales: Sequence[float], options: Align) -> Tensor:
    """Sample point after point of every bin, all levels at once."""
    rows = torch.cat([map_.flatten(2).transpose(1, 2) for map_ in maps], 1)  # (B, S, C)
    tokens, channels = rows.shape[1:]
    rows = rows.reshape(-1, channels)
    areas = [map_.shape[2] * map_.shape[3] for map_ in maps]
    table = Sizes([[map_.shape[2], map_.shape[3], sum(areas[:level])] for level, map_ in enumerate(maps)]).tensor
    # (R,) of each RoI's level, in memory of their own: what a loop closes over may not overlap
    height, width, start = (column.clone() for column in table.to(rois.device)[levels].unbind(1))
    first = rois[:, 0].long() * tokens + start
    scale = rois.new_tensor(list(scales))[levels]

    def axis(low: Tensor, high: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return where bins begin ``(R, bins)``, their size and their points ``(R,)``."""
        low, high = low * scale - 0.5 * options.aligned, high * scale - 0.5 * options.aligned
        length = high - low if options.aligned else (high - low).clamp(min=1)
        size = length / bins
        points = size.ceil() if options.sampling_ratio == 0 else torch.full_like(size, options.sampling_ratio)
        begins = low[:, None] + torch.arange(bins, device=low.device, dtype=low.dtype) * size[:, None]
        return begins, size, points.long()

    y0, size_y, n_y = axis(rois[:, 2], rois[:, 4], options.height)
    x0, size_x, n_x = axis(rois[:, 1], rois[:, 3], options.width)
    total = n_y.clamp(min=0) * n_x.clamp(min=0)  # (R,)

    def corners(begins: Tensor, size: Tensor, count: Tensor, number: Tensor, limit: Tensor) -> tuple[Tensor, ...]:
        """Return the two pixels of point ``number`` in each bin, the share of the second, and whether it counts."""
        at = begins + ((number + 0.5) * size / count.clamp(min=1))[:, None]
        end = limit[:, None].to(at.dtype)
        inside = (at >= -1) & (at <= end)
        at = torch.minimum(at.clamp(min=0), end - 1)
        low = at.floor()
        return low.long(), torch.minimum(low + 1, end - 1).long(), at - low, inside

    def goes_on(step: Tensor, output: Tensor) -> Tensor:
        return step < total.max()

    def take(step: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        row, column = step // n_x.clamp(min=1), step % n_x.clamp(min=1)
        top, bottom, fy, in_y = corners(y0, size_y, n_y, row, height)  # (R, h)
        left, right, fx, in_x = corners(x0, size_x, n_x, column, width)  # (R, w)
        counts = (in_y & (step < total)[:, None])[:, :, None] & in_x[:, None]  # (R, h, w)
        added = output
        for ys, wy in ((top, 1 - fy), (bottom, fy)):
            for xs, wx in ((left, 1 - fx), (right, fx)):
                index = first[:, None, None] + ys[:, :, None] * width[:, None, None] + xs[:, None]
                weight = torch.where(counts, wy[:, :, None] * wx[:, None], 0)
                added = added + rows[index] * weight[..., None]  # (R, h, w, C)
        return step + 1, added

    step = torch.zeros((), dtype=torch.int64, device=rois.device)
    output = rows.new_zeros(rois.shape[0], options.height, options.width, channels)
    _, output = repeat(goes_on, take, (step, output))
    mean = output / total.clamp(min=1).to(output.dtype)[:, None, None, None]
    return mean.permute(0, 3, 1, 2)
