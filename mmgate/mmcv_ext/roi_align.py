r"""RoIAlign in torch: one ``embedding_bag`` averages the bilinear samples of each bin.

    out[r, y, x] = sum over pixels (i, j) of  wy[r, y, i] wx[r, x, j]  map[b_r, i, j]

A bilinear sample is separable, and so is an average over a grid of them: the weights of the rows of a bin and the
weights of its columns are small vectors, over the pixels that the bin touches. Layout: map as rows (B * H * W, C); a
bag for each bin. The backward pass turns the sum around: a bag for each row.

Source: Mask R-CNN (arXiv 1703.06870); detectron2's ``aligned``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .peer import torchvision_ops

PIXELS = 1 << 21  # weighted pixels at a time: about 50 bytes each


def roi_align(
    x: Tensor, rois: Tensor, size: tuple[int, int], scale: float, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Average the map over the bins of each region.

    Args:
        x: Map ``(B, C, H, W)``, floating point; 16 bits are summed in float32.
        rois: ``(R, 5)`` as (index of the image, x1, y1, x2, y2).
        size: Height and width of the output, in bins.
        scale: Pixels of the map for a unit of the regions' coordinates.
        sampling_ratio: Samples of a bin along each axis; 0 takes one for each pixel that a bin is long, rounded up.
        aligned: Pixel centres are at half-integers. If False, they are at integers, and a region is at least one pixel
            long and wide.

    Returns:
        ``(R, C, *size)`` in the dtype of ``x``. Samples more than a pixel outside of the map are 0.
    """
    if (peer := torchvision_ops(x)) is not None:
        return peer.roi_align(x, rois.to(x.dtype), size, scale, sampling_ratio, aligned)
    rows = _rows(x)
    output = rows.new_zeros(len(rois), size[0] * size[1], x.shape[1])
    for part, index, weight in _bins(x.shape, rois, size, scale, sampling_ratio, aligned):
        output[part] = F.embedding_bag(index, rows, per_sample_weights=weight.to(rows.dtype), mode='sum').view_as(
            output[part]
        )
    return output.transpose(1, 2).reshape(len(rois), x.shape[1], *size).to(x.dtype)


def roi_align_gradient(
    grad: Tensor, rois: Tensor, shape: torch.Size, scale: float, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Return the gradient of the map, of this ``shape``, from the gradient of :func:`roi_align`'s output."""
    size = (grad.shape[2], grad.shape[3])
    if torchvision_ops(grad) is not None:
        numbers = (scale, *size, *shape, sampling_ratio, aligned)
        return torch.ops.torchvision._roi_align_backward(grad, rois.to(grad.dtype), *numbers)
    bins = _rows(grad).view(len(rois), size[0] * size[1], shape[1])
    rows = bins.new_zeros(shape[0] * shape[2] * shape[3], shape[1])
    for part, index, weight in _bins(shape, rois, size, scale, sampling_ratio, aligned):
        _add_by_row(rows, index, weight.to(rows.dtype).flatten(), bins[part].flatten(0, 1))
    return rows.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2).to(grad.dtype)


def _add_by_row(grad_rows: Tensor, index: Tensor, weights: Tensor, grad_bins: Tensor) -> None:
    """Add the gradient of each sample, ``weights * grad_bins``, to the row of the map from which it was read."""
    order = index.flatten().sort()
    counts = torch.bincount(order.values, minlength=len(grad_rows))
    offsets = counts.cumsum(0) - counts
    bag = order.indices // index.shape[1]
    grad_rows += F.embedding_bag(bag, grad_bins, offsets, per_sample_weights=weights[order.indices], mode='sum')


def _rows(x: Tensor) -> Tensor:
    """Return a map ``(B, C, H, W)`` as rows ``(B * H * W, C)``."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _bins(
    shape: torch.Size, rois: Tensor, size: tuple[int, int], scale: float, sampling_ratio: int, aligned: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield regions ``(n,)`` with the rows of the map that each of their bins reads and the weights of these.

    Rows and weights are ``(n * h * w, P)`` each. Regions whose bins touch about as many pixels come together.
    """
    if not len(rois) or not shape.numel():
        return
    rois = rois.to(torch.promote_types(rois.dtype, torch.float32))
    if not rois.isfinite().all():
        raise ValueError('RoIAlign got boxes that are NaN or infinite, as of a training that has diverged.')
    image = rois[:, 0].long()
    corners = rois[:, [2, 1, 4, 3]] * scale - 0.5 * aligned  # (y1, x1, y2, x2)
    start = corners[:, :2]
    length = (corners[:, 2:] - start).clamp(min=0 if aligned else 1)
    bin_length = length / length.new_tensor(size)
    samples = bin_length.ceil() if sampling_ratio <= 0 else torch.full_like(bin_length, sampling_ratio)
    # Pixels from the one before the first sample to the one after the last
    pixels = ((samples - 1).clamp(min=0) * bin_length / samples.clamp(min=1)).ceil() + 2
    groups = defaultdict(list)
    for region, (*most_samples, height, width) in enumerate(torch.cat([samples, pixels], 1).int().tolist()):
        groups[height.bit_length(), width.bit_length()].append((region, *most_samples, height, width))
    for group in groups.values():
        most = [max(column) for column in list(zip(*group, strict=True))[1:]]
        window = [min(most[2 + axis], shape[2 + axis] + 1) for axis in (0, 1)]
        step = max(1, PIXELS // (size[0] * window[0] * max(size[1] * window[1], most[0])))
        for first in range(0, len(group), step):
            part = torch.tensor([region for region, *_ in group[first : first + step]], device=rois.device)
            (y, wy), (x, wx) = (
                _axis(start[part, a], bin_length[part, a], samples[part, a], most[a], window[a], size[a], shape[2 + a])
                for a in (0, 1)
            )
            row = image[part, None, None] * shape[2] + y  # (n, h, Py)
            index = row[:, :, None, :, None] * shape[3] + x[:, None, :, None, :]  # (n, h, w, Py, Px)
            weight = wy[:, :, None, :, None] * wx[:, None, :, None, :]
            bags = len(part) * size[0] * size[1]
            yield part, index.reshape(bags, -1), weight.reshape(bags, -1)


def _axis(
    start: Tensor, bin_length: Tensor, samples: Tensor, most: int, window: int, bins: int, end: int
) -> tuple[Tensor, Tensor]:
    """Return the pixels that each bin of regions touches along one axis and their weights, ``(n, bins, window)`` each.

    ``most`` is the largest number of samples, ``end`` the length of the map.
    """
    count = samples.clamp(min=1)[:, None, None]
    k = torch.arange(max(1, most), device=start.device)
    bin_start = torch.arange(bins, device=start.device) * bin_length[:, None] + start[:, None]
    at = bin_start[:, :, None] + (k + 0.5) * bin_length[:, None, None] / count  # (n, bins, samples)
    used = (k < samples[:, None, None]) & (at >= -1) & (at <= end)
    at = at.clamp(0, end - 1)
    pixel = at[:, :, :1].floor() + torch.arange(window, device=start.device)  # (n, bins, window)
    near = (1 - (at[:, :, None] - pixel[..., None]).abs()).clamp(min=0)  # bilinear weights (n, bins, window, samples)
    return pixel.clamp(max=end - 1).long(), (near * used[:, :, None]).sum(-1) / count
